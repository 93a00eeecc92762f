"""The local graphs of a rank for a step in micro-batches: before the loop, in each turn of it, and after it.

The forward graph of a rank runs all of them, and so the backward, too: it leaves the gradients as what is saved.
The backward graph multiplies them by the gradient that comes in, in which they are linear.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Final

import torch
from torch import fx

from hetspmd.lower.emit import GraphWriter, identifier, take_saved
from hetspmd.lower.local import ActiveEmitter
from hetspmd.lower.local_program import LocalInterface, LocalProgram
from hetspmd.lower.passes import PASSES, Rewrite
from hetspmd.placement import REPLICATE, is_sharded
from hetspmd.program.level_layout import RankPlace
from hetspmd.program.levels import Key
from hetspmd.program.turn_layout import TurnLayout
from hetspmd.program.turn_steps import TurnSteps
from hetspmd.trace.evaluate import constant_value
from hetspmd.trace.values import torch_dtype

aten = torch.ops.aten

_ON_THEIR_WAY: Final = 2
"""Sums that come of collectives in the loop: so many are on their way before the first of them is waited for and
added, so that no more of their operands are held."""


@dataclass(frozen=True)
class LocalTurns:
    """One rank's graphs of a step in micro-batches.

    Attributes:
        before: ``before(runtime, *parameters, *buffers, *inputs, tangent)`` returns the values of ``steps.read``,
            then those of ``steps.carried``. There is no ``tangent`` without gradients.
        turns: For each turn of the device: ``turn(runtime, sums, *read)`` adds to the list ``sums``, and returns
            what is joined of ``steps.leaving``.
        after: ``after(runtime, sums, *carried)`` returns ``(loss, outputs, buffers, gradients)``, and empties the
            list. Outputs that are joined are left out.
        steps: The steps that the graphs were written from.
        layout: Where the parts lie.
    """

    before: fx.GraphModule
    turns: tuple[fx.GraphModule, ...]
    after: fx.GraphModule
    steps: TurnSteps
    layout: TurnLayout

    @property
    def summed(self) -> tuple[Key, ...]:
        """What is summed over the micro-batches, in the order of the list ``sums``."""
        return tuple(key for key in self.steps.leaving if not is_sharded(key[1]))


def lower_turns(steps: TurnSteps, layout: TurnLayout, rank: int, device: torch.device) -> LocalTurns:
    """The graphs of device ``rank``.

    Raises PlanError if the program reads what it has not produced, or if the row of an instruction in time cannot
    be had at once with its row on the devices.
    """
    writing = _Writing(steps, layout, rank, device)
    turns = tuple(map(writing.turn, range(layout.turns(rank))))
    return LocalTurns(writing.before(), turns, writing.after(), steps, layout)


def program_of_turns(turns: LocalTurns, emitter: ActiveEmitter) -> LocalProgram:
    """The local program that runs all of a step. ``emitter`` knows what a rank is given."""
    interface = emitter.interface()
    given = {field.name: getattr(interface, field.name) for field in fields(LocalInterface)}
    backward = _scaled(len(turns.steps.gradients)) if turns.steps.gradients else None
    return LocalProgram(**given, forward=_forward(turns, interface), backward=backward)


def accumulate(sums: list[torch.Tensor | None], index: int, value: torch.Tensor) -> None:
    """Add a summand of one micro-batch to the sum. The sum has memory of its own."""
    total = sums[index]
    if total is None:
        sums[index] = value.clone()
    else:
        total.add_(value)


def no_sums(count: int) -> list[torch.Tensor | None]:
    """The sums before the first micro-batch."""
    return [None] * count


def _forward(turns: LocalTurns, interface: LocalInterface) -> fx.GraphModule:
    graph, meta = fx.Graph(), turns.layout.graph
    runtime = graph.placeholder("runtime")
    given = [
        graph.placeholder(f"{kind}_{identifier(meta.tensors[local.tensor].name)}")
        for kind, tensors in (
            ("parameter", interface.parameters),
            ("buffer", interface.buffers),
            ("batch", interface.inputs),
        )
        for local in tensors
    ]
    if meta.tangent is not None:
        tangent = meta.tensors[meta.tangent]
        kwargs: dict[str, Any] = {"dtype": torch_dtype(tangent.dtype), "device": interface.device}
        given.append(graph.call_function(aten.ones.default, (list(tangent.shape),), kwargs))
    there = graph.call_module("before", (runtime, *given))
    count = len(turns.steps.read) + len(turns.steps.carried)
    values = [graph.call_function(operator.getitem, (there, index)) for index in range(count)]
    sums = graph.call_function(no_sums, (len(turns.summed),))
    for number in range(len(turns.turns)):
        graph.call_module(f"turn{number}", (runtime, sums, *values[: len(turns.steps.read)]))
    after = graph.call_module("after", (runtime, sums, *values[len(turns.steps.read) :]))
    graph.output(after)
    parts = {f"turn{number}": turn for number, turn in enumerate(turns.turns)}
    return fx.GraphModule({**parts, "before": turns.before, "after": turns.after}, graph, "Forward")


def _scaled(count: int) -> fx.GraphModule:
    """The gradients that were saved, times the gradient that comes in."""
    graph = fx.Graph()
    graph.placeholder("runtime")
    tangent, saved = graph.placeholder("tangent"), graph.placeholder("saved")
    gradients = [graph.call_function(take_saved, (saved, index)) for index in range(count)]
    graph.output([graph.call_function(aten.mul.Tensor, (gradient, tangent)) for gradient in gradients])
    return fx.GraphModule({}, graph, "Backward")


class _TurnWriter(GraphWriter):
    """Writes a graph whose collectives, those of the inner level, are all that its runtime has."""

    def start(self) -> None:
        """All inputs are there."""
        self.inside = self.runtime


class _Writing:
    def __init__(self, steps: TurnSteps, layout: TurnLayout, rank: int, device: torch.device) -> None:
        self.steps, self.layout, self.rank, self.device = steps, layout, rank, device
        self.graph = layout.graph
        self.summed = [key for key in steps.leaving if not is_sharded(key[1])]
        self.constants: dict[str, torch.Tensor] = {}

    def before(self) -> fx.GraphModule:
        graph, stored = self.graph, self.steps.stored
        keys: list[Key] = []
        for tensors in (graph.parameters, graph.buffers, graph.inputs):
            keys += [(t.tensor, REPLICATE, stored.get(t.tensor, REPLICATE)) for t in tensors]
        if graph.tangent is not None:
            keys.append((graph.tangent, REPLICATE, REPLICATE))
        writer = self._writer(0, keys)
        for step in self.steps.before:
            writer.write(step)
        return self._module(
            writer, [writer.need(k) for k in (*self.steps.read, *self.steps.carried)], "Before"
        )

    def turn(self, turn: int) -> fx.GraphModule:
        writer = self._writer(turn, self.steps.read, sums=True)
        waiting, arriving = dict.fromkeys(self.summed), list[Key]()
        for step in self.steps.turn:
            writer.write(step)
            for key in [k for k in waiting if k in writer.produced]:
                del waiting[key]
                if isinstance(writer.produced[key], fx.Node):
                    self._add(writer, key)
                else:  # of a collective, which goes on while others begin
                    arriving.append(key)
            while len(arriving) > _ON_THEIR_WAY:
                self._add(writer, arriving.pop(0))
        for key in (*arriving, *waiting):
            self._add(writer, key)
        return self._module(
            writer, [writer.need(k) for k in self.steps.leaving if is_sharded(k[1])], f"Turn{turn}"
        )

    def after(self) -> fx.GraphModule:
        steps = self.steps
        writer = self._writer(0, steps.carried, sums=True)
        for index, (tensor, _, inner) in enumerate(self.summed):
            key = (tensor, REPLICATE, inner)
            writer.produced[key] = lambda index=index, key=key: self._take(writer, index, key)  # type: ignore[misc]  # both are bound
        for step in steps.after:
            writer.write(step)
        results = (
            None if steps.loss is None else writer.need(steps.loss),
            [writer.need(key) for key in steps.outputs if not is_sharded(key[1])],
            [writer.need(key) for key in steps.buffers],
            [writer.need(key) for key in steps.gradients],
        )
        return self._module(writer, results, "After")

    def _writer(self, turn: int, given: Sequence[Key], *, sums: bool = False) -> GraphWriter:
        writer = _TurnWriter(self.layout, RankPlace(turn, self.rank), self.device)
        for constant in self.graph.constants:
            writer.constants[constant.tensor] = lambda key: self._constant(writer, key)
        if sums:
            writer.graph.placeholder("sums")
        for place, key in enumerate(given):
            name = f"value{place}_{identifier(self.graph.tensors[key[0]].name)}"
            writer.produced[key] = writer.typed(writer.graph.placeholder(name), key)
        writer.start()
        return writer

    def _add(self, writer: GraphWriter, key: Key) -> None:
        node = writer.need(key)
        writer.call(f"add_{writer.name(key)}", accumulate, (_sums(writer), self.summed.index(key), node))

    def _take(self, writer: GraphWriter, index: int, key: Key) -> fx.Node:
        return writer.typed(writer.call(writer.name(key), take_saved, (_sums(writer), index)), key)

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


def _sums(writer: GraphWriter) -> fx.Node:
    """The list of sums, behind the runtime."""
    sums: fx.Node = next(node for node in writer.graph.nodes if node.target == "sums")
    return sums
