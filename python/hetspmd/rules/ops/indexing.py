"""Rules of ops that read or write at positions given by index tensors.

For an indexed dim of ``extent`` elements, of which a device holds ``start .. start + n``:

- reading (gather, index_select, index, take): the device reads where ``start <= index < start + n``, else 0;
  every position is read on exactly one device, so the results are summands (All-Reduce);
- writing (scatter, index_add, index_put, ...): the device writes at ``index - start`` where it holds the
  slot; the others go to an extra slot ``n``, which is dropped. The result is this device's slice;
- adding, with the *positions* cut: each device adds its share, so base and result are summands.

Without accumulation, several values for one slot leave the winner open, and it may differ between devices;
so such ops are linear only where all positions write the same value.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hetspmd.rules.factor_places import Factors, Where
from hetspmd.rules.registry import rule
from hetspmd.rules.rule import SUM, Call, Local, LocalCall, OpRule
from hetspmd.rules.terms import linear_sets, wrap
from hetspmd.trace.values import torch_op

ANY_WINNER = "several values for one slot leave the winner open; it may differ between devices"


@rule("aten.gather.default")
def gather(call: Call) -> OpRule:
    """(x, dim, index): index may be shorter than x in other dims; such a dim is blocked."""
    x, index = call.inputs[0], call.inputs[1]
    at = wrap(call.arg(1, "dim"), x.ndim)
    factors = Factors(call)
    for d in range(index.ndim):
        if d == at:
            factors.add("index", {1: d}, {0: d})
        elif x.ndim and x.shape[d] == index.shape[d]:
            factors.add(f"d{d}", {0: d, 1: d}, {0: d})
    if x.ndim and index.ndim:
        factors.add("slots", {0: at}, {0: SUM})
    return OpRule(factors.done(), linear_sets(call, [(0,)]), rewrite=_gather)


def _gather(local: Local) -> LocalCall:
    if local.row.name != "slots":
        return local.default()
    x, dim, index = local.call.args[:3]
    return gather_part, (x, dim, index, local.start), {}


def gather_part(x: Tensor, dim: int, index: Tensor, start: int) -> Tensor:
    """``gather`` from the slots ``start .. start + n`` that x holds, 0 where index lies elsewhere."""
    n = x.shape[dim]
    slot = index - start
    held = (slot >= 0) & (slot < n)
    return x.gather(dim, slot.clamp(0, n - 1)).masked_fill(~held, 0)


@rule("aten.index_select.default")
def index_select(call: Call) -> OpRule:
    """(x, dim, index) with index of one dim."""
    x, index = call.inputs[0], call.inputs[1]
    at = wrap(call.arg(1, "dim"), x.ndim)
    factors = Factors(call)
    for d in range(x.ndim):
        if d != at:
            factors.add(f"d{d}", {0: d}, {0: d})
    if x.ndim and index.ndim:
        factors.add("index", {1: 0}, {0: at})
        factors.add("slots", {0: at}, {0: SUM})
    return OpRule(factors.done(), linear_sets(call, [(0,)]), rewrite=_index_select)


def _index_select(local: Local) -> LocalCall:
    if local.row.name != "slots":
        return local.default()
    x, dim, index = local.call.args[:3]
    return index_select_part, (x, dim, index, local.start), {}


def index_select_part(x: Tensor, dim: int, index: Tensor, start: int) -> Tensor:
    """``index_select`` from the slots ``start .. start + n`` that x holds, 0 where index lies elsewhere."""
    n = x.shape[dim]
    slot = index - start
    held = (slot >= 0) & (slot < n)
    picked = x.index_select(dim, slot.clamp(0, n - 1))
    along = [1] * x.ndim
    along[dim] = -1
    return picked.masked_fill(~held.view(along), 0)


@rule("aten.take.default")
def take(call: Call) -> OpRule:
    """(x, index): index counts the elements of x. Slices of x along its slowest dim are consecutive."""
    x, index = call.inputs[0], call.inputs[1]
    factors = Factors(call)
    for d in range(index.ndim):
        factors.add(f"d{d}", {1: d}, {0: d})
    lead = next((d for d, extent in enumerate(x.shape) if extent != 1), None)
    if lead is not None:
        factors.add("slots", {0: lead}, {0: SUM})
    return OpRule(factors.done(), linear_sets(call, [(0,)]), rewrite=_take)


def _take(local: Local) -> LocalCall:
    if local.row.name != "slots":
        return local.default()
    extent, held = 1, 1
    for whole, part in zip(local.call.inputs[0].shape, local.input_shapes[0], strict=True):
        extent, held = extent * whole, held * part
    start = local.start * (held // (local.stop - local.start))
    return take_part, (*local.call.args[:2], start, extent), {}


def take_part(x: Tensor, index: Tensor, start: int, extent: int) -> Tensor:
    """``take`` from a tensor of ``extent`` elements of which x holds those from ``start``, else 0."""
    slot = torch.where(index < 0, index + extent, index) - start
    held = (slot >= 0) & (slot < x.numel())
    return x.take(slot.clamp(0, x.numel() - 1)).masked_fill(~held, 0)


@rule(
    "aten.scatter.src",
    "aten.scatter.value",
    "aten.scatter_add.default",
    "aten.scatter.reduce",
    "aten.scatter.value_reduce",
    "aten.scatter_reduce.two",
)
def scatter(call: Call) -> OpRule:
    """(x, dim, index, src or value): a dim where index or src is shorter than x is blocked."""
    x, index = call.inputs[0], call.inputs[1]
    src = call.inputs[2] if len(call.inputs) > 2 else None
    if not x.ndim or not index.ndim:
        return OpRule()
    at = wrap(call.arg(1, "dim"), x.ndim)
    reduce = call.arg(4, "reduce") if call.kwargs.get("include_self", True) else None
    adds = "scatter_add" in call.op or reduce in ("add", "sum")
    multiplies = reduce in ("multiply", "prod")
    factors = Factors(call)
    for d in range(x.ndim):
        same = src is None or src.shape[d] == index.shape[d]
        read: dict[int, Where] = {1: d} if src is None else {1: d, 2: d}
        if d == at:
            factors.add("slots", {0: d}, {0: d})
            if adds and same:
                factors.add("index", {0: SUM} | read, {0: SUM})
        elif same and index.shape[d] == x.shape[d]:
            factors.add(f"d{d}", {0: d} | read, {0: d})
    groups: tuple[tuple[int, ...], ...] = ()
    if adds and src is not None:
        groups = ((0, 2),)
    elif multiplies or (call.op == "aten.scatter.value" and call.arg(3, "value") == 0):
        groups = ((0,),)
    omitted = {"{partial, replicated, partial} {partial}": ANY_WINNER}
    return OpRule(factors.done(), linear_sets(call, groups), rewrite=_write_slots, omitted=omitted)


@rule(
    "aten.index_add.default",
    "aten.index_copy.default",
    "aten.index_fill.int_Scalar",
    "aten.index_fill.int_Tensor",
    "aten.index_reduce.default",
)
def index_write(call: Call) -> OpRule:
    """(x, dim, index, source or value) with index of one dim."""
    x, index = call.inputs[0], call.inputs[1]
    if not x.ndim or not index.ndim:
        return OpRule()
    at = wrap(call.arg(1, "dim"), x.ndim)
    fills = "index_fill" in call.op
    source = None if fills else call.inputs[2]
    factors = Factors(call)
    for d in range(x.ndim):
        if d == at:
            factors.add("slots", {0: d}, {0: d})
            if "index_add" in call.op:
                factors.add("index", {0: SUM, 1: 0, 2: d}, {0: SUM})
        else:
            factors.add(f"d{d}", {0: d} if source is None else {0: d, 2: d}, {0: d})
    groups: tuple[tuple[int, ...], ...] = ()
    if "index_add" in call.op or call.op == "aten.index_fill.int_Tensor":
        groups = ((0, 2),)
    elif fills and call.arg(3, "value") == 0:
        groups = ((0,),)
    omitted = {"{partial, replicated, partial} {partial}": ANY_WINNER}
    return OpRule(factors.done(), linear_sets(call, groups), rewrite=_write_slots, omitted=omitted)


def _write_slots(local: Local) -> LocalCall:
    call = local.call
    if local.row.name != "slots":
        return local.default()
    x, dim, index, *rest = call.args
    extent = call.inputs[0].shape[wrap(dim, call.inputs[0].ndim)]
    return write_part, (call.op, x, dim, index, local.start, extent, *rest), dict(call.kwargs)


def write_part(
    op: str, x: Tensor, dim: int, index: Tensor, start: int, extent: int, *rest: Any, **options: Any
) -> Tensor:
    """``op(x, dim, index, *rest)``, where x holds the slots from ``start`` on of ``extent``.

    What others hold is written to a slot behind them, in place, so that no more than one wide copy is held.
    """
    n = x.shape[dim]
    shape = list(x.shape)
    shape[dim] = 1
    wide = torch.cat([x, x.new_zeros(shape)], dim)
    slot = torch.where(index < 0, index + extent, index) - start
    held = (slot >= 0) & (slot < n)
    namespace, name, overload = op.split(".")
    in_place = torch_op(f"{namespace}.{name}_.{overload}")
    written: Tensor = in_place(wide, dim, slot.masked_fill(~held, n), *rest, **options)
    return written.narrow(dim, 0, n).contiguous()


@rule("aten.masked_scatter.default")
def masked_scatter(call: Call) -> OpRule:
    """(x, mask, source): where source's next element goes depends on all of the mask before."""
    return OpRule((), linear_sets(call, [(0, 2)]))


