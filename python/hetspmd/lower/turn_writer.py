"""Writing the graph of a turn of a step in micro-batches.

Turns between the first and the last one that do the same with other rows share a graph. What is not the same in
each of them is given to the graph: :class:`Rows` of a value, where a random op draws, constants.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, TypeAlias

import torch
from torch import fx

from hetspmd.lower.attention import fused_attentions
from hetspmd.lower.emit import Awaited, GraphWriter, identifier, take_saved
from hetspmd.lower.local_program import Groups
from hetspmd.placement import REPLICATE, is_sharded
from hetspmd.program.level_layout import LevelKey, RankPlace
from hetspmd.program.levels import Both, rows_of
from hetspmd.program.time_split import Phase
from hetspmd.program.turn_layout import TurnLayout
from hetspmd.program.turn_steps import TurnSteps
from hetspmd.trace.evaluate import constant_value
from hetspmd.trace.graph import Graph

_ON_THEIR_WAY: Final = 2
"""Sums that come of collectives in the loop: so many are on their way before the first of them is waited for and
added, so that no more of their operands are held."""


@dataclass(frozen=True)
class Rows:
    """Rows of a value that a turn is given: from ``start`` to ``stop`` along ``dim`` of that at ``place``."""

    place: int
    dim: int
    start: int
    stop: int


Own: TypeAlias = Rows | torch.Tensor | list[tuple[int, int, int]]
"""What a turn is given for itself: rows of a value, a constant, the regions in which a random op draws."""
Resolve: TypeAlias = Callable[[int], Own]
"""What a turn is given for itself, by its number."""


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
        own: What the turn is given behind the values that all turns are given.
        of: The micro-batch for which the graph was written.
    """

    number: int
    first: bool
    last: bool
    forward: fx.Graph
    constants: Mapping[str, torch.Tensor]
    reference: Graph
    local_shape: Callable[[tuple[int, ...]], tuple[int, ...]]
    groups: Groups
    own: tuple[Own, ...] = ()
    of: int = -1

    @property
    def graphs(self) -> tuple[fx.Graph, ...]:
        """The graph alone."""
        return (self.forward,)

    def module(self) -> fx.GraphModule:
        """The graph as code."""
        wanted = {str(n.target) for n in self.forward.nodes if n.op == "get_attr"}
        constants = {k: v for k, v in self.constants.items() if k in wanted}
        return fx.GraphModule(constants, self.forward, f"Turn{self.number}")


def accumulate(sums: list[torch.Tensor | None], index: int, value: torch.Tensor) -> None:
    """Add a summand of one micro-batch to the sum. The sum has memory of its own."""
    total = sums[index]
    if total is None:
        sums[index] = value.clone()
    else:
        total.add_(value)


