"""The same plan and the same model in another floating-point dtype, for verification.

A comparison in float64 separates wrong programs from rounding. Every floating-point dtype becomes the given
one, also where a model asks for float32 by name (Llama's norm): :func:`retyped` does so in a plan's graph,
:func:`all_in` in eager PyTorch.
"""

from __future__ import annotations

import base64
import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from hetspmd.plan import Plan
from hetspmd.trace.assemble import constant_data
from hetspmd.trace.compat import TorchDispatchMode, flatten, unflatten
from hetspmd.trace.graph import CONSTANT, Argument, Constant, DType, Graph, Instruction
from hetspmd.trace.values import dtype_name, torch_dtype

_FLOATS = ("float16", "bfloat16", "float32", "float64")


def retyped(plan: Plan, dtype: torch.dtype) -> Plan:
    """The plan with every floating-point tensor in ``dtype``; the program is the same."""
    return replace(plan, graph=retyped_graph(plan.graph, dtype))


def retyped_graph(graph: Graph, dtype: torch.dtype) -> Graph:
    """The graph with every floating-point tensor in ``dtype``; it runs without autocast."""
    name = dtype_name(dtype)

    def other(found: str) -> str:
        return name if found in _FLOATS else found

    def argument(value: Argument) -> Argument:
        if isinstance(value, DType):
            return DType(other(value.name))
        return tuple(argument(v) for v in value) if isinstance(value, tuple) else value

    def data(text: str, tensor: int) -> str:
        meta = graph.tensors[tensor]
        if meta.dtype not in _FLOATS:
            return text
        value = constant_data(text, meta.shape, torch_dtype(meta.dtype)).to(dtype)
        flat = value.reshape(-1).view(torch.uint8) if value.numel() else value.new_empty(0, dtype=torch.uint8)
        return base64.b64encode(flat.numpy().tobytes()).decode()

    def instruction(i: Instruction) -> Instruction:
        if i.op == CONSTANT and i.args:
            return replace(i, args=(data(i.args[0], i.outputs[0]),))
        return replace(
            i, args=tuple(argument(a) for a in i.args), kwargs=tuple((k, argument(v)) for k, v in i.kwargs)
        )

    def constant(c: Constant) -> Constant:
        text = None if c.data is None else data(c.data, c.tensor)
        return replace(c, program=tuple(map(instruction, c.program)), data=text)

    return replace(
        graph,
        tensors=tuple(replace(t, dtype=other(t.dtype)) for t in graph.tensors),
        instructions=tuple(map(instruction, graph.instructions)),
        constants=tuple(map(constant, graph.constants)),
        autocast="",
    )


def model_in(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """A copy of the model in ``dtype`` on the CPU."""
    return copy.deepcopy(model).to(device="cpu", dtype=dtype)


def batch_in(batch: Any, dtype: torch.dtype) -> Any:
    """The batch on the CPU, its floating-point tensors in ``dtype``."""
    leaves, spec = flatten(batch)
    moved = [
        (
            leaf.to("cpu", dtype if leaf.is_floating_point() else leaf.dtype)
            if isinstance(leaf, torch.Tensor)
            else leaf
        )
        for leaf in leaves
    ]
    return unflatten(moved, spec)


class _AllIn(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own __init_subclass__
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.dtype = dtype

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(
            *(self._changed(a) for a in args), **{k: self._changed(v) for k, v in (kwargs or {}).items()}
        )

    def _changed(self, value: Any) -> Any:
        return self.dtype if isinstance(value, torch.dtype) and value.is_floating_point else value


@contextmanager
def all_in(dtype: torch.dtype) -> Iterator[None]:
    """Within the context every op that names a floating-point dtype gets ``dtype``."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with _AllIn(dtype):
            yield
    finally:
        torch.set_default_dtype(before)
