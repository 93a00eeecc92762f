"""What the two streams of a step do, in order: computations, and between them starts of collectives and waits.

:mod:`hetspmd.cost.simulator` times it. The order is that of the schedule, as :mod:`hetspmd.lower` writes it.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence

import numpy as np

from hetspmd.cost.model import Array, CostModel
from hetspmd.cost.simulated_run import START, WAIT, WAIT_FIRST
from hetspmd.cost.turn_passes import TurnPass, passes
from hetspmd.placement import PARTIAL, REPLICATE
from hetspmd.program.buckets import Bucket
from hetspmd.program.dataflow import Key, Values
from hetspmd.program.loop_steps import loop_order, step_phases
from hetspmd.program.micro_batches import MicroBatches
from hetspmd.program.program import Communicate, Compute, Program
from hetspmd.program.schedule import Places, Schedule, scheduled
from hetspmd.program.time_split import Phase


class StreamEvents:
    """The computations of a step, by their ``places`` in the program, and its ``events``, ``(computations before,
    what, collective)``; the ``collectives`` in the order in which they are issued, and where each is ``started`` in
    the program.

    Of a loop over micro-batches: of each computation the pass that it is in (``turns``; None outside of the loop)
    and its part on each device (``weights``; None without a loop); of collectives in the loop their part of all
    passes, and how many latencies more they have (``parts``).

    Of what computations read and write, values of tensors that some collective turns are followed alone: nothing
    waits for others.
    """

    def __init__(self, model: CostModel, program: Program, values: Values) -> None:
        self.model, self.program, self._values = model, program, values
        self.places: list[int] = []
        self.events: list[tuple[int, int, int]] = []
        self.collectives: list[Communicate | Bucket | None] = []
        self.started: list[Places] = []
        self.turns: list[int | None] = []
        self.weights: Array | None = None
        self.parts: dict[int, tuple[float, float]] = {}
        self._together: dict[Places, Communicate | Bucket] = {}
        moved = {step.tensor for step in program.steps if isinstance(step, Communicate)}
        graph = model.theory.graph
        watching = {graph.producers[tensor] for tensor in moved if tensor in graph.producers}
        watching.update(reader for tensor in moved for reader in graph.consumers.get(tensor, ()))
        # By place, whether it is a computation that neither reads nor makes what is followed.
        self._silent = [isinstance(s, Compute) and s.instruction not in watching for s in program.steps]
        self._moved = moved

    def event(self, what: int, collective: int = -1) -> None:
        """Something happens behind the computations that there are."""
        self.events.append((len(self.places), what, collective))

    def results_to_idle(self) -> None:
        """Idle devices are sent the results of forward."""
        self.collectives.append(None)
        self.started.append(())
        self.event(START, len(self.collectives) - 1)
        self.event(WAIT, len(self.collectives) - 1)

    def loop(self, schedule: Schedule, batches: MicroBatches, *, each_turn: bool) -> None:
        """The passes over a loop: of each computation of the loop the part that a device has in a pass, of each
        collective in it the part of its seconds, with as many latencies as the pass has turns."""
        graph, program = self.model.theory.graph, self.program
        phases = step_phases(graph, batches, program)
        before = {
            key
            for place, phase in enumerate(phases)
            if phase == "before" and not self._silent[place]
            for key in self._values.writes[place]
        }
        order = self._in_parts(loop_order(graph, program, schedule, batches), phases)
        kinds = _kinds(program, schedule, batches, phases)
        weights: list[Array] = []
        of_each: list[int] = []
        for number, each in enumerate(passes(batches, self.model.world, each=each_turn)):
            done, started = len(self.places), len(self.collectives)
            wanted = each.phases
            self.graph([part for part, phase in order if phase in wanted], set(before) if number else set())
            weights += _weights(each, self.model.world)
            of_each += [4 * number + kinds[place] for place in self.places[done:]]
            self.turns += [number if phases[place] == "in" else None for place in self.places[done:]]
            self._part(started, each, batches, phases)
        self.weights = np.array(weights).reshape(-1, self.model.world)[np.array(of_each, dtype=np.int64)]

    def _in_parts(
        self, order: Sequence[Places], phases: Sequence[Phase]
    ) -> list[tuple[Sequence[int], Phase]]:
        """What runs at once, by phase, in the order; computations of one phase of which nothing is followed stand
        together."""
        parts: list[tuple[Sequence[int], Phase]] = []
        silent = self._silent
        run: list[int] = []
        of_run: Phase | None = None
        for places in order:
            place = places[0]
            if not silent[place]:
                parts += _parts(places, phases)
                of_run = None
            elif phases[place] == of_run:
                run.append(place)
            else:
                run, of_run = [place], phases[place]
                parts.append((run, of_run))
        return parts

    def _part(self, first: int, each: TurnPass, batches: MicroBatches, phases: Sequence[Phase]) -> None:
        """The parts of the collectives of the loop from the ``first`` on, which are of one pass."""
        part = each.turns / batches.count
        for collective in range(first, len(self.collectives)):
            place = self.started[collective][0]
            if phases[place] == "in":
                step = self.program.steps[place]
                assert isinstance(step, Communicate)
                once = self.model.times(step) == 1
                self.parts[collective] = part, (each.turns - part if once else 0.0)

    def graph(self, steps: Iterable[Sequence[int]], there: set[Key]) -> None:
        """Append one local graph, as :class:`hetspmd.lower.emit.GraphWriter` writes it; ``there`` are the
        values of the graphs before it, to which it adds its own. Computations of which nothing is followed may
        stand together."""
        pending: dict[Key, int] = {}
        masked: set[int] = set()

        def read(key: Key) -> None:
            if key in there:
                return
            if key not in pending:
                whole = (key[0], REPLICATE)
                if whole not in pending:
                    return
                if key[1] == PARTIAL:
                    if pending[whole] not in masked:
                        masked.add(pending[whole])
                        self.event(WAIT_FIRST, pending[whole])
                    return
                key = whole
            self.event(WAIT, pending.pop(key))
            there.add(key)

        silent, computed, moved = self._silent, self.places.extend, self._moved
        sources = self.model.theory.graph.sources
        reads, writes, program = self._values.reads, self._values.writes, self.program.steps
        for places in steps:
            place = places[0]
            if silent[place]:
                computed(places)
                continue
            step = program[place]
            if not isinstance(step, Compute):
                started = self._starting(places, there, pending)
                for place in started.values():
                    read(reads[place][0])
                if started:
                    self._start(tuple(started.values()))
                    pending.update(dict.fromkeys(started, len(self.collectives) - 1))
                continue
            if pending and step.instruction not in sources:
                for key in reads[place]:
                    if key[0] in moved and key not in there:
                        read(key)
            computed(places)
            for key in writes[place]:
                if key[0] in moved and key not in pending:
                    there.add(key)
        for collective in dict.fromkeys(pending.values()):
            self.event(WAIT, collective)
        there.update(pending)

    def _starting(
        self, places: Sequence[int], there: Container[Key], pending: Container[Key]
    ) -> dict[Key, int]:
        """What collectives give that is not there yet, by the places of the collectives."""
        writes = self._values.writes
        return {
            key: place for place in places for key in writes[place] if key not in there and key not in pending
        }

    def _start(self, places: Places) -> None:
        """The collectives at these places start as one."""
        together = self._together.get(places)
        if together is None:
            made = scheduled(self.program, places)
            assert not isinstance(made, Compute)
            together = self._together[places] = made
        self.collectives.append(together)
        self.started.append(places)
        self.event(START, len(self.collectives) - 1)


def _parts(places: Places, phases: Sequence[Phase]) -> list[tuple[Places, Phase]]:
    """What runs at once, by phase. The members of a bucket that are of several phases do not share it."""
    if len(places) == 1:
        return [(places, phases[places[0]])]
    parts: dict[Phase, list[int]] = {}
    for place in places:
        parts.setdefault(phases[place], []).append(place)
    return [(tuple(part), phase) for phase, part in parts.items()]


def _kinds(program: Program, schedule: Schedule, batches: MicroBatches, phases: Sequence[Phase]) -> list[int]:
    """By place, which of the :func:`_weights` of a pass a computation has."""
    late = {place for places in schedule.backward for place in places}
    of_loop = batches.loop.phases
    return [
        (1 if phase != "in" else 0 if of_loop[step.instruction] != "in" else 3 if place in late else 2)
        if isinstance(step, Compute)
        else -1
        for place, (step, phase) in enumerate(zip(program.steps, phases, strict=True))
    ]


def _weights(each: TurnPass, world: int) -> list[Array]:
    """What each device has in a pass of what could stand outside of the loop, of what does, and of the loop's own
    forward and backward."""
    return [np.full(world, float(each.turns)), np.full(world, 1.0), each.forward, each.backward]
