"""The local graphs of a rank for a step in micro-batches: what runs before the loop, in each turn of it, after it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import fx

from hetspmd.lower.emit import GraphWriter, identifier
from hetspmd.lower.passes import PASSES, Rewrite
from hetspmd.placement import REPLICATE, is_sharded
from hetspmd.program.level_layout import RankPlace
from hetspmd.program.levels import Key, NestedStep
from hetspmd.program.turn_layout import TurnLayout
from hetspmd.program.turn_steps import TurnSteps
from hetspmd.trace.evaluate import constant_value

__all__ = ["LocalTurns", "lower_turns"]


@dataclass(frozen=True)
class LocalTurns:
    """One rank's graphs of a step in micro-batches.

    Attributes:
        before: ``before(runtime, *parameters, *buffers, *inputs, tangent)`` returns the values of ``steps.read``,
            then those of ``steps.carried``. There is no ``tangent`` without gradients.
        turns: For each micro-batch: ``turn(runtime, *read)`` returns the values of ``steps.leaving``.
        after: ``after(runtime, *carried, *sums)`` returns ``(loss, outputs, buffers, gradients)``, where ``sums`` are
            the values of ``steps.leaving`` that are summed, and outputs that are joined are left out.
        steps: The steps that the graphs were written from.
        layout: Where the parts lie.
    """

    before: fx.GraphModule
    turns: tuple[fx.GraphModule, ...]
    after: fx.GraphModule
    steps: TurnSteps
    layout: TurnLayout


def lower_turns(steps: TurnSteps, layout: TurnLayout, rank: int, device: torch.device) -> LocalTurns:
    """The graphs of device ``rank``.

    Raises PlanError if the program reads what it has not produced, or if the row of an instruction in time cannot be
    had at once with its row on the devices.
    """
    emitter = _Emitter(steps, layout, rank, device)
    return LocalTurns(
        before=emitter.before(),
        turns=tuple(map(emitter.turn, range(layout.outer.lengths.world))),
        after=emitter.after(),
        steps=steps,
        layout=layout,
    )


class _Emitter:
    def __init__(self, steps: TurnSteps, layout: TurnLayout, rank: int, device: torch.device) -> None:
        self.steps, self.layout, self.rank, self.device = steps, layout, rank, device
        self.graph = layout.graph
        self.constants: dict[str, torch.Tensor] = {}

    def before(self) -> fx.GraphModule:
        graph, stored = self.graph, self.steps.stored
        keys: list[Key] = []
        for tensors in (graph.parameters, graph.buffers, graph.inputs):
            keys += [(t.tensor, REPLICATE, stored.get(t.tensor, REPLICATE)) for t in tensors]
        if graph.tangent is not None:
            keys.append((graph.tangent, REPLICATE, REPLICATE))
        writer = self._writer(0, keys, self.steps.before)
        return self._module(writer, [writer.need(k) for k in (*self.steps.read, *self.steps.carried)], "Before")

    def turn(self, turn: int) -> fx.GraphModule:
        writer = self._writer(turn, self.steps.read, self.steps.turn)
        return self._module(writer, [writer.need(key) for key in self.steps.leaving], f"Turn{turn}")

    def after(self) -> fx.GraphModule:
        steps = self.steps
        sums = [(t, REPLICATE, inner) for t, outer, inner in steps.leaving if not is_sharded(outer)]
        writer = self._writer(0, [*steps.carried, *sums], steps.after)
        results = (
            None if steps.loss is None else writer.need(steps.loss),
            [writer.need(key) for key in steps.outputs if not is_sharded(key[1])],
            [writer.need(key) for key in steps.buffers],
            [writer.need(key) for key in steps.gradients],
        )
        return self._module(writer, results, "After")

    def _writer(self, turn: int, given: Sequence[Key], steps: Sequence[NestedStep]) -> GraphWriter:
        writer = GraphWriter(self.layout, RankPlace(turn, self.rank), self.device)
        for constant in self.graph.constants:
            writer.constants[constant.tensor] = lambda key: self._constant(writer, key)
        for place, key in enumerate(given):
            name = f"value{place}_{identifier(self.graph.tensors[key[0]].name)}"
            writer.produced[key] = writer.typed(writer.graph.placeholder(name), key)
        writer.start()
        for step in steps:
            writer.write(step)
        return writer

    def _constant(self, writer: GraphWriter, key: tuple[int, ...]) -> fx.Node:
        name = f"constant_{writer.name(key)}"
        if is_sharded(key[1]):
            name = f"{name}_{writer.at.machine}"
        if name not in self.constants:
            (constant,) = (c for c in self.graph.constants if c.tensor == key[0])
            value = constant_value(self.graph, constant, self.device)
            for region in self.layout.regions(key, writer.at):
                value = value.narrow(region.dim, region.start, region.extent)
            self.constants[name] = value
        return writer.graph.create_node("get_attr", name, name=name)

    def _module(self, writer: GraphWriter, results: object, name: str) -> fx.GraphModule:
        writer.finish(results)
        for each in PASSES:
            if isinstance(each.run, Rewrite):
                each.run.rewrite(writer.graph)
        wanted = {str(n.target) for n in writer.graph.nodes if n.op == "get_attr"}
        return fx.GraphModule({k: v for k, v in self.constants.items() if k in wanted}, writer.graph, name)