class _TurnWriter(GraphWriter):
    """Writes a graph whose outer level is time. Of two levels the collectives, those of the inner one, are all that
    its runtime has. ``beside``: another writer, into whose graph it writes. Each has values of its own. ``shared``:
    what other turns have otherwise is given to the graph; ``lone`` says that it has something of its turn
    nevertheless."""

    def __init__(
        self,
        layout: TurnLayout,
        at: RankPlace,
        device: torch.device,
        beside: _TurnWriter | None = None,
        *,
        shared: bool = False,
    ) -> None:
        super().__init__(layout, at, device)
        if beside is not None:
            self.graph, self.runtime = beside.graph, beside.runtime
        self.inside = self.runtime if layout.levels == 2 else None
        self.shared, self.lone, self.given = shared, False, list[fx.Node]()
        self.own: dict[tuple[Any, ...], tuple[fx.Node, Resolve]] = {}

    def start(self) -> None:
        """All inputs are there. In a layout of two levels the devices are the inner one, and have one runtime."""
        if self.layout.levels > 2:
            super().start()

    def ends_inside(self, base: tuple[int, ...]) -> bool:
        """Whether all accelerators of a machine wait for what a value is made of at one place: here, if any of the
        graphs that are written beside each other has not waited for it."""
        if self.layout.levels > 2:
            return not isinstance(self.produced[base], fx.Node)
        return super().ends_inside(base)

    def give(self, key: LevelKey) -> fx.Node:
        """A value that all turns are given."""
        name = f"value{len(self.given)}_{identifier(self.theory.graph.tensors[key[0]].name)}"
        self.given.append(self.typed(self.graph.placeholder(name), key))
        return self.given[-1]

    def own_value(self, name: str, key: tuple[Any, ...], resolve: Resolve) -> fx.Node:
        """What each turn is given for itself; ``key`` says what it is."""
        if key not in self.own:
            *_, last = (node for node in self.graph.nodes if node.op == "placeholder")
            with self.graph.inserting_after(last):
                self.own[key] = self.graph.placeholder(f"own{len(self.own)}_{name}"), resolve
        return self.own[key][0]

    def narrow(self, whole: fx.Node, key: tuple[int, ...], level: int) -> fx.Node:
        """This rank's slice; rows of what all turns are given may be given."""
        if not self.shared or level != 0:
            return super().narrow(whole, key, level)
        if whole not in self.given:
            self.lone = True
            return super().narrow(whole, key, level)
        place = self.given.index(whole)

        def rows(turn: int) -> Rows:
            region = self.layout.region(key, 0, RankPlace(turn, self.at.inside))
            assert region is not None, "rows are a part"
            return Rows(place, region.dim, region.start, region.start + region.extent)

        return self.typed(self.own_value(self.name(key), ("rows", *key), rows), key)

    def drawn_regions(self, key: tuple[int, ...]) -> Any:
        """The part of a tensor that is drawn; it may be given."""
        if not self.shared:
            return super().drawn_regions(key)

        def regions(turn: int) -> list[tuple[int, int, int]]:
            at = RankPlace(turn, self.at.inside)
            return [(r.dim, r.start, r.extent) for r in self.layout.regions(key, at)]

        return self.own_value(f"{self.name(key)}_regions", ("regions", *key), regions)

    def wait(self) -> None:
        """Wait for the collectives whose results nothing on this rank reads."""
        for key in self._pending:
            self.need(key)


