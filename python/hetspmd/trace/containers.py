"""Containers of a batch or an output that torch's pytrees do not know: their class, their fields, and back.

Dataclasses, named tuples, classes derived from dict, list and tuple, and objects whose attributes hold tensors are
taken apart into a :class:`ApartContainer`, of which a spec keeps the name of the class and of the fields as text.
They come back as instances of their class, made without calling ``__init__``. A class is found by its name in its
module; one that is local to a function is found where this process has met it.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any, Final

import torch
from torch import nn

from hetspmd.errors import PlanError, TraceError

_PLAIN: Final = (type(None), bool, int, float, str)
_KNOWN: dict[str, type] = {}
"""Classes that this process has taken apart, by name; those local to a function can be found nowhere else."""


class MissingClassError(PlanError):
    """A class of a plan's containers cannot be found in this process."""


@dataclasses.dataclass(frozen=True)
class ApartContainer:
    """A container taken apart: ``kind`` says how, ``name`` is its class's, ``keys`` those of its parts, of which
    the first ``items`` are items and the others attributes."""

    kind: str
    name: str
    keys: tuple[Any, ...]
    items: int
    parts: tuple[Any, ...]


def wrap(
    tree: Any,
    torch_knows: Callable[[Any], bool],
    children: Callable[[Any], tuple[list[Any], Any]],
    rebuilt: Callable[[list[Any], Any], Any],
) -> Any:
    """The tree with a :class:`ApartContainer` in the place of each container that torch does not know.

    ``torch_knows`` says whether torch knows an object as a container, ``children`` gives its parts, and ``rebuilt``
    makes it of others.
    """

    def visit(value: Any, depth: int) -> Any:
        if isinstance(value, (torch.Tensor, *_PLAIN)):
            return value
        if depth > 100:
            raise TraceError(
                f"a {type(value).__name__} of the batch or the output is nested too deeply, or holds itself"
            )
        taken = _apart(value, torch_knows(value))
        if taken is not None:
            kind, keys, items, parts = taken
            name = _name(type(value))
            _KNOWN[name] = type(value)
            return ApartContainer(kind, name, keys, items, tuple(visit(p, depth + 1) for p in parts))
        if not torch_knows(value):
            return value
        inner, spec = children(value)
        wrapped = [visit(p, depth + 1) for p in inner]
        return value if all(a is b for a, b in zip(inner, wrapped, strict=True)) else rebuilt(wrapped, spec)

    return visit(tree, 0)


def unwrap(
    tree: Any,
    torch_knows: Callable[[Any], bool],
    children: Callable[[Any], tuple[list[Any], Any]],
    rebuilt: Callable[[list[Any], Any], Any],
) -> Any:
    """Inverse of :func:`wrap`. Raises MissingClassError for a class that is not found, PlanError for one that has
    changed."""

    def visit(value: Any) -> Any:
        if isinstance(value, ApartContainer):
            return _together(value, [visit(p) for p in value.parts])
        if isinstance(value, (torch.Tensor, *_PLAIN)) or not torch_knows(value):
            return value
        parts, spec = children(value)
        unwrapped = [visit(p) for p in parts]
        return (
            value if all(a is b for a, b in zip(parts, unwrapped, strict=True)) else rebuilt(unwrapped, spec)
        )

    return visit(tree)


def is_cache(value: Any) -> bool:
    """Whether an object is a cache of keys and values, as language models return for generating text."""
    return type(value).__name__.endswith("Cache") and not isinstance(value, (dict, list, tuple))


def _name(cls: type) -> str:
    return f"{cls.__module__}:{cls.__qualname__}"


