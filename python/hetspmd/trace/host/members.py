"""Attributes of an object, those in ``__slots__`` among them."""

from __future__ import annotations

import functools
from collections.abc import Iterator, MutableMapping
from types import MemberDescriptorType
from typing import Any


class Members(MutableMapping[str, Any]):
    """The attributes that an object has of its own, as a mapping that changes with it."""

    def __init__(self, of: Any) -> None:
        self.of = of
        self._slots = slots_of(type(of))
        self._rest: dict[str, Any] = getattr(of, "__dict__", {})

    def __getitem__(self, name: str) -> Any:
        slot = self._slots.get(name)
        if slot is None:
            return self._rest[name]
        try:
            return slot.__get__(self.of)
        except AttributeError:
            raise KeyError(name) from None

    def __setitem__(self, name: str, value: Any) -> None:
        slot = self._slots.get(name)
        if slot is None:
            self._rest[name] = value
        else:
            slot.__set__(self.of, value)

    def __delitem__(self, name: str) -> None:
        slot = self._slots.get(name)
        if slot is None:
            del self._rest[name]
        else:
            slot.__delete__(self.of)

    def __iter__(self) -> Iterator[str]:
        yield from (name for name in self._slots if name in self)
        yield from self._rest

    def __len__(self) -> int:
        return sum(1 for _ in self)


def members(value: object) -> MutableMapping[str, Any] | None:
    """The attributes of an object, None if it can have none: its ``__dict__`` where it has no slots."""
    attributes = getattr(value, "__dict__", None)
    if slots_of(type(value)):
        return Members(value)
    return attributes if isinstance(attributes, dict) else None


def is_slot(holder: object, name: str) -> bool:
    """Whether an attribute of an object lies in one of its ``__slots__``."""
    return name in slots_of(type(holder))


def slots_of(kind: type) -> dict[str, MemberDescriptorType]:
    """The slots of a class, as Python made them: a name that begins with two underscores as it is found."""
    slots: dict[str, MemberDescriptorType] = {}
    for base in kind.__mro__:
        for name in _named(vars(base).get("__slots__", ())):
            full = f"_{base.__name__.lstrip('_')}{name}" if _is_private(name) else name
            descriptor = vars(base).get(full)
            if isinstance(descriptor, MemberDescriptorType):
                slots.setdefault(full, descriptor)
    return slots


def home_of_data(kind: type, name: str) -> type | None:
    """The class that has an attribute which is a value, no function, property or other descriptor."""
    for base in kind.__mro__:
        if name in vars(base):
            value = vars(base)[name]
            is_data = not hasattr(value, "__get__") or type(value).__name__ == "member_descriptor"
            return base if is_data else None
    return None


def code_of(kind: type, name: str) -> Any:
    """What computes an attribute of a class's objects, as it lies in the class; None if nothing does."""
    attribute = next((vars(base)[name] for base in kind.__mro__ if name in vars(base)), None)
    return attribute if isinstance(attribute, (property, functools.cached_property)) else None


def _named(slots: Any) -> tuple[str, ...]:
    return (slots,) if isinstance(slots, str) else tuple(slots)


def _is_private(name: str) -> bool:
    return name.startswith("__") and not name.endswith("__")
