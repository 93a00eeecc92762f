"""Rules of advanced indexing, ``x[:, i, j]`` and its writes.

The index tensors broadcast to one shape S. The result has S in place of the indexed dims if these lie side by
side, else in front, and the other dims of x around it. So

- dims of x that are not indexed are parallel;
- dims of S are parallel when reading, and when adding they make summands;
- an indexed dim is cut as :mod:`hetspmd.rules.ops.indexing` says.

A bool mask takes the place of as many dims as it has, and the elements it selects form one dim of the
result, whose extent depends on data: never cut. Only where one value is written to all of them,
``x[mask] = v``, the op is elementwise and the masked dims are parallel as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hetspmd.rules.factor_places import Factors, Where
from hetspmd.rules.ops.indexing import ANY_WINNER
from hetspmd.rules.registry import rule
from hetspmd.rules.rule import SUM, Call, Local, LocalCall, OpRule
from hetspmd.rules.terms import linear_sets
from hetspmd.trace.graph import Ref


@dataclass(frozen=True)
class _Layout:
    """``indices``: dim of x -> input index of its index tensor; ``shape`` is S, from result dim ``front`` on;
    ``result_dims``: dim of x -> dim of the result."""

    indices: dict[int, int]
    shape: tuple[int, ...]
    front: int
    result_dims: dict[int, int]

    @property
    def ndim(self) -> int:
        return len(self.shape) + len(self.result_dims)

    def along(self, call: Call, s: int) -> dict[int, Where]:
        """Places of dim s of S in the index tensors."""
        places: dict[int, Where] = {}
        for i in self.indices.values():
            d = s - (len(self.shape) - call.inputs[i].ndim)
            if d >= 0 and call.inputs[i].shape[d] == self.shape[s]:
                places[i] = d
        return places


def _broadcast(shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """The shape that shapes known to fit broadcast to."""
    ndim = max(map(len, shapes))
    padded = [(1,) * (ndim - len(shape)) + shape for shape in shapes]
    return tuple(
        next((extent for extent in extents if extent != 1), 1) for extents in zip(*padded, strict=True)
    )


def _layout(call: Call) -> _Layout | None:
    """The layout of ``call``'s result; None where a mask is among the indices."""
    x = call.inputs[0]
    indices = {d: i.id for d, i in enumerate(call.args[1]) if isinstance(i, Ref)}
    if not indices or any(call.inputs[i].dtype in ("bool", "uint8") for i in indices.values()):
        return None
    shape = _broadcast([call.inputs[i].shape for i in indices.values()])
    dims = list(indices)
    beside = dims[-1] - dims[0] == len(dims) - 1
    front = dims[0] if beside else 0
    rest = [d for d in range(x.ndim) if d not in indices]
    result_dims = {d: k if k < front else k + len(shape) for k, d in enumerate(rest)}
    return _Layout(indices, shape, front, result_dims)


def _masked(call: Call) -> range | None:
    """The dims of x that a bool mask takes the place of; None unless it is the only index."""
    indices = [(d, i.id) for d, i in enumerate(call.args[1]) if isinstance(i, Ref)]
    if len(indices) != 1 or call.inputs[indices[0][1]].dtype not in ("bool", "uint8"):
        return None
    first, mask = indices[0]
    return range(first, first + call.inputs[mask].ndim)


@rule("aten.index.Tensor", "aten._unsafe_index.Tensor")
def index(call: Call) -> OpRule:
    """(x, indices)."""
    factors = Factors(call)
    covered = _masked(call)
    if covered is not None:
        for d in range(call.inputs[0].ndim):
            if d not in covered:
                factors.add(f"d{d}", {0: d}, {0: d if d < covered.start else d - len(covered) + 1})
        return OpRule(factors.done(), linear_sets(call, [(0,)]))
    at = _layout(call)
    if at is None:
        return OpRule()
    for d, out in at.result_dims.items():
        factors.add(f"d{d}", {0: d}, {0: out})
    for s in range(len(at.shape)):
        if at.shape[s] > 1:
            factors.add(f"s{s}", at.along(call, s), {0: at.front + s})
    for d in at.indices:
        factors.add(f"slots{d}", {0: d}, {0: SUM})
    return OpRule(factors.done(), linear_sets(call, [(0,)]), rewrite=_index)


def _slots(local: Local) -> int | None:
    """The indexed dim that a row cuts, None for other rows."""
    name = local.row.name
    return int(name.removeprefix("slots")) if name.startswith("slots") else None


def _index(local: Local) -> LocalCall:
    at, dim = _layout(local.call), _slots(local)
    if at is None or dim is None:
        return local.default()
    trailing = at.ndim - at.front - len(at.shape)
    extent = local.call.inputs[0].shape[dim]
    return index_part, (*local.call.args[:2], dim, local.start, extent, trailing), {}


