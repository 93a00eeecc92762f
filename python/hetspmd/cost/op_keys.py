"""Keys of measured ops: what a local call's seconds depend on, as text, whatever model it stands in.

    aten.mm.default(float32[60/60,24], float32[24,40]{1,0}) -> float32[60/60,40]

An input is its dtype and *whole* shape. A dim that the row cuts is ``elements/units``: here each device holds
some of 60 rows. ``{1,0}`` lists dims from the outermost in memory to the innermost, where that is another
order than the shape's; dims of one element, and dims that are expanded (stride 0), are left out. An input
that stands twice is ``=i``, the position of the first. Numbers and other arguments follow in place; a summed
output has a ``+``.

All views have one key, ``view``: they touch no data, and cost the call. (On a GPU the host makes it while the GPU
computes; there it is not measured, and free.)

The optimizer's step on a stored parameter is ``optimizer(float32[24/24,40])``; which optimizer, the file says once.

Triples without a factor (whole, or linear in a summand) make the same call, and have the same key.

A tensor's memory order is what the ops give on torch's meta device, asked once for each distinct call (the model's
inputs, parameters and constants are contiguous). Where an op does not run there, its results count as contiguous.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch

from hetspmd.errors import TraceError
from hetspmd.rules.rule import Call, Cut, OpRule, Place, TensorType, Triple
from hetspmd.rules.theory import Theory
from hetspmd.trace.graph import Argument, Ref, value_text
from hetspmd.trace.values import to_torch, torch_dtype, torch_op

Order = tuple[int, ...] | None
"""Dims from the outermost in memory to the innermost, without those of one element and expanded ones; None for the
shape's own order."""

VIEW_KEY: Final = "view"
"""Of all views: a call that touches no data, whatever its shapes."""

_META = torch.device("meta")


def memory_orders(theory: Theory) -> list[Order]:
    """The memory order of each tensor of the graph."""
    graph = theory.graph
    by_tensor: list[Order] = [None] * len(graph.tensors)
    output_orders: dict[Any, tuple[Order, ...]] = {}
    for instruction in graph.instructions:
        call = theory.calls.get(instruction.id)
        if call is None:
            continue
        orders = tuple(by_tensor[t] for t in instruction.inputs)
        # Equal calls share one object (rules.theory).
        key = (id(call), orders)
        if key not in output_orders:
            output_orders[key] = _results(call, orders)
        for t, order in zip(instruction.outputs, output_orders[key], strict=True):
            if t >= 0:
                by_tensor[t] = order
    return by_tensor


def _results(call: Call, orders: Sequence[Order]) -> tuple[Order, ...]:
    try:
        inputs = [
            torch.empty_strided(
                i.shape, dense_strides(i.shape, order)[0], dtype=torch_dtype(i.dtype), device=_META
            )
            for i, order in zip(call.inputs, orders, strict=True)
        ]

        def concrete(value: Argument) -> Any:
            if isinstance(value, Ref):
                return inputs[value.id]
            if isinstance(value, tuple):
                return [concrete(v) for v in value]
            return to_torch(value, _META)

        with torch.no_grad():
            result = torch_op(call.op)(
                *(concrete(a) for a in call.args), **{k: concrete(v) for k, v in call.kwargs.items()}
            )
    except (RuntimeError, TypeError, ValueError, TraceError):
        # The op has no meta kernel, refuses these strides, or is not of this process.
        return (None,) * len(call.outputs)
    results = list(result) if isinstance(result, (list, tuple)) else [result]
    if len(results) != len(call.outputs):
        return (None,) * len(call.outputs)
    return tuple(_order(r) if isinstance(r, torch.Tensor) else None for r in results)


def dense_strides(shape: Sequence[int], order: Order) -> tuple[tuple[int, ...], int]:
    """Strides of a tensor that lies in memory as ``order`` says, dense but for what is expanded, and the number of
    elements that it needs."""
    strides = [1 if extent == 1 else 0 for extent in shape]
    count = 1
    dims = [d for d in range(len(shape)) if shape[d] != 1] if order is None else list(order)
    for d in reversed(dims):
        strides[d] = count
        count *= shape[d]
    return tuple(strides), count


def _order(tensor: torch.Tensor) -> Order:
    shape, strides = tensor.shape, tensor.stride()
    dims = [d for d in range(tensor.ndim) if shape[d] != 1 and strides[d] != 0]
    dims.sort(key=lambda d: (-strides[d], d))
    return None if dims == [d for d in range(tensor.ndim) if shape[d] != 1] else tuple(dims)


def call_key(call: Call, rule: OpRule, row: Triple, orders: Sequence[Order], tensors: Sequence[int]) -> str:
    """The key of a row of a call whose inputs lie in memory as ``orders``; equal numbers in ``tensors`` mark inputs
    that are one tensor."""
    factor = None if row.factor is None else rule.factors[row.factor]
    units = None if factor is None else factor.size
    first: dict[tuple[int, int], int] = {}
    texts: list[str] = []
    for i, (type_, order) in enumerate(zip(call.inputs, orders, strict=True)):
        same = first.setdefault((tensors[i], row.pre[i] if factor is not None else 0), i)
        if same < i:
            texts.append(f"={same}")
            continue
        text = _type_text(type_, None if factor is None else factor.inputs[i], units)
        texts.append(text if order is None else f"{text}{{{','.join(map(str, order))}}}")
    arguments = [value_text(a, texts.__getitem__) for a in call.args]
    arguments += [f"{k}={value_text(v, texts.__getitem__)}" for k, v in call.kwargs.items()]
    outputs = [
        "None" if type_ is None else _type_text(type_, place, units)
        for type_, place in zip(
            call.outputs, (None,) * len(call.outputs) if factor is None else factor.outputs, strict=True
        )
    ]
    return f"{call.op}({', '.join(arguments)}) -> {', '.join(outputs)}"


def _type_text(type_: TensorType, place: Place, units: int | None) -> str:
    shape = [str(extent) for extent in type_.shape]
    if isinstance(place, Cut):
        shape[place.dim] += f"/{units}"
    summed = "" if place is None or isinstance(place, Cut) else "+"
    return f"{summed}{type_.dtype}[{','.join(shape)}]"


def parameter_key(type_: TensorType, dim: int | None) -> str:
    """The key of the optimizer's step on a parameter that is stored whole, or in shards along ``dim``."""
    place = None if dim is None else Cut(dim)
    return f"optimizer({_type_text(type_, place, None if dim is None else type_.shape[dim])})"


def is_parameter_key(key: str) -> bool:
    """Whether a key is of an optimizer's step."""
    return key.startswith("optimizer(")
