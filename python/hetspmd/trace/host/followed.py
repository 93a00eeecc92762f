"""An object whose attributes are recorded as they are read."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any, Final

from hetspmd.trace.host.places import Path
from hetspmd.trace.host.reads import OWN_OF_MODULES

PAST_THE_CLASS: Final = frozenset({"__getattribute__", "getattr_static"})
"""What reads an attribute of an object past what its class does."""
_SLOTS: Final = ("_parameters", "_buffers", "_modules")


@dataclass(slots=True)
class Followed:
    """An object whose attributes are recorded, and those that it had."""

    of: Any
    root: str
    path: Path
    live: MutableMapping[str, Any]
    before: dict[str, Any]
    seen: set[str] = field(default_factory=set)
    own: set[str] = field(init=False)
    """The attributes that are not torch's."""
    slots: tuple[dict[str, Any], ...] = field(init=False)
    """What holds the parameters, buffers and submodules of a module."""

    def __post_init__(self) -> None:
        self.own = self.before.keys() - OWN_OF_MODULES
        slots = (self.before.get(kind) for kind in _SLOTS)
        self.slots = tuple(slot for slot in slots if isinstance(slot, dict))


def place_in(followed: Mapping[int, Followed], value: Any) -> tuple[str, Path] | None:
    """Where an object lies that is one of these, by ``id``."""
    entry = followed.get(id(value))
    return None if entry is None else (entry.root, entry.path)
