"""``HAP(..., compile=True)``: what lies between two communications of a local graph goes through ``torch.compile``.

A *stretch* is a run of consecutive ATen ops. It becomes a graph of its own, which ``torch.compile`` sees whole;
collectives, random numbers and calls that are no ATen ops stay between, in their order, which is the same on every
rank. Tensors that were saved for the backward are taken where the stretch that reads them begins.

Stretches compile when they first run. That may take longer than other ranks wait, so they are told
(:meth:`~hetspmd.dist.communicator.Communicator.busy`).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import fx, nn

from hetspmd.errors import ExampleError
from hetspmd.lower.emit import item, take_saved
from hetspmd.trace.compat.tensors import is_op

FEWEST_OPS = 2
"""Ops of the shortest stretch: one alone cannot be fused with another."""

Busy = Callable[[], AbstractContextManager[None]]


def compile_options(asked: bool | Mapping[str, Any]) -> dict[str, Any] | None:
    """The arguments of ``torch.compile``, None where nothing is compiled. Raises ExampleError for anything else
    than a bool or a mapping by names."""
    if isinstance(asked, bool):
        return {} if asked else None
    if isinstance(asked, Mapping) and all(isinstance(key, str) for key in asked):
        return dict(asked)
    raise ExampleError(f"compile is True, False or a dict of torch.compile's arguments, not {asked!r}")


def in_stretches(module: fx.GraphModule, options: Mapping[str, Any], busy: Busy) -> fx.GraphModule:
    """A copy of a local graph that runs its stretches compiled; ``busy`` surrounds a stretch's first run."""
    return _Cut(module, options, busy).copied()


class _Stretch(nn.Module):
    def __init__(self, graph: fx.GraphModule, options: Mapping[str, Any], busy: Busy) -> None:
        super().__init__()
        self._call: Any = torch.compile(graph, **{"fullgraph": True, "dynamic": False, **options})
        self._busy: Busy | None = busy

    def forward(self, *values: Any) -> Any:
        if self._busy is None:
            return self._call(*values)
        with self._busy():
            outputs = self._call(*values)
        self._busy = None
        return outputs


class _Cut:
    def __init__(self, module: fx.GraphModule, options: Mapping[str, Any], busy: Busy) -> None:
        self._module, self._options, self._busy = module, options, busy
        self._graph = fx.Graph()
        self._values: dict[fx.Node, fx.Node] = {}
        self._attributes: dict[str, Any] = {}
        self._stretch: list[fx.Node] = []

    def copied(self) -> fx.GraphModule:
        for node in self._module.graph.nodes:
            if _compiles(node):
                self._stretch.append(node)
                continue
            if node.op not in ("placeholder", "get_attr") and node.target is not take_saved:
                self._end()
            elif node.op == "get_attr":
                self._attributes[str(node.target)] = getattr(self._module, str(node.target))
            self._copy(node)
        self._graph.lint()
        return fx.GraphModule(self._attributes, self._graph, f"Compiled{type(self._module).__name__}")

    def _copy(self, node: fx.Node) -> None:
        self._values[node] = self._graph.node_copy(node, self._values.__getitem__)

    def _end(self) -> None:
        """Write the stretch that has been read."""
        nodes, self._stretch = self._stretch, []
        if sum(is_op(node.target) for node in nodes) < FEWEST_OPS:
            for node in nodes:
                self._copy(node)
            return
        inside = set(nodes)
        inputs = list(dict.fromkeys(n for node in nodes for n in node.all_input_nodes if n not in inside))
        results = [node for node in nodes if any(user not in inside for user in node.users)]
        graph, values = fx.Graph(), dict[fx.Node, fx.Node]()
        for node in inputs:
            values[node] = graph.placeholder(node.name)
        for node in nodes:
            values[node] = graph.node_copy(node, values.__getitem__)
        graph.output(tuple(values[node] for node in results))
        name = f"stretch_{sum(key.startswith('stretch_') for key in self._attributes)}"
        body = fx.GraphModule({}, graph, f"{type(self._module).__name__}{name.title()}")
        self._attributes[name] = _Stretch(body, self._options, self._busy)
        call = self._graph.create_node(
            "call_module", name, tuple(self._values[n] for n in inputs), name=f"{nodes[0].name}_stretch"
        )
        for index, node in enumerate(results):
            self._values[node] = self._graph.create_node(
                "call_function", operator.getitem, (call, index), name=node.name
            )


def _compiles(node: fx.Node) -> bool:
    if node.target is item:
        return True
    return is_op(node.target) and torch.Tag.nondeterministic_seeded not in node.target.tags
