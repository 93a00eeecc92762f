"""What stands in the place of a clock while forward runs: it tells of a call, and does what it stands for.

``datetime.now`` belongs to a class of C, whose attributes nothing can replace: a class derived from it stands where
a model's code names it, and a copy of the module where the code names that.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from datetime import date
from functools import cache, partial
from types import FrameType, ModuleType
from typing import Any, Final

MOMENTS: Final = frozenset({"now", "utcnow", "today"})
"""The methods of dates that ask a clock."""

Note = Callable[[str, FrameType], None]
"""Is told what was asked (``datetime.datetime.now``), and by which frame."""


class StandIn:
    """Calls ``of``, and tells ``note`` of the arguments and the caller before. It has the name of ``of``."""

    def __init__(self, of: Callable[..., Any], note: Callable[[tuple[Any, ...], FrameType], None]) -> None:
        self.of, self._note = of, note
        for name in ("__module__", "__name__", "__qualname__", "__doc__"):
            if hasattr(of, name):
                setattr(self, name, getattr(of, name))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._note(args, sys._getframe(1))
        return self.of(*args, **kwargs)


class _Calendar(type):
    """The class of classes that stand for one of dates: what they make, and what counts as theirs, are its own."""

    of: type[date]

    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, cls.of)

    def __subclasscheck__(cls, kind: type) -> bool:
        return issubclass(kind, cls.of)

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return cls.of(*args, **kwargs)


class _Module:
    """Stands for the module ``datetime``."""

    def __init__(self, of: ModuleType, note: Note) -> None:
        self.of, self._note = of, note

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.of, name)
        return calendar(value, self._note) if is_calendar(value) else value


def is_calendar(value: object) -> bool:
    """Whether a value is a class of dates, or the module that has them."""
    if isinstance(value, ModuleType):
        return value.__name__ == "datetime"
    return type(value) is type and issubclass(value, date)


def calendar(value: Any, note: Note) -> Any:
    """What stands for a class of dates, or their module."""
    return _Module(value, note) if isinstance(value, ModuleType) else _class(value, note)


def original(value: Any) -> Any:
    """What a value stands for, if it is a stand-in; else the value."""
    kind = type(value)
    return value.of if kind is StandIn or kind is _Calendar or kind is _Module else value


@cache
def _class(of: type[date], note: Note) -> type:
    def asking(name: str, _cls: type, *args: Any, **kwargs: Any) -> Any:
        note(f"{of.__module__}.{of.__qualname__}.{name}", sys._getframe(1))
        return getattr(of, name)(*args, **kwargs)

    body: dict[str, Any] = {n: classmethod(partial(asking, n)) for n in MOMENTS if hasattr(of, n)}
    return _Calendar(of.__name__, (of,), body | {"of": of, "__module__": of.__module__})
