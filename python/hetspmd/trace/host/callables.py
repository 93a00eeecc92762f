"""Functions that an attribute of a module holds: itself, in containers, and in objects of the user's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
from torch import nn

from hetspmd.trace.host.members import members
from hetspmd.trace.host.plain import is_container, is_scalar
from hetspmd.trace.host.raw import elements, pairs, size

__all__ = ["Callables"]

_DEEPEST: Final = 4
_LONGEST: Final = 1_000
_OF_TORCH: Final = frozenset(vars(nn.Module()))


class Callables:
    """Finds what can be called in values, and the functions of the classes of their objects, each once."""

    def __init__(self, is_foreign: Callable[[object], bool]) -> None:
        self._is_foreign = is_foreign
        self._seen: dict[int, Any] = {}

    def of(self, module: nn.Module) -> Iterator[Any]:
        """Those of a module's attributes, in an order that is the same on every rank."""
        for name, value in list(vars(module).items()):
            if name not in _OF_TORCH:
                yield from self._within(value, 0)
        yield from (*module._forward_hooks.values(), *module._forward_pre_hooks.values())

    def _within(self, value: Any, depth: int) -> Iterator[Any]:
        """Modules are left out: they are looked at by themselves."""
        if is_scalar(value) or isinstance(value, (torch.Tensor, nn.Module, type)):
            return
        if depth > _DEEPEST or id(value) in self._seen:
            return
        self._seen[id(value)] = value
        if is_container(value):
            if size(value) <= _LONGEST and not isinstance(value, (set, frozenset)):
                held = [v for _, v in pairs(value)] if isinstance(value, dict) else elements(value)
                for inner in held:
                    yield from self._within(inner, depth + 1)
            return
        if callable(value):
            yield value
        kind = type(value)
        if self._is_foreign(kind.__module__):
            return
        for base in kind.__mro__:
            if id(base) not in self._seen and not self._is_foreign(base.__module__):
                self._seen[id(base)] = base
                yield from (f for f in vars(base).values() if callable(f) and not isinstance(f, type))
        for inner in (members(value) or {}).values():
            yield from self._within(inner, depth + 1)
