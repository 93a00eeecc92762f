"""The same plan and the same model in another floating-point dtype, for verification.

A comparison in float64 separates wrong programs from rounding. Every floating-point dtype becomes the given one
and every complex dtype the complex one of the same width, also where a model asks for float32 by name (Llama's
norm): :func:`retyped` does so in a plan's graph, :func:`all_in` in eager PyTorch. torch's default dtype, in
which numbers meet integers, is the given one on both sides (:func:`default_in`).
"""

from __future__ import annotations

import base64
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from hetspmd.plan.plan import Plan
from hetspmd.trace.assemble import constant_data
from hetspmd.trace.compat.tensors import TorchDispatchMode
from hetspmd.trace.compat.trees import flatten, unflatten
from hetspmd.trace.flat_bytes import flat_bytes
from hetspmd.trace.graph import CONSTANT, Argument, Constant, DType, Graph, Instruction
from hetspmd.trace.host.facts import Host
from hetspmd.trace.values import dtype_name, torch_dtype


def other_dtype(original: torch.dtype, dtype: torch.dtype) -> torch.dtype:
    """What ``original`` becomes where all floating-point numbers become ``dtype``."""
    if original.is_complex:
        return dtype.to_complex()
    return dtype if original.is_floating_point else original


def tensor_in(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The tensor on the CPU in the dtype that its own becomes."""
    return tensor.to(device="cpu", dtype=other_dtype(tensor.dtype, dtype))


def retyped(plan: Plan, dtype: torch.dtype) -> Plan:
    """The plan with every floating-point or complex tensor in ``dtype``; the program and its buckets are the same,
    whatever bytes these have then."""
    graph = retyped_graph(plan.graph, dtype)
    growth = max(
        (
            -(-new.nbytes // old.nbytes)
            for new, old in zip(graph.tensors, plan.graph.tensors, strict=True)
            if old.nbytes
        ),
        default=1,
    )
    schedule = replace(plan.schedule, bucket_bytes=plan.schedule.bucket_bytes * max(growth, 1))
    return replace(plan, graph=graph, step_plan=plan.step_plan.with_parts(schedule=schedule))


def retyped_graph(graph: Graph, dtype: torch.dtype) -> Graph:
    """The graph with every floating-point or complex tensor in ``dtype``; it runs without autocast."""

    def other(name: str) -> str:
        return dtype_name(other_dtype(torch_dtype(name), dtype))

    def argument(value: Argument) -> Argument:
        if isinstance(value, DType):
            return DType(other(value.name))
        return tuple(argument(v) for v in value) if isinstance(value, tuple) else value

    def data(text: str, tensor: int) -> str:
        meta = graph.tensors[tensor]
        if other(meta.dtype) == meta.dtype:
            return text
        return data_text(tensor_in(constant_data(text, meta.shape, torch_dtype(meta.dtype)), dtype))

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
        host=_of_the_plan(graph.host),
        left_behind=tuple(map(constant, graph.left_behind)),
    )


def data_text(tensor: torch.Tensor) -> str:
    """A constant's ``data`` of a tensor on the CPU."""
    return base64.b64encode(flat_bytes(tensor).numpy().tobytes()).decode()


def _of_the_plan(host: Host) -> Host:
    """What Python does beside a graph that is to be verified: another value of what forward reads is no reason to
    make another plan, but for state that forward itself leaves."""
    written = {(w.root, w.path) for w in host.writes}
    return replace(host, reads=tuple(r for r in host.reads if (r.root, r.path) in written))


def batch_in(batch: Any, dtype: torch.dtype) -> Any:
    """The batch on the CPU, its floating-point and complex tensors in ``dtype``."""
    leaves, spec = flatten(batch)
    moved = [
        tensor_in(leaf, dtype).resolve_conj().resolve_neg() if isinstance(leaf, torch.Tensor) else leaf
        for leaf in leaves
    ]
    return unflatten(moved, spec)


class _AllIn(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own __init_subclass__
    """Below autograd: what composite ops ask for by name."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's is untyped
        self.dtype = dtype

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(
            *(self._changed(a) for a in args), **{k: self._changed(v) for k, v in (kwargs or {}).items()}
        )

    def _changed(self, value: Any) -> Any:
        return other_dtype(value, self.dtype) if isinstance(value, torch.dtype) else value


_PLACES = ("__get__", "__set__", "__delete__")
"""Names of functions that read or write an attribute of a tensor."""


class NamedDtypes(torch.overrides.TorchFunctionMode):
    """Above autograd: dtypes that a model names, and tensors of another dtype that it holds outside of its
    parameters and buffers (class weights in a loss, a teacher)."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in _PLACES:
            return func(*args, **(kwargs or {}))
        own = 1 if _in_place(name) else 0
        named = {k: v if k == "out" else self._changed(v) for k, v in (kwargs or {}).items()}
        return func(*args[:own], *(self._changed(a) for a in args[own:]), **named)

    def _changed(self, value: Any) -> Any:
        if isinstance(value, torch.dtype):
            return other_dtype(value, self.dtype)
        if isinstance(value, torch.Tensor) and type(value) in (torch.Tensor, torch.nn.Parameter):
            wanted = other_dtype(value.dtype, self.dtype)
            if value.dtype == wanted:
                return value
            # What is no part of the model gets no gradient.
            return (value.detach() if value.is_leaf else value).to(wanted)
        if type(value) in (list, tuple):
            return type(value)(self._changed(v) for v in value)
        return value


def _in_place(name: str) -> bool:
    """Whether the function of this name writes to its first argument."""
    if not name.endswith("__"):
        return name.endswith("_")
    return name == "__setitem__" or (name.startswith("__i") and hasattr(torch.Tensor, f"__{name[3:]}"))


@contextmanager
def default_in(dtype: torch.dtype) -> Iterator[None]:
    """Within the context ``dtype`` is torch's default."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def all_in(dtype: torch.dtype) -> Iterator[None]:
    """Within the context every op that names a floating-point or complex dtype gets ``dtype``, which is torch's
    default, and every tensor that reaches an op is in it."""
    with default_in(dtype), _AllIn(dtype), NamedDtypes(dtype):
        yield
