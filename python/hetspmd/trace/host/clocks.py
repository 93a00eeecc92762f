"""Clocks, and the system's random bytes, that a forward's Python asks for.

They have no state that could be compared, as generators have (:mod:`hetspmd.trace.host.entropy`). So the functions
of :mod:`time` and :mod:`os` are replaced while a model is traced, and note which line of the model has asked them.
What torch and ``logging`` ask is no part of the model. Names that hold them already (``from time import time``) are
replaced by :mod:`hetspmd.trace.host.bound`.
"""

from __future__ import annotations

import os
import random
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import wraps
from types import FrameType
from typing import Any, Final, Literal

from hetspmd.errors import ClockWarning, TraceError
from hetspmd.trace.frames import frame_line
from hetspmd.trace.host.foreign import is_foreign
from hetspmd.trace.host.imported import put_right

__all__ = ["SOURCES", "Asked", "Source", "note"]

_QUIET: Final = frozenset({"logging", "warnings"})
"""Modules that look at a clock for their own purposes."""

_LOCK = threading.Lock()
_REPLACED: list[tuple[Any, str, Any]] = []
"""The functions in whose place others are now."""
_ORIGINALS: dict[int, Any] = {}
"""What each of these others stands for, by its id."""
_known: frozenset[str] = frozenset()
"""The modules that there were before."""
_traces = 0
_ASKED: ContextVar[Asked | None] = ContextVar("hetspmd_asked", default=None)


@dataclass(frozen=True, slots=True)
class Source:
    """A function that asks a clock, or the system for bytes. With ``given`` arguments it asks nothing, but
    computes from the last of them."""

    kind: Literal["clock", "bytes"]
    called: str
    given: int = 0

    def asks(self, args: tuple[Any, ...], kwargs: object = ()) -> bool:
        """Whether a call with these arguments asks."""
        if not self.given:
            return True
        return not kwargs and (len(args) < self.given or args[self.given - 1] is None)


_GIVEN: Final = {"gmtime": 1, "localtime": 1, "ctime": 1, "asctime": 1, "strftime": 2}
_CLOCKS: Final = ("time", "monotonic", "perf_counter", "process_time", "thread_time", "clock_gettime")
_OF_TIME: Final = (*_CLOCKS, *(f"{name}_ns" for name in _CLOCKS), *_GIVEN)


def _places() -> Iterator[tuple[Any, str, Source]]:
    """Where the functions lie that can be replaced."""
    for name in _OF_TIME:
        yield time, name, Source("clock", f"time.{name}", _GIVEN.get(name, 0))
    yield os, "times", Source("clock", "os.times")
    yield os, "urandom", Source("bytes", "os.urandom")
    yield os, "getrandom", Source("bytes", "os.getrandom")
    yield random, "_urandom", Source("bytes", "random.SystemRandom")
    yield random.Random, "seed", Source("bytes", "random.Random without a seed", 2)
    for name in ("_generate_time_safe", "_UuidCreate"):
        yield sys.modules.get("uuid"), name, Source("bytes", "uuid.uuid1")


SOURCES: Final[dict[Any, Source]] = {}
"""The functions that other names may hold."""
for _module, _name, _source in _places():
    if _module in (time, os) and hasattr(_module, _name):
        SOURCES.setdefault(getattr(_module, _name), _source)


class Asked:
    """What one trace has asked: of each kind the first line."""

    def __init__(self) -> None:
        self.clock = self.bytes = ""

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Note what is asked within the context, by this thread."""
        _replace()
        token = _ASKED.set(self)
        try:
            yield
        finally:
            _ASKED.reset(token)
            _put_back()

    def check(self, *, frozen: bool) -> None:
        """Raise TraceError for random bytes unless they are ``frozen``."""
        if self.bytes and not frozen:
            raise TraceError(
                f"the forward asks the system for random bytes {self.bytes}: a plan would repeat this one outcome "
                "for ever, and no two ranks get the same. Draw with torch, as part of the graph (torch.rand(...)), "
                'or pass host_randomness="freeze", by which each plan keeps the outcome of its trace (the one for '
                "evaluation another one)"
            )

    def warn(self) -> None:
        """Warn of a clock."""
        if self.clock:
            warnings.warn(
                f"the forward reads a clock {self.clock}: no step of a plan reads it again, and what depends on it "
                "stays as the trace has read it. Give that to the model as an argument, or measure around the call "
                "of the model",
                ClockWarning,
                stacklevel=3,
            )


def note(kind: Literal["clock", "bytes"], called: str, frame: FrameType) -> None:
    """Note that something was asked by the model's own code, if this thread traces."""
    asked = _ASKED.get()
    if asked is not None and not getattr(asked, kind):
        caller = _of_the_model(frame)
        if caller is not None:
            setattr(asked, kind, f"({called}) at {frame_line(caller)}")


def _replace() -> None:
    global _traces, _known
    with _LOCK:
        if not _traces:
            _known = frozenset(sys.modules)
            for holder, name, source in _places():
                _stand_in(holder, name, source)
        _traces += 1


def _put_back() -> None:
    global _traces
    with _LOCK:
        _traces -= 1
        if not _traces:
            put_right(_known, _ORIGINALS)
            while _REPLACED:
                holder, name, function = _REPLACED.pop()
                setattr(holder, name, function)
            _ORIGINALS.clear()


def _stand_in(holder: Any, name: str, source: Source) -> None:
    """Let a function of a module or class note that it was called, while a model is traced."""
    function = getattr(holder, name, None)
    if function is None:
        return

    @wraps(function)
    def noting(*args: Any, **kwargs: Any) -> Any:
        if source.asks(args, kwargs):
            note(source.kind, source.called, sys._getframe(1))
        return function(*args, **kwargs)

    _REPLACED.append((holder, name, function))
    _ORIGINALS[id(noting)] = function
    setattr(holder, name, noting)


def _of_the_model(frame: FrameType | None) -> FrameType | None:
    """The model's own code that has called, by way of the standard library at most."""
    while frame is not None:
        name = str(frame.f_globals.get("__name__")).partition(".")[0]
        if name in _QUIET:
            return None
        if name == "__main__" or name not in sys.stdlib_module_names:
            return None if is_foreign(name) else frame
        frame = frame.f_back
    return None
