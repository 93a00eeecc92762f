"""Peak bytes of the accelerators of machines in a step in micro-batches, turn by turn.

Values are held as long as in a step of single devices in micro-batches (:mod:`hetspmd.cost.turn_memory`), and have
the bytes, and collectives the buffers, that they have on the first accelerator of each machine
(:mod:`hetspmd.cost.level_memory`). Of what the loop makes in rows the largest micro-batch counts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np

from hetspmd.cost.level_costs import local_bytes
from hetspmd.cost.level_memory import MachineBytes, in_transit
from hetspmd.cost.liveness import Liveness
from hetspmd.cost.memory import OPTIMIZER_BYTES, TEMPORARIES
from hetspmd.cost.model import Index
from hetspmd.cost.turn_memory import EACH, InTurns, Turns, kinds_of
from hetspmd.placement import REPLICATE
from hetspmd.program.level_layout import LevelKey, RankPlace
from hetspmd.program.levels import Across, Both, NestedStep, Together, carried, made_by
from hetspmd.program.machine_turn_layout import MachineTurnLayout
from hetspmd.program.program import Communicate
from hetspmd.program.turn_steps import TurnSteps
from hetspmd.trace.graph import ITEM_SIZES


def inside_bytes_in_turns(
    layout: MachineTurnLayout,
    steps: TurnSteps,
    arrivals: Mapping[Communicate, int] | None = None,
    *,
    optimizer_bytes: int = OPTIMIZER_BYTES,
) -> tuple[int, ...]:
    """Peak bytes of the first accelerator of each machine.

    ``arrivals``: the instruction that runs first after a collective between machines has ended; one that is not
    there ends where its result is first read.
    """
    held = _Held(layout, steps, arrivals or {}, optimizer_bytes)
    first, end, roles, nbytes = (
        np.array(column, dtype=np.int64) for column in zip(*held.rows(), strict=True)
    )
    change = np.zeros((held.turns.starts[-1] + 1, len(layout.of_machines)), dtype=np.int64)
    for begins, ends in held.turns.held(first, end, roles):
        np.add.at(change, begins, nbytes)
        np.subtract.at(change, ends, nbytes)
    most: Index = change.cumsum(axis=0).max(axis=0)
    return tuple(int(b) for b in most)


class _TurnBytes(MachineBytes):
    """Of what lies in time in rows, those of the micro-batch that has most."""

    def __init__(self, layout: MachineTurnLayout) -> None:
        super().__init__(layout)
        self.accelerators = layout.of_machines
        self._firsts, self._turns = layout.first_ranks, tuple(layout.alike_turns)
        self._placements = layout.batches.placements
        self._known: dict[tuple[LevelKey, int], int] = {}

    def of(self, key: LevelKey, machine: int) -> int:
        """Those of a value."""
        if (key, machine) not in self._known:
            time = self._placements.get(key[0], REPLICATE)
            turns = self._turns if time != REPLICATE else self._turns[:1]
            rank = self._firsts[machine]
            self._known[key, machine] = max(
                local_bytes(self.layout, (key[0], time, *key[1:]), RankPlace(turn, rank)) for turn in turns
            )
        return self._known[key, machine]

    def whole(self, tensor: int) -> int:
        """Those of all machines in a micro-batch."""
        return self.of((tensor, REPLICATE, REPLICATE), 0)


class _Held:
    """What the steps hold, in the order in which a device of one turn would run them, and from when to when."""

    def __init__(
        self,
        layout: MachineTurnLayout,
        steps: TurnSteps,
        arrivals: Mapping[Communicate, int],
        optimizer_bytes: int,
    ) -> None:
        self.layout, self.steps, self.graph = layout, steps, layout.graph
        self.sizes, self.arrivals = _TurnBytes(layout), arrivals
        self.machines = range(len(layout.of_machines))
        self.order = [
            (phase == "in", step, _without_time(step))
            for phase, step in steps.together(("before", "in", "after"))
        ]
        self.live = self._liveness()
        places = {p.tensor: at for at, p in enumerate(self.graph.parameters)}
        updates = sorted(self.live.optimized, key=lambda key: places[key[0]])
        self.updates, self.optimizer_bytes = updates if optimizer_bytes else [], optimizer_bytes
        self.moments = len(self.order) + 1 + len(self.updates)
        inside = [at for at, (in_loop, _, _) in enumerate(self.order) if in_loop]
        self.loop = (inside[0], inside[-1] + 1)
        self.turns = Turns(kinds_of((layout.batches.count,)), self.loop, len(self.order), self.moments)

    def rows(self) -> Iterator[tuple[int, int, int, list[int]]]:
        """The first moment at which something is held, the one behind the last, what it is to the loop, and its
        bytes on each machine."""
        live, count = self.live, len(self.order)
        spare = live.give_memory()
        own = [v for v, storage in enumerate(live.storage) if storage == v]
        leaving = {_two_levels(key) for key in self.steps.leaving}
        in_turns = InTurns(self.layout.batches, live, own, self.loop, self._looped(), leaving)
        for v, role in zip(own, in_turns.roles, strict=True):
            end = live.last[v] + 1 if live.last[v] < count else self.moments
            yield live.born[v], end, role, self._local(live.sizes[v])
        for more in in_turns.more:
            yield more.first, more.end, EACH, self._local(more.key)
        running = {
            step.instruction: at for at, (_, step, _) in enumerate(self.order) if isinstance(step, Both)
        }
        for transit, role in in_turns.transits(live.transits):
            until = self._arrival(transit.step, transit.start, running)
            for_machines = [
                in_transit(self.sizes, transit, min(transit.wait, until), m, spare=id(transit.step) in spare)
                for m in self.machines
            ]
            for first, end in dict.fromkeys(window for each in for_machines for window in each):
                yield first, min(end, count), role, [each[first, end] for each in for_machines]
        yield from self._updating()

    def _updating(self) -> Iterator[tuple[int, int, int, list[int]]]:
        """The optimizer's state, and what it needs for one parameter after the other."""
        for at, key in enumerate(self.updates, len(self.order) + 1):
            nbytes, size = self._local(key), ITEM_SIZES[self.graph.tensors[key[0]].dtype]
            yield 0, self.moments, EACH, [n // size * self.optimizer_bytes for n in nbytes]
            yield at, at + 1, EACH, [n * TEMPORARIES for n in nbytes]
            if at + 1 < self.moments:
                yield at + 1, at + 2, EACH, nbytes

    def _local(self, key: LevelKey) -> list[int]:
        return [self.sizes.of(key, machine) for machine in self.machines]

    def _arrival(self, step: object, start: int, running: Mapping[int, int]) -> int:
        """The step at which a collective has ended, behind the last if it is not known; one of the loop that ends
        in the next turn is on its way to the end of its own."""
        last = len(self.order)
        if not isinstance(step, Across):
            return last
        instruction = self.arrivals.get(Communicate(step.tensor, step.kind, step.source, step.target))
        until = last if instruction is None else running.get(instruction, last)
        return until if until > start else last

    def _looped(self) -> set[LevelKey]:
        """The values that the loop makes."""
        made: set[LevelKey] = set()
        for in_loop, _, step in self.order:
            if in_loop and isinstance(step, Both):
                made.update(key for key in made_by(self.graph, step) if key[0] >= 0)
            elif in_loop and not isinstance(step, Both):
                made.update(target for _, target in carried(step))
        return made

    def _liveness(self) -> Liveness:
        """Parameters, buffers and inputs are held from the beginning to the end."""
        graph, steps, count = self.graph, self.steps, len(self.order)
        live = Liveness(self.layout.theory, ())
        lasting = list(steps.stored.items())
        lasting += [] if graph.tangent is None else [(graph.tangent, REPLICATE)]
        for tensor, form in lasting:
            live.hold((tensor, form, REPLICATE), count)
        live.follow(
            [
                (plain, False, not isinstance(step, Both) and self.layout.is_nothing(step))
                for _, step, plain in self.order
            ],
            count,
        )
        loss = (steps.loss,) if steps.loss else ()
        left = [_two_levels(key) for key in (*loss, *steps.outputs, *steps.buffers)]
        live.leave(left, [_two_levels(key) for key in steps.gradients], count)
        return live


def _two_levels(key: LevelKey) -> LevelKey:
    """A value on machines and inside: what it is in time follows from its tensor."""
    return (key[0], *key[2:])


def _without_time(step: NestedStep) -> NestedStep:
    if isinstance(step, Both):
        return replace(step, turn=None)
    if isinstance(step, Together):
        across = tuple(replace(m, time=None) for m in step.members if isinstance(m, Across))
        return Together(
            across or tuple(replace(m, time=None) for m in step.members if not isinstance(m, Across))
        )
    return replace(step, time=None)
