"""What a container holds, whatever its class does when it is asked.

A class may make something of an item at each access (a table that instantiates the class it holds, a dict that
decodes): a look must neither run that nor put its result in the place of what is held.
"""

from __future__ import annotations

import collections
from collections.abc import Iterator
from typing import Any, Final

_BASES: Final = (list, tuple, set, frozenset, collections.deque, collections.OrderedDict, dict)
_EXACT: Final = frozenset(_BASES)


def _base(container: Any) -> Any:
    kind = type(container)
    return kind if kind in _EXACT else next(base for base in _BASES if isinstance(container, base))


def elements(container: Any) -> list[Any]:
    """The elements of a list, tuple, set or deque, the keys of a dict."""
    iterator: Iterator[Any] = _base(container).__iter__(container)
    return list(iterator)


def pairs(mapping: dict[Any, Any]) -> list[tuple[Any, Any]]:
    """The keys and values of a dict."""
    if type(mapping) is dict:
        return list(mapping.items())
    return [(key, dict.__getitem__(mapping, key)) for key in elements(mapping)]


def size(container: Any) -> int:
    """The number of elements."""
    count: int = _base(container).__len__(container)
    return count


def at(container: Any, key: Any) -> Any:
    """An item of a list, tuple, deque or dict. Raises KeyError, IndexError or TypeError, never makes one."""
    if isinstance(container, dict):
        if not dict.__contains__(container, key):
            raise KeyError(key)
        return dict.__getitem__(container, key)
    return _method(container, "__getitem__")(container, key)


def put(container: Any, key: Any, value: Any) -> None:
    """Set an item of a list, deque or dict. Raises TypeError for what has no items that can be set."""
    _method(container, "__setitem__")(container, key, value)


def _method(container: Any, name: str) -> Any:
    method = getattr(_base(container), name, None)
    if method is None:
        raise TypeError(f"items of a {type(container).__name__} cannot be reached or set by a key")
    return method


def refill(container: Any, content: Any) -> None:
    """Make ``content``, a list, set or dict, what a list, set, deque or dict holds."""
    base = _base(container)
    base.clear(container)
    if isinstance(container, dict):
        for key, value in pairs(content):
            base.__setitem__(container, key, value)
    elif isinstance(container, set):
        base.update(container, content)
    else:
        base.extend(container, content)
