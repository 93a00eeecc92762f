"""What stands in the place of a clock while forward runs: it tells of a call, and does what it stands for.

``datetime.now`` belongs to a class of C, whose attributes nothing can replace: a class derived from it stands where
a model's code names it, and a copy of the module where the code names that.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Set
from datetime import date
from functools import cache, partial
from types import FrameType, ModuleType
from typing import Any, Final

MOMENTS: Final = frozenset({"now", "utcnow", "today"})
"""The methods of dates that ask a clock."""

FILE: Final = io.FileIO
"""The class of files without a buffer, which is replaced in its module while a model is traced."""

Note = Callable[[str, FrameType], None]
"""Is told what was asked (``datetime.datetime.now``), and by which frame."""


class InPlaceOf:
    """Stands where ``before`` stood while somebody watches the place: who reads it is told what stood there."""

    before: Any


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


class _Class(type):
    """The class of classes that stand for one: what they make, and what counts as theirs, are its own. ``told`` is
    called with the frame that makes an object."""

    of: type
    told: Callable[[FrameType], None]

    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, cls.of)

    def __subclasscheck__(cls, kind: type) -> bool:
        return issubclass(kind, cls.of)

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        cls.told(sys._getframe(1))
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


def is_asking(value: object, names: Set[str]) -> bool:
    """Whether a class or module asks for what lies outside, where code with these names uses it."""
    return value is FILE or (bool(names & MOMENTS) and is_calendar(value))


def original(value: Any) -> Any:
    """What a value stands for, if it is a stand-in; else the value."""
    kind = type(value)
    return value.of if kind is StandIn or kind is _Class or kind is _Module else value


@cache
def opener(note: Note) -> type:
    """What stands for the class of files without a buffer, which opens one when it is called."""

    def told(frame: FrameType) -> None:
        note("io.FileIO", frame)

    return _standing(FILE, told, {})


@cache
def _class(of: type[date], note: Note) -> type:
    def asking(name: str, _cls: type, *args: Any, **kwargs: Any) -> Any:
        note(f"{of.__module__}.{of.__qualname__}.{name}", sys._getframe(1))
        return getattr(of, name)(*args, **kwargs)

    methods = {n: classmethod(partial(asking, n)) for n in MOMENTS if hasattr(of, n)}
    return _standing(of, lambda _frame: None, methods)


def _standing(of: type, told: Callable[[FrameType], None], methods: dict[str, Any]) -> type:
    body = {**methods, "of": of, "told": staticmethod(told), "__module__": of.__module__}
    return _Class(of.__name__, (of,), body)
