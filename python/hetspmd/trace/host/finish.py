"""From the traced graph and what was watched to a graph that says both.

What forward leaves behind are outputs of the graph, behind the model's own. Those that depend on no
parameter, input or randomness become constants.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import replace

import torch

from hetspmd.errors import TraceError
from hetspmd.trace.compat.tensors import is_traced
from hetspmd.trace.graph import Constant, Graph, Input
from hetspmd.trace.host.changes import where
from hetspmd.trace.host.constants import computing
from hetspmd.trace.host.equal import varying
from hetspmd.trace.host.facts import Host, Number
from hetspmd.trace.host.plain import tensors_in
from hetspmd.trace.host.templates import numbers_in, renumbered
from hetspmd.trace.host.watch import HostWatch


def with_host(
    graph: Graph, watch: HostWatch, numbers: Sequence[Input], data: Collection[torch.Tensor] = ()
) -> Graph:
    """The graph with what ``watch`` found; ``numbers`` are its inputs that are numbers of the model, ``data`` the
    tensors with values that the trace met.

    Raises TraceError for a tensor that one step leaves to the next.
    """
    host_changes = watch.state_changes
    assert host_changes is not None
    own = len(graph.outputs) - len(host_changes.tensors)
    changing = varying(graph)
    extras = graph.outputs[own:]
    indices: list[int] = []
    constants: list[Constant] = []
    number: dict[int, int] = {}
    for index, output in enumerate(extras):
        assert output.tensor is not None
        if output.tensor in changing:
            number[index] = len(indices)
            indices.append(index)
        else:
            number[index] = -1 - len(constants)
            constants.append(computing(graph, output.tensor))
    met = {t.untyped_storage().data_ptr() for t in data} - {0}
    for place, (before, _) in host_changes.changed.items():
        if any(_memory(t) in met for t in tensors_in(before)):
            raise carried(watch, *place)
    writes = []
    for place, write in host_changes.writes.items():
        tensors = numbers_in(write.value)
        read = watch.recorder.reads.get(place, "")
        if tensors and read.startswith("tensor "):
            raise TraceError(_carried(watch, *place))
        writes.append(replace(write, value=renumbered(write.value, number.__getitem__)))
    host = Host(
        reads=watch.reads(),
        writes=tuple(writes),
        numbers=tuple(
            Number(root, path, graph.tensors[source.tensor].dtype, source.tensor)
            for (root, path), source in zip(watch.numbers, numbers, strict=True)
        ),
        kept=tuple(bool(host_changes.tensors[i].requires_grad) for i in indices),
        draws=watch.draws or (watch.asked.bytes and f" {watch.asked.bytes}"),
    )
    outputs = (*graph.outputs[:own], *(extras[i] for i in indices))
    if constants:
        graph = graph.with_outputs(outputs)
    return replace(graph, host=host, left_behind=tuple(constants))


def _carried(watch: HostWatch, root: str, path: tuple[str, ...]) -> str:
    place = where(watch.roots, root, path)
    own = [index for index, step in enumerate(path) if step.startswith(".")]
    name = "_".join(re.findall(r"\w+", "".join(path[own[-1] :] if own else path)))
    return (
        f"forward reads {place}, which the step before has left there; a tensor that is carried from step to step "
        f"is a buffer: self.register_buffer({name!r}, ...) in __init__, then self.{name} = value or self.{name}."
        "copy_(value) in forward"
    )


def _memory(tensor: torch.Tensor) -> int:
    return -1 if is_traced(tensor) or tensor.is_meta else tensor.untyped_storage().data_ptr()


def carried(watch: HostWatch, root: str, path: tuple[str, ...]) -> TraceError:
    """The refusal of a tensor that one step leaves to the next."""
    return TraceError(_carried(watch, root, path))
