"""Forms of a distributed tensor: the ``I`` of a property ``e | I`` (HAP 4.2).

A form is a small integer, the same in Python, in Rust and in problem files:

====  ==================  =====================================================
code  text                meaning
====  ==================  =====================================================
0     ``Identity``        every device holds e
1     ``All-Reduce``      the devices hold summands of e
2+d   ``All-Gather(d)``   the devices hold consecutive slices of e along dim d
====  ==================  =====================================================
"""

from __future__ import annotations

import re
from typing import Final, TypeAlias

Form: TypeAlias = int

IDENTITY: Final[Form] = 0
ALL_REDUCE: Final[Form] = 1

__all__ = [
    "ALL_REDUCE",
    "IDENTITY",
    "Form",
    "all_gather",
    "available",
    "form_text",
    "is_sharded",
    "parse_form",
    "sharded_dim",
]


def all_gather(dim: int) -> Form:
    """The form of a tensor that is sharded along ``dim`` (non-negative)."""
    if dim < 0:
        raise ValueError(f"dim must not be negative, got {dim}")
    return 2 + dim


def is_sharded(form: Form) -> bool:
    """Whether the form is ``All-Gather(d)`` for some d."""
    return form >= 2


def sharded_dim(form: Form) -> int:
    """The d of ``All-Gather(d)``."""
    if form < 2:
        raise ValueError(f"{form_text(form)} is not sharded")
    return form - 2


def available(have: Form, want: Form) -> bool:
    """Whether ``want`` follows from ``have`` without communication (slice or mask of Identity)."""
    return have in (want, IDENTITY)


def form_text(form: Form) -> str:
    """``Identity``, ``All-Reduce`` or ``All-Gather(d)``."""
    if form == IDENTITY:
        return "Identity"
    if form == ALL_REDUCE:
        return "All-Reduce"
    return f"All-Gather({form - 2})"


_SHARD = re.compile(r"(?:all-gather|shard)\((\d+)\)\Z", re.IGNORECASE)


def parse_form(text: str) -> Form:
    """Inverse of :func:`form_text`; also takes ``replicated``, ``partial`` and ``shard(d)``."""
    lowered = text.strip().lower()
    if lowered in ("identity", "replicated"):
        return IDENTITY
    if lowered in ("all-reduce", "partial"):
        return ALL_REDUCE
    if match := _SHARD.match(text.strip()):
        return all_gather(int(match[1]))
    raise ValueError(f"{text!r} is no form; write replicated, partial or shard(d), such as shard(0)")
