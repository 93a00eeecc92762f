"""Clocks, and the system's random bytes, that a forward's Python asks for.

They have no state that could be compared, as generators have (:mod:`hetspmd.trace.host.entropy`). So the functions
of :mod:`time` and :mod:`os` are replaced while a model is traced, and note which line of the model has asked them.
What torch and ``logging`` ask is no part of the model. A name that was imported from its module before
(``from time import time``) is not reached.
"""

from __future__ import annotations

import linecache
import os
import random
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from types import FrameType, ModuleType
from typing import Any, Final

from hetspmd.errors import ClockWarning, TraceError
from hetspmd.trace.host.code import is_foreign

__all__ = ["Asked"]

_CLOCKS: Final = ("time", "monotonic", "perf_counter", "process_time", "thread_time")
_QUIET: Final = frozenset({"logging", "warnings"})
"""Modules that look at a clock for their own purposes."""

_LOCK = threading.Lock()
_REPLACED: list[tuple[ModuleType, str, Any]] = []
"""The functions in whose place others are now."""
_traces = 0
_ASKED: ContextVar[Asked | None] = ContextVar("hetspmd_asked", default=None)


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
                'or pass host_randomness="freeze", by which the outcome stays as it is'
            )

    def warn(self) -> None:
        """Warn of a clock."""
        if self.clock:
            warnings.warn(
                f"the forward reads a clock {self.clock}: a plan keeps what the trace has read. Give what depends "
                "on it to the model as an argument, or measure around the call of the model",
                ClockWarning,
                stacklevel=3,
            )


def _replace() -> None:
    global _traces
    with _LOCK:
        if not _traces:
            for name in _CLOCKS:
                for full in (name, f"{name}_ns"):
                    _stand_in(time, full, "clock", f"time.{full}")
            _stand_in(os, "urandom", "bytes", "os.urandom")
            _stand_in(random, "_urandom", "bytes", "random.SystemRandom")
        _traces += 1


def _put_back() -> None:
    global _traces
    with _LOCK:
        _traces -= 1
        while not _traces and _REPLACED:
            module, name, function = _REPLACED.pop()
            setattr(module, name, function)


def _stand_in(module: ModuleType, name: str, kind: str, called: str) -> None:
    """Let a function of a module note that it was called, while a model is traced."""
    function: Callable[..., Any] | None = getattr(module, name, None)
    if function is None:
        return

    @wraps(function)
    def noting(*args: Any) -> Any:
        asked = _ASKED.get()
        if asked is not None and not getattr(asked, kind):
            frame = _of_the_model(sys._getframe(1))
            if frame is not None:
                setattr(asked, kind, f"({called}){_line(frame)}")
        return function(*args)

    _REPLACED.append((module, name, function))
    setattr(module, name, noting)


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


def _line(frame: FrameType) -> str:
    file, number = frame.f_code.co_filename, frame.f_lineno
    return f" at {file}:{number}: {linecache.getline(file, number).strip()}"
