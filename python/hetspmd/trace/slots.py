"""What a step leaves in the slots of a model's parameters and buffers.

A module holds its tensors in slots. A forward changes what a slot holds in three ways: an op writes to the tensor
(the export finds that), its memory is replaced (:mod:`hetspmd.trace.assignments`), or another tensor is put in the
slot, as ``self.ema = 0.9 * self.ema + 0.1 * x.mean(0)`` does. The last two are found here. Either is an update of
the graph: the value that the slot has after the step. The slots themselves are put back.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hetspmd.errors import TraceError
from hetspmd.trace.compat.tensors import memory_of

_GONE = object()


@dataclass(frozen=True)
class _Slot:
    """A place of a module; ``group`` numbers the tensor that it held before the trace."""

    name: str
    table: dict[str, Any]
    key: str
    is_parameter: bool
    group: int

    @property
    def kind(self) -> str:
        return "parameter" if self.is_parameter else "buffer"


class Slots:
    """The slots of a model as they are when this is made; tied ones hold one tensor, and parameters are told apart
    from other tensors as in the model."""

    def __init__(self, model: nn.Module) -> None:
        self._tables: list[tuple[str, bool, dict[str, Any]]] = []
        self._slots: list[_Slot] = []
        groups: dict[int, int] = {}
        for path, module in model.named_modules():
            for is_parameter, table in ((True, module._parameters), (False, module._buffers)):
                self._tables.append((path, is_parameter, table))
                for key, tensor in table.items():
                    group = groups.setdefault(id(tensor), len(groups)) if tensor is not None else -1
                    self._slots.append(_Slot(_joined(path, key), table, key, is_parameter, group))
        self._held: list[Any] = []

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Within the context tied slots hold one tensor; afterwards all hold what they held before."""
        before = [dict(table) for _, _, table in self._tables]
        first: dict[int, Any] = {}
        for slot in self._slots:
            if slot.group >= 0:
                slot.table[slot.key] = first.setdefault(slot.group, slot.table[slot.key])
            if slot.is_parameter and slot.group >= 0:
                slot.table[slot.key]._is_param = True  # what isinstance(value, nn.Parameter) looks for
        self._held = [slot.table[slot.key] for slot in self._slots]
        try:
            yield
        finally:
            for (_, _, table), tensors in zip(self._tables, before, strict=True):
                table.clear()
                table.update(tensors)

    def updates(self, assigned: Collection[torch.Tensor]) -> dict[str, torch.Tensor]:
        """The new value of each slot that another tensor was put in, or whose tensor is in ``assigned``, by the
        first name of its tensor.

        Raises TraceError, with the name, for a slot that cannot be updated.
        """
        self._refuse_new()
        replaced = {id(tensor) for tensor in assigned}
        updates: dict[str, torch.Tensor] = {}
        values: dict[int, Any] = {}
        for slot, held in zip(self._slots, self._held, strict=True):
            value = slot.table.get(slot.key, _GONE)
            if held is None and value is None:
                continue
            if value is not held:
                _check(slot, held, value)
            first = values.setdefault(slot.group, value)
            if first is not value:
                raise TraceError(
                    f"forward gives buffer {slot.name} another tensor than the name it is tied to; change it in "
                    f"place: self.{slot.key}.copy_(value)"
                )
            if value is not held or id(value) in replaced:
                updates.setdefault(self._first(slot.group), value)
        self._refuse_shared(updates)
        return updates

    def _first(self, group: int) -> str:
        return next(slot.name for slot in self._slots if slot.group == group)

    def _refuse_new(self) -> None:
        keys = {(id(slot.table), slot.key) for slot in self._slots}
        for path, is_parameter, table in self._tables:
            for key in table:
                if (id(table), key) not in keys:
                    kind = "parameter" if is_parameter else "buffer"
                    raise TraceError(
                        f"forward registers {kind} {_joined(path, key)}; register it in __init__, with its final "
                        "shape, or call the model once on one device before HAP or compile"
                    )

    def _refuse_shared(self, new_values: dict[str, torch.Tensor]) -> None:
        """Refuse a new value whose memory is another slot's: a later change of either would change both."""
        names: dict[int, str] = {}
        for slot in self._slots if new_values else ():
            value = slot.table.get(slot.key)
            if isinstance(value, torch.Tensor) and value.numel():
                first = self._first(slot.group)
                other = names.setdefault(memory_of(value), first)
                if other != first and (other in new_values or first in new_values):
                    which = first if first in new_values else other
                    raise TraceError(
                        f"after forward {first} and {other} share memory, so that a change of one would change the "
                        f"other; give {which} memory of its own: value.clone(), or .copy_(value)"
                    )


def _check(slot: _Slot, held: Any, value: Any) -> None:
    """Refuse what cannot be put in a slot of a plan."""
    if slot.is_parameter:
        raise TraceError(
            f"forward replaces parameter {slot.name}, which an optimizer would not follow; change it in place: "
            f"with torch.no_grad(): self.{slot.key}.copy_(value)"
        )
    if held is None:
        raise TraceError(
            f"forward makes buffer {slot.name}, which is None before; give it its final shape in __init__ "
            f"(self.register_buffer({slot.key!r}, torch.zeros(...))), or call the model once on one device before "
            "HAP or compile"
        )
    if not isinstance(value, torch.Tensor):
        raise TraceError(
            f"forward takes away buffer {slot.name}; a plan's buffers stay: fill it with a value that says so"
        )
    if value.shape != held.shape or value.dtype != held.dtype:
        raise TraceError(
            f"forward puts {_meta(value)} into buffer {slot.name}, which is {_meta(held)}; give it its final shape "
            f"and dtype in __init__: self.register_buffer({slot.key!r}, torch.zeros({list(value.shape)}, "
            f"dtype={value.dtype}))"
        )


def _joined(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def _meta(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
