"""Reads of attributes, of which the recorder of the running thread is told.

``__getattribute__`` of ``nn.Module`` and of other classes is replaced while a model is traced. Torch reads many
attributes of a module at each call and for each submodule; none of these is part of a graph, and no one is told.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any, Final, Protocol

from torch import nn

from hetspmd.trace.host.places import NOTHING
from hetspmd.trace.host.snapshot import OF_TORCH

OWN_OF_MODULES: Final = OF_TORCH - {"training"}
"""Attributes of a module that only torch itself reads."""
_TORCHS: Final = vars(nn.modules.module)
"""The variables of the module of torch's that asks for a ``__dict__`` at each read of a submodule."""
_LOCK = threading.Lock()
_PATCHED: dict[type, tuple[int, Any]] = {}
"""Class to the number of recorders that need it changed, and its own ``__getattribute__`` (NOTHING:
inherited)."""


class ReadListener(Protocol):
    """Who is told of reads."""

    def saw(self, of: Any, name: str, value: Any) -> None:
        """An attribute was read."""

    def missed(self, of: Any, name: str) -> None:
        """An attribute was asked for that is not there."""


_READERS: dict[int, ReadListener] = {}
"""Thread to who is told of its reads."""


@contextmanager
def told(reader: ReadListener) -> Iterator[None]:
    """Within the context ``reader`` is told what this thread reads."""
    thread = threading.get_ident()
    outer = _READERS.get(thread)
    _READERS[thread] = reader
    try:
        yield
    finally:
        if outer is None:
            del _READERS[thread]
        else:
            _READERS[thread] = outer


@contextmanager
def untold() -> Iterator[None]:
    """Within the context no one is told what this thread reads."""
    thread = threading.get_ident()
    reader = _READERS.pop(thread, None)
    try:
        yield
    finally:
        if reader is not None:
            _READERS[thread] = reader


def tell(kind: type) -> bool:
    """Let reads from objects of a class be told, until :func:`restore`; False if the class cannot be changed."""
    with _LOCK:
        count, own = _PATCHED.get(kind, (0, NOTHING))
        if not count:
            own = vars(kind).get("__getattribute__", NOTHING)
            quiet = frozenset({"__class__", *(OWN_OF_MODULES if kind is nn.Module else ())})
            try:
                kind.__getattribute__ = _telling(kind.__getattribute__, quiet)  # type: ignore[method-assign, assignment, arg-type]  # until restore
            except TypeError:
                return False
        _PATCHED[kind] = count + 1, own
    return True


def restore(kind: type) -> None:
    """Inverse of :func:`tell`."""
    with _LOCK:
        count, own = _PATCHED[kind]
        if count > 1:
            _PATCHED[kind] = count - 1, own
            return
        del _PATCHED[kind]
        if own is NOTHING:
            del kind.__getattribute__
        else:
            kind.__getattribute__ = own  # type: ignore[method-assign]  # as it was


def _telling(read: Callable[[Any, str], Any], quiet: Collection[str]) -> Callable[[Any, str], Any]:
    """What reads an attribute, and tells of it unless it is one of the ``quiet`` ones."""
    readers, thread, frame = _READERS, threading.get_ident, sys._getframe

    def __getattribute__(self: Any, name: str) -> Any:
        try:
            value = read(self, name)
        except AttributeError:
            if (reader := readers.get(thread())) is not None:
                reader.missed(self, name)
            raise
        if name in quiet or (name == "__dict__" and frame(1).f_globals is _TORCHS):
            return value
        if (reader := readers.get(thread())) is not None:
            reader.saw(self, name, value)
        return value

    __getattribute__.__wrapped__ = read  # type: ignore[attr-defined]  # for who looks at the code of a class
    return __getattribute__
