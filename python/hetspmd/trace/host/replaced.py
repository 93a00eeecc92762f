"""What stands in the place of functions of a library's module or class that others have replaced, as text."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any, Final

from hetspmd.trace.host.code_digest import code_digest
from hetspmd.trace.host.foreign import is_own
from hetspmd.trace.host.plain import is_scalar

_ABSENT: Final = object()
_FUNCTIONS: Final = (FunctionType, BuiltinFunctionType, functools.partial)


class Replaced:
    """The variables of a module, or the attributes of a class, as they were at first.

    Functions of the user's always count. Other ones count if they are new, and ``counts`` them.
    """

    def __init__(self, read: Callable[[], Mapping[str, Any]], counts: Callable[[Any], bool]) -> None:
        self._read, self._counts = read, counts
        self._first = dict(read())
        self._names: list[str] = []
        self._last: list[Any] = []
        self._text = ""

    def text(self) -> str:
        """What was replaced or added, each with its name. An empty text if there is none."""
        now = self._read()
        names, values = list(now), list(now.values())
        if names != self._names or not all(map(operator.is_, values, self._last)):
            self._names, self._last = names, values
            self._text = "; ".join(sorted(self._changed(now)))
        return self._text

    def _changed(self, now: Mapping[str, Any]) -> list[str]:
        changes = []
        for name, value in now.items():
            is_new = self._first.get(name, _ABSENT) is not value
            if is_users(value) or (is_new and self._counts(value)):
                changes.append(f"{name}: {_described(value)}")
        return changes


_KNOWN: Final[dict[int, Replaced]] = {}
"""The namespaces of modules by the ids of their variables, which they hold."""


def functions_of(variables: Mapping[str, Any]) -> str:
    """What functions of a module others were put in the place of, or beside, since this was first asked."""
    replaced = _KNOWN.get(id(variables))
    if replaced is None:
        replaced = _KNOWN[id(variables)] = Replaced(lambda: variables, lambda v: isinstance(v, _FUNCTIONS))
    return replaced.text()


def is_users(value: object) -> bool:
    """Whether a function, a property or an object that stands for one is the user's own; of a partial function,
    whether what it calls is.

    What packages replace does not count: it depends on which of them a rank has imported.
    """
    if isinstance(value, ModuleType):
        return False  # some make what they are asked for
    if isinstance(value, functools.partial):
        return is_users(value.func)
    return is_own(getattr(getattr(value, "fget", value), "__module__", None))


def _described(value: object) -> str:
    if isinstance(value, functools.partial):
        arguments = [*value.args, *(v for pair in sorted(value.keywords.items()) for v in pair)]
        return " ".join([_described(value.func), *(repr(v) for v in arguments if is_scalar(v))])
    function = getattr(value, "fget", value)
    if isinstance(function, FunctionType):
        return f"{function.__module__}.{function.__qualname__} {code_digest(function.__code__)}"
    if isinstance(function, BuiltinFunctionType):
        return f"{function.__module__}.{function.__qualname__}"
    return f"{type(value).__module__}.{type(value).__qualname__}"
