"""Objects with a content that is changed in place, and that are neither containers nor have attributes.

A trace holds a copy of what such an object had in it, compares and puts it back: arrays of numpy and of
:mod:`array`, bytes, numbers of :mod:`ctypes` and :mod:`multiprocessing`, files in memory, queues of C, context
variables.
"""

from __future__ import annotations

import array
import ctypes
import io
import queue
import sys
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Final

_LARGEST_ARRAY: Final = 1 << 30
"""Bytes of the largest array of which a copy is held: a larger one might not fit beside it."""
_ABSENT: Final = object()


@dataclass(frozen=True, slots=True)
class Content:
    """How the content of an object is read, as a copy, and set; ``instead`` is what to write in its place."""

    read: Callable[[], Any]
    set: Callable[[Any], object]
    instead: str
    same: Callable[[Any, Any], bool] = lambda one, other: bool(one == other)


def content_of(value: object) -> Content | None:
    """The content of an object, None if it has none, or one that cannot change."""
    content = _array(value)
    if content is not None:
        return content
    if isinstance(value, (bytearray, array.array)):
        return _sequence(value)
    if isinstance(value, ctypes.py_object):
        return None
    if isinstance(value, _CTYPES):
        return _number(value)
    inner = getattr(value, "_obj", None) if type(value).__module__ == "multiprocessing.sharedctypes" else None
    if isinstance(inner, _CTYPES):
        return _number(inner)
    if isinstance(value, (io.StringIO, io.BytesIO)):
        return None if value.closed else _file(value)
    if isinstance(value, queue.SimpleQueue):
        return _queue(value)
    return _variable(value) if isinstance(value, ContextVar) else None


_CTYPES: Final = (ctypes.c_double.__mro__[-2], ctypes.Structure, ctypes.Union, ctypes.Array)
_BUFFER: Final = "keep it in a buffer: self.register_buffer(name, tensor) in __init__, and change that"
_OUTPUT: Final = "return it as an output of forward, and put it there after the call"


def _array(value: Any) -> Content | None:
    numpy = sys.modules.get("numpy")
    if numpy is None or not isinstance(value, numpy.ndarray):
        return None
    if not value.flags.writeable or value.nbytes > _LARGEST_ARRAY:
        return None

    def same(one: Any, other: Any) -> bool:
        if one.shape != other.shape or one.dtype != other.dtype:
            return False
        if one.dtype.hasobject:
            return all(a is b for a, b in zip(one.flat, other.flat, strict=True))
        return bool(one.tobytes() == other.tobytes())

    return Content(value.copy, lambda content: value.__setitem__(..., content), _BUFFER, same)


def _sequence(value: Any) -> Content:
    return Content(lambda: value[:], lambda content: value.__setitem__(slice(None), content), _BUFFER)


def _number(value: Any) -> Content:
    size = ctypes.sizeof(value)

    def read() -> bytes:
        return ctypes.string_at(ctypes.addressof(value), size)

    return Content(read, lambda content: ctypes.memmove(ctypes.addressof(value), content, size), _BUFFER)


def _file(value: Any) -> Content:
    def put_back(content: tuple[Any, int]) -> None:
        value.seek(0)
        value.truncate()
        value.write(content[0])
        value.seek(content[1])

    return Content(lambda: (value.getvalue(), value.tell()), put_back, _OUTPUT)


def _queue(value: queue.SimpleQueue[Any]) -> Content:
    def taken() -> list[Any]:
        return [value.get_nowait() for _ in range(value.qsize())]

    def read() -> list[Any]:
        held = taken()
        _fill(value, held)
        return held

    def put_back(content: list[Any]) -> None:
        taken()
        _fill(value, content)

    def same(one: list[Any], other: list[Any]) -> bool:
        return len(one) == len(other) and all(a is b for a, b in zip(one, other, strict=True))

    return Content(read, put_back, _OUTPUT, same)


def _fill(value: queue.SimpleQueue[Any], held: list[Any]) -> None:
    for item in held:
        value.put(item)


def _variable(value: ContextVar[Any]) -> Content:
    def put_back(content: Any) -> None:
        if content is not _ABSENT:
            value.set(content)

    instead = "set it before the model is called"
    return Content(lambda: value.get(_ABSENT), put_back, instead, lambda one, other: one is other)
