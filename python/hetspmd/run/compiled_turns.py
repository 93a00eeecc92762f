"""``HAP(..., compile=True)`` of a step in micro-batches: the stretches of each turn go through ``torch.compile``.

A turn has the forward and the backward of a micro-batch in one graph, and most often one stretch.

- What is added to the sums is added within the stretch, in place, so that a gradient lives no longer than without
  ``torch.compile``.
- What is computed again begins a stretch of its own: a compiler that saw both would compute it once, and hold it.
- A turn takes its rows of the batch before its first stretch, so that turns of as many rows share what is compiled.

The backward of the step only multiplies the gradients by the one that comes in, and stays as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from hetspmd.lower.emit import instructions
from hetspmd.lower.local_program import LocalProgram
from hetspmd.run.compiled_regions import Busy, Made, in_stretches
from hetspmd.run.turn_graphs import calls_of_turns, sum_of, with_sums_as_ops, with_turns
from hetspmd.trace.graph import Graph

aten = torch.ops.aten


def compiled(
    program: LocalProgram, options: Mapping[str, Any], busy: Busy, graph: Graph | None
) -> dict[fx.GraphModule, fx.GraphModule]:
    """What runs for the graphs of a rank: copies that run their stretches compiled. ``graph`` is that of the single
    device, and says what is computed again."""
    made: Made = {}
    if calls_of_turns(program.forward):
        again = _copies(graph)
        return {program.forward: _turns_compiled(program.forward, again, options, busy, made)}
    graphs = [module for module in (program.forward, program.backward) if module is not None]
    return {module: in_stretches(module, options, busy, made) for module in graphs}


def _copies(graph: Graph | None) -> set[int]:
    """The instructions that compute again what others have computed."""
    if graph is None:
        return set()
    return {graph.producers[copy] for block in graph.recomputed for _, copy in block.tensors}


def _turns_compiled(
    forward: fx.GraphModule, again: set[int], options: Mapping[str, Any], busy: Busy, made: Made
) -> fx.GraphModule:
    calls = calls_of_turns(forward)

    def of(turn: fx.GraphModule, nodes: list[fx.Node]) -> fx.GraphModule:
        with_ops = with_sums_as_ops(turn, first=calls[0] in nodes, last=calls[-1] in nodes)
        return in_stretches(with_ops, options, busy, made, begins=_Again(again).begins, reads=_reads)

    return with_turns(forward, f"Compiled{type(forward).__name__}", of)


class _Again:
    """Where what is computed again begins. ``again``: the instructions that are copies."""

    def __init__(self, again: set[int]) -> None:
        self._again, self._within = again, False

    def begins(self, node: fx.Node) -> bool:
        """Whether it begins with this call; calls are asked for in their order."""
        of = instructions(node)
        if not of:
            return False
        before, self._within = self._within, any(i in self._again for i in of)
        return self._within and not before


def _reads(node: fx.Node) -> bool:
    """Whether a call takes rows of what the graph is given, or of a constant, or a sum."""
    if node.target is sum_of:
        return True
    return (
        node.target is aten.slice.Tensor
        and isinstance(node.args[0], fx.Node)
        and node.args[0].op in ("placeholder", "get_attr")
    )