def _apart(value: Any, torch_knows: bool) -> tuple[str, tuple[Any, ...], int, tuple[Any, ...]] | None:
    """Kind, keys, number of items, and parts of a container that only this module knows; None for any other."""
    cls = type(value)
    if isinstance(value, (type, nn.Module)) or is_cache(value):
        return None
    if callable(value) and not isinstance(value, (dict, list, tuple)) and not dataclasses.is_dataclass(value):
        return None
    if isinstance(value, tuple) and hasattr(cls, "_fields") and hasattr(cls, "_make"):
        return "namedtuple", tuple(cls._fields), len(value), tuple(value)
    if torch_knows:
        return None
    attributes = _attributes(value)
    if isinstance(value, dict):
        if hasattr(value, "__dict__") and vars(value) is value:
            return "attributes", tuple(value), len(value), tuple(value.values())
        keys = (*value, *attributes)
        return "mapping", keys, len(value), (*value.values(), *attributes.values())
    if isinstance(value, (list, tuple)):
        keys = (*range(len(value)), *attributes)
        return (
            "list" if isinstance(value, list) else "tuple",
            keys,
            len(value),
            (*value, *attributes.values()),
        )
    if dataclasses.is_dataclass(value):
        fields = [f.name for f in dataclasses.fields(value) if f.name in attributes]
        keys = (*fields, *(k for k in attributes if k not in fields))
        return "dataclass", keys, len(fields), tuple(attributes[k] for k in keys)
    if _holds_tensors(attributes, 0):
        return "object", tuple(attributes), 0, tuple(attributes.values())
    return None


def _attributes(value: Any) -> dict[str, Any]:
    """What hangs on an object: its dictionary and its slots."""
    attributes = dict(vars(value)) if hasattr(value, "__dict__") else {}
    for cls in type(value).__mro__:
        slots = cls.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                attributes.setdefault(name, getattr(value, name))
    return attributes


def _holds_tensors(value: Any, depth: int) -> bool:
    if isinstance(value, torch.Tensor):
        return True
    if depth > 4 or isinstance(value, (nn.Module, type, *_PLAIN)):
        return False
    if isinstance(value, Mapping):
        return any(_holds_tensors(v, depth + 1) for v in value.values())
    if isinstance(value, (list, tuple)):
        return any(_holds_tensors(v, depth + 1) for v in value)
    return any(_holds_tensors(v, depth + 1) for v in _attributes(value).values())


def _found(name: str) -> Any:
    module, _, qualified = name.partition(":")
    try:
        value: Any = sys.modules.get(module) or import_module(module)
        for part in qualified.split("."):
            value = getattr(value, part)
    except (ImportError, AttributeError, ValueError):
        value = None
    cls = _KNOWN.get(name)
    if cls is not None and (value is None or _name(cls) == name):
        return cls
    if not isinstance(value, type):
        raise MissingClassError(
            f"the class {qualified} of {module}, in which a plan's output comes, is not found on this rank; define "
            "it at the top of a module that every rank imports"
        )
    return value


def _together(held: ApartContainer, parts: list[Any]) -> Any:
    cls = _found(held.name)
    items, attributes = (
        parts[: held.items],
        dict(zip(held.keys[held.items :], parts[held.items :], strict=True)),
    )
    if held.kind == "namedtuple":
        if tuple(getattr(cls, "_fields", ())) != held.keys:
            raise PlanError(
                f"the named tuple {held.name} has the fields {list(getattr(cls, '_fields', ()))}, the plan's "
                f"{list(held.keys)}; compile the plan again"
            )
        return cls._make(items)
    if held.kind == "tuple":
        container: Any = cls(items) if cls is torch.Size else tuple.__new__(cls, items)
    else:
        container = cls.__new__(cls)
    if held.kind in ("mapping", "attributes"):
        dict.update(container, zip(held.keys, items, strict=False))
        if held.kind == "attributes":
            object.__setattr__(container, "__dict__", container)
    elif held.kind == "list":
        list.extend(container, items)
    elif held.kind == "dataclass":
        fields = {f.name for f in dataclasses.fields(cls)} if dataclasses.is_dataclass(cls) else set()
        if not set(held.keys[: held.items]) <= fields:
            raise PlanError(
                f"the dataclass {held.name} has other fields than the plan's; compile the plan again"
            )
        attributes |= dict(zip(held.keys, items, strict=False))
    for key, value in attributes.items():
        object.__setattr__(container, key, value)
    return container
