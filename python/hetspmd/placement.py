"""Forms of a distributed tensor: the ``I`` of a property ``e | I`` (HAP 4.2).

A form is a small integer, the same in Python, in Rust and in problem files:

====  ==================  =====================================================
code  text                meaning
====  ==================  =====================================================
0     ``Identity``        every device holds e
1     ``All-Reduce``      the devices hold summands of e
2+d   ``All-Gather(d)``   the devices hold consecutive slices of e along dim d
16+d  ``All-Gather(d)'``  the same, with the lengths of the segment that e comes from
====  ==================  =====================================================

The last is a form of copies of tensors at cuts between segments only (:mod:`hetspmd.trace.cuts`). Dims are below
``DIMS`` in both; a tensor with more is never divided along those beyond.
"""

from __future__ import annotations

import re
from typing import Final, TypeAlias

Form: TypeAlias = int

IDENTITY: Final[Form] = 0
ALL_REDUCE: Final[Form] = 1
DIMS: Final = 14

__all__ = [
    "ALL_REDUCE",
    "DIMS",
    "IDENTITY",
    "Form",
    "all_gather",
    "available",
    "before_cut",
    "form_text",
    "is_before_cut",
    "is_sharded",
    "parse_form",
    "sharded_dim",
]


def all_gather(dim: int) -> Form:
    """The form of a tensor that is sharded along ``dim``, below ``DIMS``."""
    if not 0 <= dim < DIMS:
        raise ValueError(f"dim must be at least 0 and less than {DIMS}, got {dim}")
    return 2 + dim


def before_cut(dim: int) -> Form:
    """The form of a copy at a cut that is sharded along ``dim`` as what it is a copy of."""
    return all_gather(dim) + DIMS


def is_before_cut(form: Form) -> bool:
    """Whether the form is ``All-Gather(d)'`` for some d."""
    return form >= 2 + DIMS


def is_sharded(form: Form) -> bool:
    """Whether the form is ``All-Gather(d)`` or ``All-Gather(d)'`` for some d."""
    return form >= 2


def sharded_dim(form: Form) -> int:
    """The d of ``All-Gather(d)`` and of ``All-Gather(d)'``."""
    if form < 2:
        raise ValueError(f"{form_text(form)} is not sharded")
    return (form - 2) % DIMS


def available(have: Form, want: Form) -> bool:
    """Whether ``want`` follows from ``have`` without communication (slice or mask of Identity)."""
    return have in (want, IDENTITY)


def form_text(form: Form) -> str:
    """``Identity``, ``All-Reduce``, ``All-Gather(d)`` or ``All-Gather(d)'``."""
    if form == IDENTITY:
        return "Identity"
    if form == ALL_REDUCE:
        return "All-Reduce"
    return f"All-Gather({sharded_dim(form)})" + ("'" if is_before_cut(form) else "")


_SHARD = re.compile(r"(?:all-gather|shard)\((\d+)\)\Z", re.IGNORECASE)


def parse_form(text: str) -> Form:
    """Inverse of :func:`form_text`; also takes ``replicated``, ``partial`` and ``shard(d)``."""
    lowered = text.strip().lower()
    if lowered in ("identity", "replicated"):
        return IDENTITY
    if lowered in ("all-reduce", "partial"):
        return ALL_REDUCE
    if (match := _SHARD.match(text.strip())) and int(match[1]) < DIMS:
        return all_gather(int(match[1]))
    raise ValueError(f"{text!r} is no form; write replicated, partial or shard(d), such as shard(0)")
