"""Cutting a parameter to its shard, in place.

A parameter that is cut stays the object that it is: optimizers that were made before, hooks on it and attributes
that were set on it keep their hold. What must not stay is its place in autograd graphs of earlier calls (a first
try whose output is kept, an activation on a module, the weight that a ``weight_norm`` hook computed): as long as
such a graph lives, so does the node that accumulates the parameter's gradient, which knows the whole shape and
refuses another.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations

import torch
from torch import nn

from hetspmd.errors import ShardError
from hetspmd.lower.local_program import LocalTensor
from hetspmd.run.shards import attributes


def part_of(whole: torch.Tensor, layout: LocalTensor | None, device: torch.device) -> torch.Tensor:
    """This rank's part of a whole tensor, on ``device``; a part has memory of its own."""
    if layout is None or layout.region is None:
        return whole.to(device)
    return layout.slice(whole).to(device, copy=True, memory_format=torch.contiguous_format)


def cut(parameter: nn.Parameter, layout: LocalTensor | None, device: torch.device) -> None:
    """Leave this rank's part of a parameter and of its gradient, on ``device``."""
    gradient = parameter.grad
    parameter.grad = None
    part = part_of(parameter.data, layout, device)
    if part.shape != parameter.shape:
        # An earlier graph that needs the values is refused by torch, which compares versions.
        with torch.no_grad():
            parameter.detach().unsqueeze(0)[:0].zero_()
        _leave_graphs(parameter)
    parameter.data = part
    if gradient is not None:
        whole = gradient.detach().to_dense() if gradient.layout != torch.strided else gradient.detach()
        parameter.grad = part_of(whole, layout, device)


def _leave_graphs(parameter: nn.Parameter) -> None:
    """Let the next graph make a node of its own for the parameter: torch makes one where the dtype has changed."""
    other = torch.float32 if parameter.dtype == torch.float64 else torch.float64
    parameter.data = torch.empty(0, dtype=other, device=parameter.device)


def made_from_meta(parameter: nn.Parameter, layout: LocalTensor | None, device: torch.device) -> nn.Parameter:
    """A parameter without values, of this rank's shape, in the place of one on the meta device."""
    shape = parameter.shape if layout is None else layout.local_shape
    substitute = nn.Parameter(
        torch.empty(shape, dtype=parameter.dtype, device=device), parameter.requires_grad
    )
    substitute.__dict__.update(attributes(parameter))
    return substitute


def check_memory(model: nn.Module, shards: Mapping[str, LocalTensor]) -> None:
    """Raise ShardError if tensors of other names share memory that is to be divided: each would get memory of its
    own, and a step of one no longer be seen by the other."""
    by_storage: dict[int, list[tuple[str, torch.Tensor]]] = {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if not tensor.is_meta and tensor.numel():
            by_storage.setdefault(tensor.untyped_storage().data_ptr(), []).append((name, tensor.detach()))
    for tensors in by_storage.values():
        for (one, first), (other, second) in combinations(tensors, 2):
            lost = [n for n in (one, other) if n in shards and shards[n].region is not None]
            if lost and _overlap(first, second):
                raise ShardError(
                    f"{one} and {other} are two tensors in the same memory, and {lost[0]} is stored in shards, "
                    "which no longer are. Make them one parameter (assign the one to the name of the other), or "
                    "give each memory of its own (a clone)"
                )


def _overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of one storage have an element in common."""
    (start, end), (begin, stop) = _span(one), _span(other)
    if start >= stop or begin >= end:
        return False
    if one.dtype != other.dtype:
        return True
    taken = torch.zeros(max(end, stop), dtype=torch.bool)
    taken.as_strided(one.shape, one.stride(), start).fill_(True)
    return bool(taken.as_strided(other.shape, other.stride(), begin).any())


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """The elements of its storage, first and behind the last, between which all of the tensor's lie."""
    start = int(tensor.storage_offset())
    return start, start + 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
