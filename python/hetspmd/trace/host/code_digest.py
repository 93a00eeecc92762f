"""What a function's code does, as a text that is the same in every process."""

from __future__ import annotations

import functools
import hashlib
from types import CodeType


@functools.cache
def code_digest(code: CodeType) -> str:
    """Tells functions of the same name apart by what they do."""
    hasher = hashlib.sha1(code.co_code)
    for constant in (*code.co_consts, *code.co_names):
        hasher.update(_constant(constant).encode(errors="replace"))
    return hasher.hexdigest()[:12]


def _constant(value: object) -> str:
    if isinstance(value, CodeType):
        return code_digest(value)
    if isinstance(value, frozenset):  # its order is another one in each process
        return f"frozenset({sorted(map(repr, value))})"
    return repr(value)
