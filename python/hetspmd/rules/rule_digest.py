"""What a rule does, as a short text: ranks whose rules of an op differ would not run the same program.

The text is of the code of the function and of the functions of its module that it names, with the values around
them. It is the same in all processes of one version of Python.
"""

from __future__ import annotations

import dis
import hashlib
import sys
from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import Final

from hetspmd.rules.registry import RuleFunction, registered, rule_function
from hetspmd.trace.host.code_digest import code_digest

_PLAIN: Final = (str, int, float, bool, bytes, frozenset, type(None))
_OURS: Final = "hetspmd."
_ANNOTATED: Final = "rule.<locals>.annotated"
"""The function that :func:`hetspmd.rules.registry.rule` makes of an annotation."""


def rule_digests() -> dict[str, str]:
    """Of the rules that are not hetspmd's own, by op."""
    found: dict[str, str] = {}
    for op in registered():
        function = rule_function(op)
        if function is not None and not _is_ours(function):
            found[op] = rule_digest(function)
    return found


def python_version() -> str:
    """Digests are comparable within it."""
    return f"{sys.implementation.name} {sys.version_info.major}.{sys.version_info.minor}"


def rule_digest(function: RuleFunction) -> str:
    """Of one rule."""
    hasher = hashlib.sha256()
    for text in _texts(function, set()):
        hasher.update(text.encode(errors="replace"))
        hasher.update(b"\0")
    return hasher.hexdigest()[:16]


def _is_ours(function: RuleFunction) -> bool:
    """Whether hetspmd has registered it; what a user's annotation becomes is a function of hetspmd, too."""
    annotated = getattr(function, "__qualname__", "") == _ANNOTATED
    return getattr(function, "__module__", "").startswith(_OURS) and not annotated


def _texts(value: object, seen: set[int]) -> Iterator[str]:
    """What a value says: of functions their code, with what they refer to, and of plain values themselves."""
    if isinstance(value, _PLAIN):
        yield repr(sorted(map(repr, value))) if isinstance(value, frozenset) else repr(value)
        return
    if isinstance(value, (tuple, list)):
        for part in value:
            yield from _texts(part, seen)
        return
    if not isinstance(value, FunctionType):
        yield f"{type(value).__module__}.{type(value).__qualname__}"
        return
    if id(value) in seen:
        return
    seen.add(id(value))
    yield code_digest(value.__code__)
    yield from _texts(value.__defaults__ or (), seen)
    for name, default in sorted((value.__kwdefaults__ or {}).items()):
        yield name
        yield from _texts(default, seen)
    for cell in value.__closure__ or ():
        try:
            yield from _texts(cell.cell_contents, seen)
        except ValueError:  # a variable that is not yet there
            yield "empty"
    for name in sorted(set(_globals(value.__code__))):
        other = value.__globals__.get(name, value)  # itself where it is no variable of the module
        own = isinstance(other, FunctionType) and other.__module__ == value.__module__
        if own or isinstance(other, _PLAIN):
            yield name
            yield from _texts(other, seen)


def _globals(code: CodeType) -> Iterator[str]:
    """The variables of its module that code reads. Names of attributes are none of them: many scripts have a
    variable ``rank``, which is another number on each."""
    for instruction in dis.get_instructions(code):
        if instruction.opname == "LOAD_GLOBAL":
            yield str(instruction.argval)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _globals(constant)