class TurnsWriter:
    """Writes the graphs of the turns of an active device."""

    def __init__(
        self, steps: TurnSteps, layout: TurnLayout, rank: int, device: torch.device, groups: Groups
    ) -> None:
        self.steps, self.layout, self.rank, self.device, self.groups = steps, layout, rank, device, groups
        self.graph = layout.graph
        self.awaited: Awaited = {}
        self.summed = [key for key in steps.leaving if not is_sharded(key[1])]
        self.constants: dict[str, torch.Tensor] = {}
        self._calls: dict[int, list[tuple[int, Any, Any]]] = {}
        self._all_steps = (*steps.before, *steps.turn, *steps.after)
        self._resolves: dict[int, list[Resolve]] = {}
        """What is given for themselves to the turns that share the graph of this one."""

    def turns(self, numbers: Sequence[int]) -> tuple[TurnGraph, ...]:
        """The graphs of these turns, which are all of the rank."""
        turns: list[TurnGraph] = []
        for number in numbers:
            first, last = number == numbers[0], number == numbers[-1]
            shared = [t for t in turns if t.number in self._resolves]
            other = None if last else next((t for t in shared if self._alike(t.number, number)), None)
            if other is None:
                turns.append(self.turn(number, first=first, last=last))
            else:
                own = tuple(resolve(number) for resolve in self._resolves[other.number])
                turns.append(replace(other, number=number, own=own))
        return tuple(turns)

    def _alike(self, one: int, other: int) -> bool:
        """Whether two turns do the same with other rows."""
        at = RankPlace(other, self.rank)
        tables = [self.layout.table(axis) for axis in self.layout.batches.loop.axes]
        return all(table[one] == table[other] for table in tables) and all(
            call == self.layout.call(instruction, rows, at) for instruction, rows, call in self._calls_of(one)
        )

    def _calls_of(self, turn: int) -> list[tuple[int, Any, Any]]:
        """What a turn calls for each instruction in the loop."""
        if turn not in self._calls:
            at = RankPlace(turn, self.rank)
            steps = [(s.instruction, rows_of(s)) for s in self.steps.turn if isinstance(s, Both)]
            self._calls[turn] = [(i, rows, self.layout.call(i, rows, at)) for i, rows in steps]
        return self._calls[turn]

    def turn(self, turn: int, *, first: bool, last: bool) -> TurnGraph:
        """The graph of a turn, with what is before the loop in the first one, and what is after it in the last."""
        steps = self.steps
        writer = self._writer(turn, shared=not first and not last)
        before, after = self._writer(0, writer), self._writer(0, writer)
        sums = _Sums(writer, self.summed)
        given = self._given() if first else [*steps.read, *(steps.carried if last else ())]
        for key in given:
            before.produced[key] = writer.give(key)
        for each in (writer, before, after):
            each.start()
        for key in steps.read:
            writer.produced[key] = partial(before.need, key)
        for key in steps.carried if last else ():
            after.produced[key] = partial(before.need, key)
        for key in self.summed if last else ():
            whole = key[0], REPLICATE, *key[2:]
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
        resolves = [resolve for _, resolve in writer.own.values()]
        if writer.shared and not writer.lone:
            self._resolves[turn] = resolves
        return TurnGraph(
            number=turn,
            first=first,
            last=last,
            forward=writer.graph,
            constants=self.constants,
            reference=self.graph,
            local_shape=lambda key: self.layout.shape(key, writer.at),
            groups=self.groups,
            own=tuple(resolve(turn) for resolve in resolves),
            of=turn,
        )

    def _given(self) -> list[LevelKey]:
        """What the rank is given for a step."""
        graph, stored = self.graph, self.steps.stored
        given = self.layout.given
        keys: list[LevelKey] = []
        for tensors in (graph.parameters, graph.buffers, graph.inputs):
            keys += [given(t.tensor, stored.get(t.tensor, REPLICATE)) for t in tensors]
        return keys if graph.tangent is None else [*keys, given(graph.tangent)]

    def _results(self, after: GraphWriter) -> tuple[Any, ...]:
        steps = self.steps
        return (
            None if steps.loss is None else after.need(steps.loss),
            [after.need(key) for key in steps.outputs if not is_sharded(key[1])],
            [after.need(key) for key in steps.buffers],
            [after.need(key) for key in steps.gradients],
        )

    def _writer(self, turn: int, beside: _TurnWriter | None = None, *, shared: bool = False) -> _TurnWriter:
        at = RankPlace(turn, self.rank)
        writer = _TurnWriter(self.layout, at, self.device, beside, shared=shared)
        writer.fused, writer.awaited = fused_attentions(self.layout, at, self._all_steps), self.awaited
        for constant in self.graph.constants:
            writer.constants[constant.tensor] = lambda key: self._constant(writer, key)
        return writer

    def _constant(self, writer: _TurnWriter, key: tuple[int, ...]) -> fx.Node:
        name = f"constant_{writer.name(key)}"
        if is_sharded(key[1]):
            if writer.shared:
                own = ("constant", *key)
                return writer.typed(writer.own_value(name, own, lambda turn: self._value(key, turn)), key)
            name = f"{name}_{writer.at.machine}"
        if name not in self.constants:
            self.constants[name] = self._value(key, writer.at.machine)
        return writer.graph.create_node("get_attr", name, name=name)

    def _value(self, key: tuple[int, ...], turn: int) -> torch.Tensor:
        """What a turn has of a constant."""
        (constant,) = (c for c in self.graph.constants if c.tensor == key[0])
        whole = value = constant_value(self.graph, constant, self.device)
        for region in self.layout.regions(key, RankPlace(turn, self.rank)):
            value = value.narrow(region.dim, region.start, region.extent)
        return whole if value is whole else value.clone()


class _Sums:
    """The sums over the loop, in a list that each turn is given: a turn adds to them as soon as it can, and what is
    after the loop takes them when the last turn has added to them."""

    def __init__(self, writer: _TurnWriter, keys: Sequence[LevelKey]) -> None:
        self.writer, self.keys = writer, list(keys)
        self.list = writer.graph.placeholder("sums")
        self._waiting, self._arriving = dict.fromkeys(keys), list[LevelKey]()

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

    def take(self, key: LevelKey, after: GraphWriter, whole: LevelKey) -> fx.Node:
        """The sum, to which this turn has added, as a value of ``after``."""
        if key in self._arriving or key in self._waiting:
            self._arriving = [k for k in self._arriving if k != key]
            self._waiting.pop(key, None)
            self._add(key)
        node = after.call(after.name(whole), take_saved, (self.list, self.keys.index(key)))
        return after.typed(node, whole)

    def _add(self, key: LevelKey) -> None:
        node = self.writer.need(key)
        self.writer.call(f"add_{self.writer.name(key)}", accumulate, (self.list, self.keys.index(key), node))
