"""The graphs of an idle device: the shapes of a step, and no work.

An idle device stores a part of no elements of every parameter, along the sharded dim or else dim 0. Its
forward makes zeros for the loss and for the outputs, which the runtime overwrites with what the active devices
send, or no rows of an output that each device has its own rows of. Its backward makes empty gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from hetspmd.lower.local_program import Groups, LocalGraphs, LocalTensor
from hetspmd.placement import PARTIAL, REPLICATE, Placement, is_sharded, shard, sharded_dim
from hetspmd.program.layout import Layout, Region
from hetspmd.program.lengths import Lengths
from hetspmd.program.program import Program
from hetspmd.program.stored import given_forms
from hetspmd.rules.theory import Theory
from hetspmd.trace.values import torch_dtype


@dataclass(frozen=True)
class IdleEmitter:
    """Writes the graphs of a device that takes no part in ``program``; its ``rank`` is None."""

    theory: Theory
    program: Program
    lengths: Lengths
    device: torch.device

    def emit(self) -> LocalGraphs:
        """The graphs."""
        return _idle(self.theory, self.program, self.lengths, self.device)


def _idle(theory: Theory, program: Program, lengths: Lengths, device: torch.device) -> LocalGraphs:
    graph, layout = theory.graph, Layout(theory.graph, theory.axes, lengths)
    stored = given_forms(graph, program)

    def local(tensor: int, form: Placement, region: Region | None) -> LocalTensor:
        meta = graph.tensors[tensor]
        extents = layout.extents(tensor, form) if is_sharded(form) else ()
        return LocalTensor(tensor, form, meta.shape, meta.dtype, extents, region)

    def empty(tensor: int, form: Placement) -> LocalTensor:
        dim = sharded_dim(form) if is_sharded(form) else 0
        shape = graph.tensors[tensor].shape
        return local(tensor, form, Region(dim, shape[dim] if shape else 1, 0))

    def returned(tensor: int, form: Placement) -> LocalTensor:
        return empty(tensor, form) if form == shard(0) else local(tensor, form, None)

    parameters = tuple(empty(p.tensor, stored.get(p.tensor, REPLICATE)) for p in graph.parameters)
    buffers = tuple(local(b.tensor, REPLICATE, None) for b in graph.buffers)
    inputs = tuple(local(i.tensor, REPLICATE, None) for i in graph.inputs)
    outputs = tuple(returned(r.tensor, r.form) for r in program.outputs)
    trained = tuple(i for i, p in enumerate(graph.parameters) if p.gradient is not None)
    differentiable = trained if program.gradients else ()

    def zeros(local_graph: fx.Graph, tensor: LocalTensor) -> fx.Node:
        kwargs: dict[str, Any] = {"dtype": torch_dtype(tensor.dtype), "device": device}
        return local_graph.call_function(torch.ops.aten.zeros.default, (list(tensor.local_shape),), kwargs)

    def forward(local_graph: fx.Graph) -> Any:
        for kind, tensors in (("parameter", parameters), ("buffer", buffers), ("batch", inputs)):
            for index in range(len(tensors)):
                local_graph.placeholder(f"{kind}_{index}")
        loss = None if program.loss is None else zeros(local_graph, local(program.loss.tensor, PARTIAL, None))
        return loss, [zeros(local_graph, o) for o in outputs], [], []

    def backward(local_graph: fx.Graph) -> Any:
        local_graph.placeholder("tangent")
        local_graph.placeholder("saved")
        return [zeros(local_graph, parameters[i]) for i in differentiable]

    return LocalGraphs(
        rank=None,
        world=lengths.world,
        device=device,
        parameters=parameters,
        buffers=buffers,
        inputs=inputs,
        outputs=outputs,
        updated=(),
        written=(),
        differentiable=differentiable,
        forward=_written(forward),
        backward=_written(backward) if program.gradients else None,
        constants={},
        reference=graph,
        local_shape=lambda key: graph.tensors[key[0]].shape,
        groups=Groups("nobody"),
    )


def _written(write: Callable[[fx.Graph], Any]) -> fx.Graph:
    graph = fx.Graph()
    graph.placeholder("runtime")
    graph.output(write(graph))
    return graph
