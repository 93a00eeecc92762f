"""Names that held a clock before a model was traced: ``from time import time``, ``self.clock = perf_counter``.

Replacing functions in their modules (:mod:`hetspmd.trace.host.asked`) does not reach them. So a stand-in lies in
each place where its code finds one: in variables of modules and of closures, on modules, objects and classes,
in lists and dicts, and among defaults of arguments. It lies there only while forward runs. Nothing can be put into
a tuple or onto an object that cannot be changed: what is there counts as called.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import date, datetime
from types import BuiltinFunctionType, CellType, FrameType, FunctionType, MethodType
from typing import Any, Final

from hetspmd.trace.host.asked import note, note_held
from hetspmd.trace.host.places import NOTHING, Path, Roots, Variables, own, put, text
from hetspmd.trace.host.sources import SOURCES, Source
from hetspmd.trace.host.stand_ins import FILE, MOMENTS, StandIn, calendar, is_calendar, opener, original

_METHODS: Final = {
    getattr(kind, name): Source("clock", f"datetime.{kind.__name__}.{name}")
    for kind in (date, datetime)
    for name in sorted(MOMENTS)
    if hasattr(kind, name)
}

_DEFAULTS: Final = ".__defaults__"

_Key = tuple[int, str]
_LOCK = threading.Lock()
_PLACED: dict[_Key, tuple[int, Callable[[], None]]] = {}
"""A place to the number of traces that need a stand-in there, and what puts back what it held."""


class Bound:
    """The places of one model where its code finds clocks."""

    def __init__(self, roots: Roots) -> None:
        self._roots = roots
        self._places: dict[_Key, _Place] = {}
        self._active: list[_Key] | None = None

    def look(self, root: str, path: Path, value: Any) -> None:
        """A value was found at a place; a stand-in lies there from now on, if it is a clock."""
        stand_in = _stand_in_for(original(value)) if path else None
        if stand_in is not None:
            holder, step = self._roots.holder(root, path), path[-1]
            if holder is not NOTHING and not (isinstance(holder, type) and isinstance(value, FunctionType)):
                self._add(_key(holder, step), _Place(holder, step, stand_in, text(root, path)))

    def defaults(self, function: FunctionType) -> None:
        """Look at the defaults of a function's arguments."""
        defaults = function.__defaults__ or ()
        stand_ins = tuple(d if (s := _stand_in_for(d)) is None else s for d in defaults)
        if any(a is not b for a, b in zip(defaults, stand_ins, strict=True)):
            self._add(
                (id(function), _DEFAULTS), _Place(function, _DEFAULTS, stand_ins, function.__qualname__)
            )
        for name, value in (function.__kwdefaults__ or {}).items():
            stand_in = _stand_in_for(value)
            if stand_in is not None:
                holder = Variables(function.__kwdefaults__ or {})
                self._add(
                    _key(holder, f".{name}"), _Place(holder, f".{name}", stand_in, function.__qualname__)
                )

    @contextmanager
    def placed(self) -> Iterator[None]:
        """Around one run of forward: the stand-ins lie where they belong, also those found on the way."""
        self._active = []
        try:
            for key in self._places:
                self._place(key)
            yield
        finally:
            placed, self._active = self._active, None
            for key in placed:
                _put_back(key)

    def _add(self, key: _Key, place: _Place) -> None:
        if key not in self._places:
            self._places[key] = place
            if self._active is not None:
                self._place(key)

    def _place(self, key: _Key) -> None:
        place = self._places[key]
        with _LOCK:
            count, back = _PLACED.get(key, (0, place.put_back))
            if not count:
                try:
                    place.swap()
                except (TypeError, AttributeError):  # what cannot be changed: a tuple, a frozen object
                    place.assume()
                    return
            _PLACED[key] = count + 1, back
        if self._active is not None:
            self._active.append(key)


class _Place:
    """One place, and the stand-in for what it holds."""

    def __init__(self, holder: Any, step: str, stand_in: Any, name: str) -> None:
        self._holder, self._step, self._stand_in, self._name = holder, step, stand_in, name
        self._before: Any = NOTHING

    def swap(self) -> None:
        """Put the stand-in there."""
        self._before = self._own()
        self._put(self._stand_in)

    def put_back(self) -> None:
        """Put back what was there, unless the model has put something else there."""
        if self._own() is self._stand_in:
            self._put(self._before)

    def assume(self) -> None:
        """Note that what lies there is called, though nothing can stand there that would tell so."""
        if isinstance(self._stand_in, StandIn) and (source := _source_of(self._stand_in.of)) is not None:
            note_held(source.kind, source.called, self._name)

    def _own(self) -> Any:
        if isinstance(self._holder, type):  # as it lies there, a staticmethod for one
            return vars(self._holder).get(self._step[1:], NOTHING)
        if self._step == _DEFAULTS:
            return self._holder.__defaults__
        return own(self._holder, self._step)

    def _put(self, value: Any) -> None:
        if self._step == _DEFAULTS:
            self._holder.__defaults__ = value
        else:
            put(self._holder, self._step, value)


def _put_back(key: _Key) -> None:
    with _LOCK:
        count, back = _PLACED.pop(key)
        if count > 1:
            _PLACED[key] = count - 1, back
        else:
            back()


def _key(holder: Any, step: str) -> _Key:
    if isinstance(holder, Variables):
        cell = holder.of.get(step[1:])
        return (id(cell), "") if isinstance(cell, CellType) else (id(holder.of), step)
    return id(holder), step


def _stand_in_for(value: Any) -> Any:
    """What stands for a function that asks; None for anything else."""
    if is_calendar(value):
        return calendar(value, _noted)
    if value is FILE:
        return opener(functools.partial(note, "file"))
    source = _source_of(value)
    if source is None:
        return None
    before = value.args if isinstance(value, functools.partial) else ()

    def told(args: tuple[Any, ...], frame: FrameType) -> None:
        if source.asks((*before, *args)):
            note(source.kind, source.called, frame)

    return StandIn(value, told)


def _source_of(value: Any) -> Source | None:
    function = value.func if isinstance(value, functools.partial) else value
    if isinstance(function, MethodType):
        function = function.__func__
    if not isinstance(function, (BuiltinFunctionType, FunctionType)):
        return None
    return SOURCES.get(function) or _METHODS.get(function)


def _noted(called: str, frame: FrameType) -> None:
    note("clock", called, frame)
