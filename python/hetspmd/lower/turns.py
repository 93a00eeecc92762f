"""The local graphs of a rank for a step in micro-batches, one for each of its turns.

What runs once before the loop is written into the graph of the first turn, and what runs once after it into that of
the last one, in the order of the schedule: parameters are gathered while the first turn computes, and a gradient is
reduced as soon as the last turn has added to it, while that goes on.

The forward graph of a rank runs all of them, and so the backward, too: it leaves the gradients as what is saved.
The backward graph multiplies them by the gradient that comes in, in which they are linear.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, Final

import torch
from torch import fx

from hetspmd.lower.emit import GraphWriter, identifier, take_saved
from hetspmd.lower.local import ActiveEmitter
from hetspmd.lower.local_program import Groups, LocalInterface, LocalProgram
from hetspmd.lower.passes import rewrite
from hetspmd.placement import REPLICATE, is_sharded
from hetspmd.program.level_layout import RankPlace
from hetspmd.program.levels import Key
from hetspmd.program.time_split import Phase
from hetspmd.program.turn_layout import TurnLayout
from hetspmd.program.turn_steps import TurnSteps
from hetspmd.trace.evaluate import constant_value
from hetspmd.trace.graph import Graph
from hetspmd.trace.values import torch_dtype

aten = torch.ops.aten

_ON_THEIR_WAY: Final = 2
"""Sums that come of collectives in the loop: so many are on their way before the first of them is waited for and
added, so that no more of their operands are held."""


@dataclass(frozen=True)
class LocalTurns:
    """One rank's graphs of a step in micro-batches.

    Attributes:
        turns: For each turn of the device ``turn(runtime, sums, *values)``, which adds to the list ``sums``. It
            returns what is joined of ``steps.leaving``. The first one is given ``(*parameters, *buffers, *inputs,
            tangent)`` (there is no ``tangent`` without gradients), and returns the values of ``steps.read`` and
            ``steps.carried`` behind that; the others are given those of ``steps.read``, the last one those of
            ``steps.carried`` behind them. The last one returns ``(joined, (loss, outputs, buffers, gradients))``,
            and empties the list; outputs that are joined are left out there. The only turn is first and last.
        steps: The steps that the graphs were written from.
        layout: Where the parts lie.
    """

    turns: tuple[fx.GraphModule, ...]
    steps: TurnSteps
    layout: TurnLayout

    @property
    def summed(self) -> tuple[Key, ...]:
        """What is summed over the micro-batches, in the order of the list ``sums``."""
        return tuple(key for key in self.steps.leaving if not is_sharded(key[1]))


@dataclass(frozen=True)
class TurnGraph:
    """The graph of one turn, as it was written or while passes rewrite it.

    Attributes:
        number: The micro-batch that it takes.
        first: Whether what is before the loop is in it.
        last: Whether what is after the loop is in it.
        forward: The graph, which has the forward and the backward of the micro-batch.
        constants: The attributes that the graphs of the rank read, by name.
        reference: The graph of the single device.
        local_shape: The shape that a value has on this rank, of a key ``(tensor, form in time, form on the
            devices)``.
        groups: Who takes part in the collectives.
    """

    number: int
    first: bool
    last: bool
    forward: fx.Graph
    constants: Mapping[str, torch.Tensor]
    reference: Graph
    local_shape: Callable[[tuple[int, ...]], tuple[int, ...]]
    groups: Groups

    @property
    def graphs(self) -> tuple[fx.Graph, ...]:
        """The graph alone."""
        return (self.forward,)

    def module(self) -> fx.GraphModule:
        """The graph as code."""
        wanted = {str(n.target) for n in self.forward.nodes if n.op == "get_attr"}
        constants = {k: v for k, v in self.constants.items() if k in wanted}
        return fx.GraphModule(constants, self.forward, f"Turn{self.number}")


@dataclass(frozen=True)
class TurnGraphs:
    """The graphs of all turns of a rank, as they were written or while passes rewrite them. ``interface`` tells
    what the rank is given and returns."""

    turns: tuple[TurnGraph, ...]
    steps: TurnSteps
    layout: TurnLayout
    interface: Callable[[], LocalInterface]

    @property
    def graphs(self) -> tuple[fx.Graph, ...]:
        """One for each turn."""
        return tuple(turn.forward for turn in self.turns)

    def local_turns(self) -> LocalTurns:
        """The graphs as code."""
        return LocalTurns(tuple(turn.module() for turn in self.turns), self.steps, self.layout)

    def program(self) -> LocalProgram:
        """The local program that runs all of a step."""
        interface, turns = self.interface(), self.local_turns()
        given = {field.name: getattr(interface, field.name) for field in fields(LocalInterface)}
        backward = _scaled(len(self.steps.gradients)) if self.steps.gradients else None
        return LocalProgram(**given, forward=_forward(turns, interface), backward=backward)


class TurnEmitter:
    """Writes the graphs of an active rank for a step in micro-batches. ``of`` would write those of a step in one;
    ``turns`` are the micro-batches that the rank takes, in their order
    (:meth:`hetspmd.plan.step_plan.StepPlan.turns`)."""

    def __init__(self, steps: TurnSteps, layout: TurnLayout, of: ActiveEmitter, turns: Sequence[int]) -> None:
        self.steps, self.layout, self.of, self.turns = steps, layout, of, turns

    def emit(self) -> TurnGraphs:
        """The graphs. Raises PlanError if the program reads what it has not produced, or if the row of an
        instruction in time cannot be had at once with its row on the devices."""
        writing = _Writing(self.steps, self.layout, self.of.at.machine, self.of.device, self.of.groups())
        return TurnGraphs(writing.turns(self.turns), self.steps, self.layout, self.of.interface)


def lower_turns(
    steps: TurnSteps, layout: TurnLayout, rank: int, device: torch.device, turns: Sequence[int]
) -> LocalTurns:
    """The graphs of the active device ``rank`` alone, after all passes. ``turns``: the micro-batches that it takes.

    Raises what :meth:`TurnEmitter.emit` raises.
    """
    written = _Writing(steps, layout, rank, device, Groups(f"all ranks of rank {rank}")).turns(turns)
    rewrite(turn.forward for turn in written)
    return LocalTurns(tuple(turn.module() for turn in written), steps, layout)


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
    sums = graph.call_function(no_sums, (len(turns.summed),))
    count, last = len(turns.steps.read), len(turns.turns) - 1
    values: list[fx.Node] = []
    for number in range(last + 1):
        own = given if number == 0 else values if number == last else values[:count]
        left = graph.call_module(f"turn{number}", (runtime, sums, *own))
        if number == 0 < last:
            joined = sum(is_sharded(key[1]) for key in turns.steps.leaving)
            several = count + len(turns.steps.carried)
            values = [graph.call_function(operator.getitem, (left, joined + i)) for i in range(several)]
    graph.output(graph.call_function(operator.getitem, (left, 1)))
    # A GraphModule that is made of others writes their code again, which takes as long as it took first.
    names = [f"turn{number}" for number in range(last + 1)]
    forward = fx.GraphModule(dict.fromkeys(names, torch.nn.Identity()), graph, "Forward")
    for name, turn in zip(names, turns.turns, strict=True):
        setattr(forward, name, turn)
    return forward


def _scaled(count: int) -> fx.GraphModule:
    """The gradients that were saved, times the gradient that comes in."""
    graph = fx.Graph()
    graph.placeholder("runtime")
    tangent, saved = graph.placeholder("tangent"), graph.placeholder("saved")
    gradients = [graph.call_function(take_saved, (saved, index)) for index in range(count)]
    graph.output([graph.call_function(aten.mul.Tensor, (gradient, tangent)) for gradient in gradients])
    return fx.GraphModule({}, graph, "Backward")


class _TurnWriter(GraphWriter):
    """Writes a graph whose collectives, those of the inner level, are all that its runtime has. ``beside``: another
    writer, into whose graph it writes. Each has values of its own."""

    def __init__(
        self, layout: TurnLayout, at: RankPlace, device: torch.device, beside: _TurnWriter | None = None
    ) -> None:
        super().__init__(layout, at, device)
        if beside is not None:
            self.graph, self.runtime = beside.graph, beside.runtime
        self.inside = self.runtime

    def wait(self) -> None:
        """Wait for the collectives whose results nothing on this rank reads."""
        for key in self._pending:
            self.need(key)


class _Writing:
    def __init__(
        self, steps: TurnSteps, layout: TurnLayout, rank: int, device: torch.device, groups: Groups
    ) -> None:
        self.steps, self.layout, self.rank, self.device, self.groups = steps, layout, rank, device, groups
        self.graph = layout.graph
        self.summed = [key for key in steps.leaving if not is_sharded(key[1])]
        self.constants: dict[str, torch.Tensor] = {}

    def turns(self, numbers: Sequence[int]) -> tuple[TurnGraph, ...]:
        """The graphs of these turns, which are all of the rank."""
        return tuple(self.turn(n, first=n == numbers[0], last=n == numbers[-1]) for n in numbers)

    def turn(self, turn: int, *, first: bool, last: bool) -> TurnGraph:
        """The graph of a turn, with what is before the loop in the first one, and what is after it in the last."""
        steps = self.steps
        writer = self._writer(turn)
        before, after = self._writer(0, writer), self._writer(0, writer)
        sums = _Sums(writer, self.summed)
        given = self._given() if first else [*steps.read, *(steps.carried if last else ())]
        for place, key in enumerate(given):
            name = f"value{place}_{identifier(self.graph.tensors[key[0]].name)}"
            before.produced[key] = before.typed(before.graph.placeholder(name), key)
        for key in steps.read:
            writer.produced[key] = partial(before.need, key)
        for key in steps.carried if last else ():
            after.produced[key] = partial(before.need, key)
        for key in self.summed if last else ():
            whole = key[0], REPLICATE, key[2]
            after.produced[whole] = partial(sums.take, key, after, whole)
        writers: dict[Phase, _TurnWriter] = {"in": writer}
        if first:
            writers["before"] = before
        if last:
            writers["after"] = after
        for phase, step in steps.together(writers):
            writers[phase].write(step)
            sums.add_what_is_there()
        sums.add_all()
        joined = [writer.need(key) for key in steps.leaving if is_sharded(key[1])]
        results: Any = joined
        if last:
            results = (joined, self._results(after))
        elif first:
            results = [*joined, *(before.need(key) for key in (*steps.read, *steps.carried))]
        for each in (before, writer, after):
            each.wait()
        writer.graph.output(results)
        return TurnGraph(
            number=turn,
            first=first,
            last=last,
            forward=writer.graph,
            constants=self.constants,
            reference=self.graph,
            local_shape=lambda key: self.layout.shape(key, writer.at),
            groups=self.groups,
        )

    def _given(self) -> list[Key]:
        """What the rank is given for a step."""
        graph, stored = self.graph, self.steps.stored
        keys: list[Key] = []
        for tensors in (graph.parameters, graph.buffers, graph.inputs):
            keys += [(t.tensor, REPLICATE, stored.get(t.tensor, REPLICATE)) for t in tensors]
        return keys if graph.tangent is None else [*keys, (graph.tangent, REPLICATE, REPLICATE)]

    def _results(self, after: GraphWriter) -> tuple[Any, ...]:
        steps = self.steps
        return (
            None if steps.loss is None else after.need(steps.loss),
            [after.need(key) for key in steps.outputs if not is_sharded(key[1])],
            [after.need(key) for key in steps.buffers],
            [after.need(key) for key in steps.gradients],
        )

    def _writer(self, turn: int, beside: _TurnWriter | None = None) -> _TurnWriter:
        writer = _TurnWriter(self.layout, RankPlace(turn, self.rank), self.device, beside)
        for constant in self.graph.constants:
            writer.constants[constant.tensor] = lambda key: self._constant(writer, key)
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


class _Sums:
    """The sums over the loop, in a list that each turn is given: a turn adds to them as soon as it can, and what is
    after the loop takes them when the last turn has added to them."""

    def __init__(self, writer: _TurnWriter, keys: Sequence[Key]) -> None:
        self.writer, self.keys = writer, list(keys)
        self.list = writer.graph.placeholder("sums")
        self._waiting, self._arriving = dict.fromkeys(keys), list[Key]()

    def add_what_is_there(self) -> None:
        """Add what the turn has made since the last time."""
        for key in [k for k in self._waiting if k in self.writer.produced]:
            del self._waiting[key]
            if isinstance(self.writer.produced[key], fx.Node):
                self._add(key)
            else:  # of a collective, which goes on while others begin
                self._arriving.append(key)
        while len(self._arriving) > _ON_THEIR_WAY:
            self._add(self._arriving.pop(0))

    def add_all(self) -> None:
        """Add what has not been added."""
        for key in (*self._arriving, *self._waiting):
            self._add(key)
        self._arriving, self._waiting = [], {}

    def take(self, key: Key, after: GraphWriter, whole: Key) -> fx.Node:
        """The sum, to which this turn has added, as a value of ``after``."""
        if key in self._arriving or key in self._waiting:
            self._arriving = [k for k in self._arriving if k != key]
            self._waiting.pop(key, None)
            self._add(key)
        node = after.call(after.name(whole), take_saved, (self.list, self.keys.index(key)))
        return after.typed(node, whole)

    def _add(self, key: Key) -> None:
        node = self.writer.need(key)
        self.writer.call(f"add_{self.writer.name(key)}", accumulate, (self.list, self.keys.index(key), node))
