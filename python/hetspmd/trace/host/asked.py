"""Clocks, the system's random bytes, files and other threads that a forward's Python asks for.

They have no state that could be compared, as generators have (:mod:`hetspmd.trace.host.entropy`). So the functions
by which Python asks (:mod:`hetspmd.trace.host.sources`) are replaced while a model is traced, and note the line of
the model that has called them. What torch and ``logging`` ask is no part of the model, and neither are files that a
module opens while it is imported, or threads that packages start for their own purposes (a progress bar). Names
that hold the functions already (``from time import time``) are replaced by :mod:`hetspmd.trace.host.bound`.
"""

from __future__ import annotations

import importlib
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import partial, wraps
from types import FrameType
from typing import Any, Final

from hetspmd.errors import ClockWarning, FileWarning, TraceError
from hetspmd.trace.frames import frame_line
from hetspmd.trace.host.foreign import is_foreign, is_own
from hetspmd.trace.host.imported import put_right
from hetspmd.trace.host.sources import Kind, Source, learn, places
from hetspmd.trace.host.stand_ins import opener

_QUIET: Final = frozenset({
    "importlib", "inspect", "linecache", "logging", "multiprocessing", "pkgutil", "tokenize",
    "traceback", "warnings", "zipimport",
})  # fmt: skip
"""Modules that look at a clock, or at files, for their own purposes."""
_THROUGH: Final[dict[str, tuple[str, ...]]] = {
    "file": ("numpy.", "torch.hub", "torch.serialization", "torch.storage"),
    "thread": ("torch.nn.parallel.",),
}
"""Modules that look at files, or start threads, for whoever calls them."""
_ABOVE: Final = ("torch.", "hetspmd.")
"""Modules that call the model."""

_LOCK = threading.Lock()
_REPLACED: list[tuple[Any, str, Any]] = []
"""The functions in whose place others are now."""
_ORIGINALS: dict[int, Any] = {}
"""What each of these others stands for, by its id."""
_known: frozenset[str] = frozenset()
"""The modules that there were before."""
_traces = 0
_ASKED: ContextVar[Asked | None] = ContextVar("hetspmd_asked", default=None)


class Asked:
    """What one trace has asked: of each kind the first line."""

    def __init__(self) -> None:
        self.clock = self.bytes = self.file = self.thread = ""

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
        """Raise TraceError for threads, and for random bytes unless they are ``frozen``."""
        if self.thread:
            raise TraceError(
                f"the forward hands work to another thread or process {self.thread}: what is done there is no part "
                "of a graph, and no step of a plan does it again. Do it in forward itself, one after the other, or "
                "before or after the call of the model"
            )
        if self.bytes and not frozen:
            raise TraceError(
                f"the forward asks the system for random bytes {self.bytes}: a plan would repeat this one outcome "
                "for ever, and no two ranks get the same. Draw with torch, as part of the graph (torch.rand(...)), "
                'or pass host_randomness="freeze", by which each plan keeps the outcome of its trace (the one for '
                "evaluation another one)"
            )

    def warn(self) -> None:
        """Warn of a clock, and of files."""
        if self.clock:
            warnings.warn(
                f"the forward reads a clock {self.clock}: no step of a plan reads it again, and what depends on it "
                "stays as the trace has read it. Give that to the model as an argument, or measure around the call "
                "of the model",
                ClockWarning,
                stacklevel=5,
            )
        if self.file:
            warnings.warn(
                f"the forward looks at a file, a folder or another process {self.file}: no step of a plan does "
                "so again, and what depends on it stays as the trace has found it. Look before the call, and give "
                "what is found to the model as an argument, or set it on the model; write after the call",
                FileWarning,
                stacklevel=5,
            )


def note(kind: Kind, called: str, frame: FrameType) -> None:
    """Note that something was asked by the model's own code, if this thread traces."""
    asked = _ASKED.get()
    if asked is not None and not getattr(asked, kind):
        caller = _of_the_model(frame, _THROUGH.get(kind, ()))
        if caller is None or (kind == "file" and _imports(caller)):
            return
        if kind == "thread" and not is_own(caller.f_globals.get("__name__")):
            return
        setattr(asked, kind, f"({called}) at {frame_line(caller)}")
        if kind == "thread":
            asked.check(frozen=True)  # at once: what the thread does would fail first


def note_held(kind: Kind, called: str, name: str) -> None:
    """Note that a function that asks lies where nothing can stand for it, if this thread traces."""
    asked = _ASKED.get()
    if asked is not None and not getattr(asked, kind):
        setattr(asked, kind, f"({called}, in {name})")


def _replace() -> None:
    global _traces, _known
    with _LOCK:
        if not _traces:
            with suppress(ImportError):  # Python may have been built without it
                importlib.import_module(
                    "sqlite3"
                )  # a forward that is the first to import it would connect unseen
            _known = frozenset(sys.modules)
            learn()
            for holder, name, source in places():
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

    if isinstance(function, type):
        stand_in = opener(partial(note, source.kind))
        _REPLACED.append((holder, name, function))
        setattr(holder, name, stand_in)
        return

    @wraps(function)
    def noting(*args: Any, **kwargs: Any) -> Any:
        if source.asks(args, kwargs):
            note(source.kind, source.called, sys._getframe(1))
        return function(*args, **kwargs)

    _REPLACED.append((holder, name, function))
    _ORIGINALS[id(noting)] = function
    setattr(holder, name, noting)


def _of_the_model(frame: FrameType | None, through: tuple[str, ...]) -> FrameType | None:
    """The model's own code that has called, by way of the standard library and these modules at most."""
    while frame is not None:
        module = str(frame.f_globals.get("__name__"))
        name = module.partition(".")[0]
        if name in _QUIET:
            return None
        passes = name in sys.stdlib_module_names and name != "__main__"
        if not passes and not module.startswith(through):
            return None if is_foreign(name) else frame
        frame = frame.f_back
    return None


def _imports(frame: FrameType | None) -> bool:
    """Whether the model's code imports a module, on whose behalf this frame runs."""
    while frame is not None and not str(frame.f_globals.get("__name__")).startswith(_ABOVE):
        if str(frame.f_globals.get("__name__")).startswith("importlib._bootstrap"):
            return True
        frame = frame.f_back
    return False