def index_part(
    x: Tensor, indices: list[Tensor | None], dim: int, start: int, extent: int, trailing: int
) -> Tensor:
    """``x[indices]`` where x holds the slots from ``start`` on of the ``extent`` of ``dim``; 0 elsewhere.

    ``trailing`` is the number of dims of the result that follow those of the index tensors.
    """
    slot, held = _local_slots(indices, dim, start, extent, x.shape[dim])
    picked = torch.ops.aten.index.Tensor(x, _replaced(indices, dim, slot.clamp(0, x.shape[dim] - 1)))
    mask = held.reshape(held.shape + (1,) * trailing)
    result: Tensor = picked.masked_fill(~mask, 0)
    return result


@rule("aten.index_put.default", "aten._unsafe_index_put.default", "aten._index_put_impl.default")
def index_put(call: Call) -> OpRule:
    """(x, indices, values, accumulate): values broadcast to the shape of ``x[indices]``."""
    values = len(call.inputs) - 1
    accumulate = bool(call.arg(3, "accumulate", False))
    covered = _masked(call)
    if covered is not None:
        return _mask_put(call, covered, values)
    at = _layout(call)
    if at is None:
        return OpRule()
    value = call.inputs[values]
    factors = Factors(call)

    def in_values(out: int) -> dict[int, Where]:
        d = out - (at.ndim - value.ndim)
        return {values: d} if d >= 0 and value.shape[d] != 1 else {}

    for d, out in at.result_dims.items():
        factors.add(f"d{d}", {0: d} | in_values(out), {0: d})
    for s in range(len(at.shape)):
        if accumulate and at.shape[s] > 1:
            factors.add(f"s{s}", {0: SUM} | at.along(call, s) | in_values(at.front + s), {0: SUM})
    for d in at.indices:
        factors.add(f"slots{d}", {0: d}, {0: d})
    groups = ((0, values),) if accumulate else ()
    omitted = {"{partial, *, partial} {partial}": ANY_WINNER}
    return OpRule(factors.done(), linear_sets(call, groups), rewrite=_index_put, omitted=omitted)


def _mask_put(call: Call, covered: range, values: int) -> OpRule:
    value = call.inputs[values]
    ndim = call.out.ndim - len(covered) + 1  # of x[indices]
    selected = covered.start - (ndim - value.ndim)
    one_value = selected < 0 or value.shape[selected] == 1
    factors = Factors(call)
    for d in range(call.out.ndim):
        if d in covered:
            if one_value:
                factors.add(f"d{d}", {0: d, 1: d - covered.start}, {0: d})
            continue
        at = (d if d < covered.start else d - len(covered) + 1) - (ndim - value.ndim)
        own: dict[int, Where] = {values: at} if at >= 0 and value.shape[at] != 1 else {}
        factors.add(f"d{d}", {0: d} | own, {0: d})
    return OpRule(factors.done(), linear_sets(call, [(0, values)]))


def _index_put(local: Local) -> LocalCall:
    dim = _slots(local)
    if dim is None:
        return local.default()
    call = local.call
    extent = call.inputs[0].shape[dim]
    args = (*call.args[:3], bool(call.arg(3, "accumulate", False)), dim, local.start, extent)
    return index_put_part, args, {}


def index_put_part(
    x: Tensor,
    indices: list[Tensor | None],
    values: Tensor,
    accumulate: bool,
    dim: int,
    start: int,
    extent: int,
) -> Tensor:
    """``index_put`` where x holds the slots from ``start`` on of the ``extent`` of ``dim``."""
    n = x.shape[dim]
    shape = list(x.shape)
    shape[dim] = 1
    wide = torch.cat([x, x.new_zeros(shape)], dim)
    slot, held = _local_slots(indices, dim, start, extent, n)
    written = torch.ops.aten.index_put.default(
        wide, _replaced(indices, dim, slot.masked_fill(~held, n)), values, accumulate
    )
    result: Tensor = written.narrow(dim, 0, n).contiguous()
    return result


def _local_slots(
    indices: Sequence[Tensor | None], dim: int, start: int, extent: int, n: int
) -> tuple[Tensor, Tensor]:
    """The local slots that the index tensor of ``dim`` means, and which of them this device holds."""
    index = indices[dim]
    assert index is not None
    slot = torch.where(index < 0, index + extent, index) - start
    return slot, (slot >= 0) & (slot < n)


def _replaced(indices: Sequence[Tensor | None], dim: int, slot: Tensor) -> list[Tensor | None]:
    return [slot if d == dim else index for d, index in enumerate(indices)]