@rule("aten.masked_select.default", "aten.masked_scatter_backward.default")
def masked_select(call: Call) -> OpRule:
    """(x, mask): where an element goes depends on all of the mask before."""
    return OpRule((), linear_sets(call, [(0,)]))


@rule("aten.nonzero.default", "aten.nonzero_static.default")
def nonzero(call: Call) -> OpRule:
    """Where a position goes depends on all positions before: never sharded."""
    return OpRule()


@rule("aten.bucketize.Tensor", "aten.bucketize.Scalar")
def bucketize(call: Call) -> OpRule:
    """(x, boundaries): the number of boundaries below x, so a sum over slices of the boundaries."""
    factors = Factors(call)
    boundaries = len(call.inputs) - 1
    if boundaries:
        for d in range(call.inputs[0].ndim):
            factors.add(f"d{d}", {0: d}, {0: d})
    factors.add("boundaries", {boundaries: 0}, {0: SUM})
    return OpRule(factors.done())


@rule("aten.searchsorted.Tensor", "aten.searchsorted.Scalar")
def searchsorted(call: Call) -> OpRule:
    """(sequence, x): as bucketize, with a sequence for each row of x where the sequence has rows."""
    sequence = call.inputs[0]
    sorter = call.kwargs.get("sorter") is not None
    every = range(len(call.inputs))
    factors = Factors(call)
    if "Tensor" in call.op:
        rows = sequence.ndim > 1
        for d in range(call.inputs[1].ndim):
            last = d == call.inputs[1].ndim - 1
            factors.add(f"d{d}", {1: d} if last or not rows else dict.fromkeys(every, d), {0: d})
    if not sorter:  # a sorter counts the elements of the whole sequence
        factors.add("boundaries", {0: sequence.ndim - 1}, {0: SUM})
    return OpRule(factors.done())
