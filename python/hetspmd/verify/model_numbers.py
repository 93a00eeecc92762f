"""Numbers of a graph that are the model's own numbers, rounded to the dtype that it was traced in.

A model says ``torch.tensor(0.1)`` or ``torch.finfo(x.dtype).eps``, and the trace records float32's. One that
computes in float64 has others there. :func:`with_own_numbers` takes those from a trace of the model in the
other dtype, where they are the same numbers but for rounding; what differs otherwise stays as the plan has it,
and fails the comparison.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from hetspmd.trace.assemble import constant_data
from hetspmd.trace.graph import CONSTANT, Argument, Constant, Graph, Instruction, Tensor
from hetspmd.trace.values import torch_dtype
from hetspmd.verify.precision import data_text, tensor_in
from hetspmd.verify.verify_thresholds import THRESHOLDS

_NARROW = (torch.float32, torch.bfloat16, torch.float16)
_LIMITS = ("min", "max", "eps", "tiny", "smallest_normal", "resolution")
"""What ``torch.finfo`` has of a dtype."""


def with_own_numbers(graph: Graph, traced: Graph, dtype: torch.dtype) -> Graph:
    """``graph``, retyped to ``dtype``, with the numbers of ``traced``, a trace of the model in that dtype.

    Instructions and constants correspond by name.
    """
    instructions = {i.name: i for i in traced.instructions}
    constants = {traced.tensors[c.tensor].name: c for c in traced.constants}

    def constant(own: Constant) -> Constant:
        other = constants.get(graph.tensors[own.tensor].name)
        if other is None:
            return own
        if own.data is not None and other.data is not None:
            places = graph.tensors[own.tensor], traced.tensors[other.tensor]
            return replace(own, data=_data(own.data, other.data, *places, dtype))
        by_name = {i.name: i for i in other.program}
        return replace(
            own, program=tuple(_instruction(i, by_name, graph, traced, dtype) for i in own.program)
        )

    return replace(
        graph,
        instructions=tuple(_instruction(i, instructions, graph, traced, dtype) for i in graph.instructions),
        constants=tuple(map(constant, graph.constants)),
    )


def _instruction(
    instruction: Instruction,
    others: Mapping[str, Instruction],
    graph: Graph,
    traced: Graph,
    dtype: torch.dtype,
) -> Instruction:
    other = others.get(instruction.name)
    if other is None or other.op != instruction.op or len(other.args) != len(instruction.args):
        return instruction
    if instruction.op == CONSTANT and instruction.args:
        places = graph.tensors[instruction.outputs[0]], traced.tensors[other.outputs[0]]
        return replace(instruction, args=(_data(instruction.args[0], other.args[0], *places, dtype),))
    named = dict(other.kwargs)
    return replace(
        instruction,
        args=tuple(_number(a, b, dtype) for a, b in zip(instruction.args, other.args, strict=True)),
        kwargs=tuple((k, _number(v, named.get(k), dtype)) for k, v in instruction.kwargs),
    )


def _number(here: Argument, there: Argument, dtype: torch.dtype) -> Argument:
    """The number of the other trace, if it is the same one but for rounding, or the same limit of its dtype."""
    if isinstance(here, tuple) and isinstance(there, tuple) and len(here) == len(there):
        return tuple(_number(a, b, dtype) for a, b in zip(here, there, strict=True))
    if not (isinstance(here, float) and isinstance(there, float)) or here == there:
        return here
    rounded = any(float(torch.tensor(there, dtype=torch.float64).to(d)) == here for d in _NARROW)
    return there if rounded or _of_limits(here, there, dtype) else here


def _of_limits(here: float, there: float, dtype: torch.dtype) -> bool:
    """Whether the numbers are the same multiple of a limit of their dtypes, or of its square root."""
    if here == 0.0 or there == 0.0:
        return False
    wide = torch.finfo(dtype)
    for narrow in map(torch.finfo, _NARROW):
        for name in _LIMITS:
            ratio = getattr(narrow, name) / getattr(wide, name)
            if any(
                math.isclose(here / there, r, rel_tol=THRESHOLDS.same_number)
                for r in (ratio, math.sqrt(ratio))
            ):
                return True
    return False


def _data(here: str, there: str, place: Tensor, other: Tensor, dtype: torch.dtype) -> str:
    if (place.shape, place.dtype) != (other.shape, other.dtype):
        return here
    mine, own = (
        constant_data(text, t.shape, torch_dtype(t.dtype)) for text, t in ((here, place), (there, other))
    )
    if not (own.is_floating_point() or own.is_complex()):
        return here
    # No complex numbers are narrower than those of two float32.
    dtypes = _NARROW[:1] if own.is_complex() else _NARROW
    narrow = any(_equal(tensor_in(tensor_in(own, d), dtype), mine) for d in dtypes)
    return data_text(own) if narrow else here


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Equal, NaN to NaN."""
    same: Any = (one == other) | (one.isnan() & other.isnan())
    return bool(same.all())
