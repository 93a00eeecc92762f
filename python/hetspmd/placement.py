"""Placements: how a distributed tensor lies on the devices (DTensor's word), the ``I`` of a property ``e | I``
(HAP 4.2).

A placement is a small integer, the same in Python, in Rust and in problem files:

====  ==================  ==================  =====================================================
code  DTensor             HAP                 meaning
====  ==================  ==================  =====================================================
0     ``replicated``      ``Identity``        every device holds e
1     ``partial``         ``All-Reduce``      the devices hold summands of e
2+d   ``shard(d)``        ``All-Gather(d)``   the devices hold consecutive slices of e along dim d
16+d                      ``All-Gather(d)'``  the same, with the lengths of the segment that e comes from
====  ==================  ==================  =====================================================

The last is a placement of copies of tensors at cuts between segments only (:mod:`hetspmd.trace.cuts`). Dims are
below ``DIMS`` in both; a tensor with more is never divided along those beyond. Users write either spelling.
"""

from __future__ import annotations

import re
from typing import Final, TypeAlias

Placement: TypeAlias = int

REPLICATE: Final[Placement] = 0
PARTIAL: Final[Placement] = 1
DIMS: Final = 14

__all__ = [
    "DIMS",
    "PARTIAL",
    "REPLICATE",
    "Placement",
    "after_cut",
    "available",
    "before_cut",
    "in_our_words",
    "is_before_cut",
    "is_sharded",
    "parse_placement",
    "placement_text",
    "same_dim",
    "shard",
    "sharded_dim",
]


def shard(dim: int) -> Placement:
    """The placement of a tensor that is sharded along ``dim``, below ``DIMS``."""
    if not 0 <= dim < DIMS:
        raise ValueError(f"dim must be at least 0 and less than {DIMS}, got {dim}")
    return 2 + dim


def before_cut(dim: int) -> Placement:
    """The placement of a copy at a cut that is sharded along ``dim`` as what it is a copy of."""
    return shard(dim) + DIMS


def is_before_cut(placement: Placement) -> bool:
    """Whether the placement is ``shard(d)'`` for some d."""
    return placement >= 2 + DIMS


def is_sharded(placement: Placement) -> bool:
    """Whether the placement is ``shard(d)`` or ``shard(d)'`` for some d."""
    return placement >= 2


def sharded_dim(placement: Placement) -> int:
    """The d of ``shard(d)`` and of ``shard(d)'``."""
    if placement < 2:
        raise ValueError(f"{placement_text(placement)} is not sharded")
    return (placement - 2) % DIMS


def after_cut(placement: Placement) -> Placement:
    """``All-Gather(d)`` of ``All-Gather(d)'``; any other placement is itself."""
    return placement - DIMS if is_before_cut(placement) else placement


def same_dim(one: Placement, other: Placement) -> bool:
    """Whether both are sharded along the same dim."""
    return is_sharded(one) and is_sharded(other) and sharded_dim(one) == sharded_dim(other)


def available(have: Placement, want: Placement) -> bool:
    """Whether ``want`` follows from ``have`` without communication (slice or mask of a replicated tensor)."""
    return have in (want, REPLICATE)


def placement_text(placement: Placement) -> str:
    """``replicated``, ``partial``, ``shard(d)`` or ``shard(d)'``."""
    if placement == REPLICATE:
        return "replicated"
    if placement == PARTIAL:
        return "partial"
    return f"shard({sharded_dim(placement)})" + ("'" if is_before_cut(placement) else "")


def in_our_words(text: str) -> str:
    """A text with HAP's words for placements, in ours: ``{All-Gather(0), Identity} {All-Reduce}`` is
    ``{shard(0), replicated} {partial}``."""
    text = text.replace("Identity", "replicated").replace("All-Reduce", "partial")
    return text.replace("All-Gather(", "shard(")


_SHARD = re.compile(r"(?:all-gather|shard)\((\d+)\)\Z", re.IGNORECASE)


def parse_placement(text: str) -> Placement:
    """Inverse of :func:`placement_text`; also takes HAP's words, ``Identity``, ``All-Reduce`` and
    ``All-Gather(d)``."""
    lowered = text.strip().lower()
    if lowered in ("identity", "replicated"):
        return REPLICATE
    if lowered in ("all-reduce", "partial"):
        return PARTIAL
    if (match := _SHARD.match(text.strip())) and int(match[1]) < DIMS:
        return shard(int(match[1]))
    raise ValueError(f"{text!r} is no placement; write replicated, partial or shard(d), such as shard(0)")
