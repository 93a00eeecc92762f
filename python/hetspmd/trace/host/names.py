"""What a function's code names: variables of its module, attributes, modules that it imports."""

from __future__ import annotations

import dis
import functools
import itertools
import re
from collections.abc import Iterator
from types import CodeType
from typing import NamedTuple

_EXTENDED = dis.opmap["EXTENDED_ARG"]
_GLOBALS = {
    dis.opmap[name]: 0
    for name in ("LOAD_NAME", "STORE_GLOBAL", "DELETE_GLOBAL", "IMPORT_NAME", "IMPORT_FROM")
}
_GLOBALS |= {dis.opmap["LOAD_GLOBAL"]: 1}
if "LOAD_FROM_DICT_OR_GLOBALS" in dis.opmap:
    _GLOBALS[dis.opmap["LOAD_FROM_DICT_OR_GLOBALS"]] = 0
"""Instructions with the name of a variable, and by how many bits its number is shifted."""
_BY_TEXT = frozenset({"eval", "exec", "globals", "vars", "locals", "getattr", "import_module", "__import__"})
"""What reaches variables by their names as text."""
_ASKING = frozenset(
    {
        "vars",
        "globals",
        "eval",
        "exec",
        "__globals__",
        "f_globals",
        "__dict__",
        "__getattribute__",
        "getattr_static",
    }
)
"""What gives attributes by any name."""
_BETWEEN = frozenset({"PUSH_NULL", "CACHE", "EXTENDED_ARG", "PRECALL"})


@functools.cache
def names_in(code: CodeType) -> frozenset[str]:
    """Names of variables and attributes in a function's code, and in functions inside it; of attributes also as
    text (``getattr(self, "name")``)."""
    inner = (names_in(c) for c in code.co_consts if isinstance(c, CodeType))
    texts = (c for c in code.co_consts if isinstance(c, str) and c.isidentifier())
    return frozenset(code.co_names).union(texts, *inner)


class CodeNames(NamedTuple):
    """What a function's code names: all names, and those of variables that are not its own and of what it imports,
    in order, each with the name that a module of its package has by it."""

    names: frozenset[str]
    variables: tuple[tuple[str, str], ...]


@functools.cache
def named_in(code: CodeType, home: str) -> CodeNames:
    """What the code of a function of the module ``home`` names."""
    package = home.rpartition(".")[0]
    names = ((name, f"{package}.{name}" if package else name) for name in sorted(_globals_in(code)))
    return CodeNames(names_in(code), tuple(names))


@functools.cache
def _globals_in(code: CodeType) -> frozenset[str]:
    inner = (_globals_in(c) for c in code.co_consts if isinstance(c, CodeType))
    names = frozenset(_loaded(code)).union(*inner)
    if names & _BY_TEXT:
        texts = " ".join(c for c in code.co_consts if isinstance(c, str))
        names |= frozenset(re.findall(r"[^\W\d]\w*", texts))
    return names


@functools.cache
def constants_in(code: CodeType) -> frozenset[str]:
    """The strings in a function's code, and in functions inside it."""
    inner = (constants_in(c) for c in code.co_consts if isinstance(c, CodeType))
    return frozenset(c for c in code.co_consts if isinstance(c, str)).union(*inner)


@functools.cache
def computes_names(code: CodeType) -> bool:
    """Whether a function's code, or a function inside it, asks for attributes by names that may be computed."""
    if _ASKING & set(code.co_names) or any(
        computes_names(c) for c in code.co_consts if isinstance(c, CodeType)
    ):
        return True
    if "getattr" not in code.co_names:
        return False
    steps = [step for step in dis.get_instructions(code) if step.opname not in _BETWEEN]
    calls = (n for n, s in enumerate(steps) if s.argval == "getattr" and s.opname.startswith("LOAD_"))
    return not all(_asks_by_text(steps[number + 1 :]) for number in calls)


@functools.cache
def calls_plainly(code: CodeType, method: str) -> bool:
    """Whether a function's code, or a function inside it, calls a method of this name without arguments."""
    if any(calls_plainly(c, method) for c in code.co_consts if isinstance(c, CodeType)):
        return True
    steps = [step for step in dis.get_instructions(code) if step.opname not in _BETWEEN]
    return any(
        one.argval == method
        and one.opname in ("LOAD_ATTR", "LOAD_METHOD")
        and (two.opname, two.arg) == ("CALL", 0)
        for one, two in itertools.pairwise(steps)
    )


def _asks_by_text(steps: list[dis.Instruction]) -> bool:
    """Whether what follows are the arguments of ``getattr``, the second of them a text: a variable, attributes of
    it, the text, at most one value more, and the call."""
    if not steps[0].opname.startswith("LOAD_"):
        return False
    rest = [step for step in steps[1:] if step.opname not in ("LOAD_ATTR", "LOAD_METHOD")]
    if not rest or rest[0].opname != "LOAD_CONST" or not isinstance(rest[0].argval, str):
        return False
    at = steps.index(rest[0])
    after = [step.opname for step in steps[at + 1 : at + 3]]
    return after[0] == "CALL" or (after[0].startswith("LOAD_") and after[1:] == ["CALL"])


def _loaded(code: CodeType) -> Iterator[str]:
    raw, more = code.co_code, 0
    for position in range(0, len(raw), 2):
        kind, number = raw[position], raw[position + 1] | more
        more = number << 8 if kind == _EXTENDED else 0
        if kind in _GLOBALS:
            yield code.co_names[number >> _GLOBALS[kind]]
