"""What an object holds, as text, where nothing follows its attributes: all of it.

An object is asked for its attributes and slots, and for what its class would pickle. Locks, files, loggers and the
like have nothing that a forward could compute with. What can say nothing of itself is opaque: no comparison would
notice that it has changed.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import copyreg
import ctypes
import io
import weakref
from collections.abc import Callable, ItemsView, KeysView, Mapping, ValuesView
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any, Final

import torch

from hetspmd.trace.host.foreign import is_foreign
from hetspmd.trace.host.members import members, slots_of

_STATELESS: Final = frozenset({
    "_asyncio", "_ctypes", "_io", "_socket", "_thread", "abc", "asyncio", "concurrent", "contextlib",
    "inspect", "io", "logging", "select", "selectors", "signal", "socket", "ssl", "subprocess", "tempfile",
    "threading", "typing", "unittest", "warnings",
})  # fmt: skip
"""Modules of the standard library whose objects are tools: no forward computes with what they hold."""
_IMMUTABLE, _HEAP = 1 << 8, 1 << 9
"""Flags of classes: those of C are immutable, or do not lie on the heap."""

Inner = Callable[[object], str]


def is_followed_kind(kind: type) -> bool:
    """Whether attributes of the objects of a class are recorded one by one as they are read."""
    if is_foreign(kind.__module__) and not kind.__module__.startswith("torch.distributions"):
        return False
    return bool(getattr(kind, "__dictoffset__", 0)) or bool(slots_of(kind))


def content(value: Any, inner: Inner) -> str | None:
    """All that an object holds, as text; ``inner`` is the text of a part. None if it is opaque."""
    kind = type(value)
    if isinstance(value, _HOLDERS):
        return inner(held(value))
    if isinstance(value, torch.optim.Optimizer):
        return inner([{k: v for k, v in g.items() if k != "params"} for g in value.param_groups])
    plain = _plain(value)
    if plain is not None:
        return inner(plain)
    if kind.__module__.partition(".")[0] in _STATELESS:
        return ""
    attributes = dict(members(value) or {})
    parts = [inner(attributes)] if attributes else []
    if not attributes or has_basis(kind):
        pickled = basis(value, inner, state=not attributes)
        if pickled is None and not attributes:
            return "" if is_foreign(kind.__module__) and kind.__module__ not in _OPAQUE else None
        parts.append(pickled or "")
    return " ".join(parts)


_HOLDERS: Final = (weakref.ref, ContextVar, ctypes.py_object, concurrent.futures.Future, asyncio.Future)


def referent(value: Any) -> Any:
    """What a weak proxy stands for, anything else as it is."""
    if type(value) not in weakref.ProxyTypes:
        return value
    try:
        return value.__repr__.__self__
    except (AttributeError, ReferenceError):
        return value


def held(value: Any) -> Any:
    """What a reference, a variable of a context, a future, a view or a table of C holds; None for anything else."""
    if isinstance(value, weakref.ref):
        return value()
    try:
        if isinstance(value, ContextVar):
            return value.get()
        if isinstance(value, ctypes.py_object):
            return value.value
        if isinstance(value, (concurrent.futures.Future, asyncio.Future)):
            done = value.done() and not value.cancelled()
            return value.exception() or value.result() if done else None
    except (LookupError, ValueError):  # nothing was set
        return None
    return _shown(value)


_OPAQUE: Final = frozenset({"_csv", "_dbm", "_gdbm", "_queue", "dbm.sqlite3", "mmap", "sqlite3"})
"""Modules of the standard library whose objects hold what nothing but taking it out tells."""


def has_basis(kind: type) -> bool:
    """Whether a class derives from one of C that holds something of its own."""
    return any(
        base is not object and (base.__flags__ & _IMMUTABLE or not base.__flags__ & _HEAP)
        for base in kind.__mro__
    )


def basis(value: Any, inner: Inner, *, state: bool = False) -> str | None:
    """What an object would be made of again, ``state``: with its attributes; None if it cannot be."""
    try:
        special = copyreg.dispatch_table.get(type(value))
        reduced = special(value) if special is not None else value.__reduce_ex__(4)
        if isinstance(reduced, str):
            return reduced
        function, arguments, attributes, items, pairs = (*reduced, None, None, None)[:5]
        parts = [getattr(function, "__qualname__", ""), inner(arguments)]
        parts += [inner(list(more)) for more in (items, pairs) if more is not None]
    except Exception:  # a class may raise anything where it cannot be pickled
        return None
    if state and attributes is not None:
        parts.append(inner(attributes))
    return " ".join(parts)


def _shown(value: Any) -> Any:
    """What a view of something else shows; None for anything else."""
    if isinstance(value, (KeysView, ValuesView, ItemsView)):
        return list(value)
    if isinstance(value, MappingProxyType) or (type(value).__module__ == "os" and isinstance(value, Mapping)):
        return dict(value)
    return None


def _plain(value: Any) -> Any:
    """What a view, a table of C or a file in memory holds; None for anything else."""
    if isinstance(value, (io.StringIO, io.BytesIO)):
        return None if value.closed else value.getvalue()
    if (shown := _shown(value)) is not None:
        return shown
    if type(value).__module__ == "multiprocessing.sharedctypes":
        return value.get_obj()
    try:
        return memoryview(value).tobytes()
    except (TypeError, ValueError, BufferError):
        return None


def own_attributes(value: object) -> dict[str, Any]:
    """An object's ``__dict__``, past what its class does when asked; an empty one if it has none."""
    try:
        attributes = object.__getattribute__(value, "__dict__")
    except (AttributeError, TypeError):
        return {}
    return attributes if isinstance(attributes, dict) else {}
