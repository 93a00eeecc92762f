"""Seconds of a training step in which communication overlaps computation: two streams.

Each device has a compute clock ``T_j``, and all share one communication stream, free from ``free`` on. The
local graphs of :mod:`hetspmd.lower` hold the same steps in the same order on every device, so one pass over
that order settles all clocks:

    computation i             T_j <- T_j + seconds_ij
    start of a collective c   T_j <- T_j + pack_jc,
                              start_c = max(free, max_j T_j),  end_c = start_c + seconds_c,  free <- end_c,
                              T_j <- T_j + min(issue_jc, seconds_c)
    wait for it               T_j <- max(T_j, end_c) + unpack_jc

Some backends carry several collectives at a time, in ``lanes`` (:class:`~hetspmd.cluster.cluster.Cluster`). The
links are shared all the same, so that one can only wait out its latency behind another:

    end_c = max(max(end_(c - lanes), max_j T_j) + latency_c, free) + seconds_c - latency_c

Issuing a collective takes time of the device itself where the processor that computes also does that
(:class:`~hetspmd.cluster.cluster.Device`), ``issue_jc = issue_j + C_c / issue_bandwidth_j``, C the bytes that are
copied: of a gather the device's own slice, of a scatter none, of others the tensor. The collective's own seconds
have it too. Slices that do not lie in memory as they are sent are copied besides
(:mod:`hetspmd.cost.collective_costs`).

Where computing and a collective on its way take from each other, a computation takes longer beside one, and the
other way round (:mod:`hetspmd.cost.contention`).

In micro-batches the turns of the loop are passed over one after the other (:mod:`hetspmd.cost.turn_passes`). All of
it is forward, as it is where it runs.

Small collectives share a bucket, as they do where they run: they are one collective here, with one latency.

A collective begins when the last device has issued it and the stream is free, and ends for all at once. It
is issued where the schedule (:mod:`hetspmd.program.schedule`) has it and waited for where its result is first read
(a slice or a mask of it counts), by the end of its graph at the latest: all of forward's have ended before
backward begins. Rank 0 alone waits for what is only masked. With idle devices the loss, and outputs that come
back whole, are sent between forward and backward. Steps that no result needs are not run. A copy at a cut
between segments is no collective where the lengths agree: nobody waits.

The stage model of :mod:`hetspmd.cost.step` has every device wait for every collective where it stands. The
step is no longer than its seconds for the same steps in this order, forward before backward (what idle devices
are sent beginning a stage between). For: a longest chain of events holds each collective at most once, and of
every stage one interval on one device, because it leaves a device where a collective is issued, which ends a
stage, and comes back to one behind that.
"""

from __future__ import annotations

import copy
from typing import TypeAlias

import numpy as np

from hetspmd.cluster.collective_kinds import KINDS
from hetspmd.cost.contention import Beside, Contention
from hetspmd.cost.model import Array, CostModel, Index, MoveForm
from hetspmd.cost.simulated_run import BOUNDARY, START, WAIT, WAIT_FIRST, SimulatedRun, waited
from hetspmd.cost.stream_events import StreamEvents
from hetspmd.program.buckets import Bucket, members
from hetspmd.program.dataflow import Key, Values
from hetspmd.program.program import Communicate, Compute, Program
from hetspmd.program.schedule import Schedule

StreamSeconds: TypeAlias = tuple[list[float], list[float], list[float]]
"""By collective: seconds on the stream, and of the devices before and after it."""


class TwoStreams:
    """What the two streams do in a step of ``program``, in order; to be timed at any shares.

    ``events`` holds ``(computations before, what, collective)``, ``instructions`` the scheduled computations,
    ``collectives`` the communications in the order in which they are issued. ``idle``: seconds in which idle
    devices are sent the results of forward. ``values``: what the program's steps read and write, if known.
    ``each_turn``: every turn of a loop over micro-batches is simulated, not those between the first and the last as
    one. ``turns`` has of each computation of the loop the pass that it is in, from 0 on, of others None.
    Raises ValueError for a step that is no triple of the theory.
    """

    def __init__(
        self,
        model: CostModel,
        program: Program,
        schedule: Schedule,
        *,
        idle: float = 0.0,
        values: Values | None = None,
        each_turn: bool = False,
    ) -> None:
        self.model, self.program, self.idle = model, program, idle
        values = model.values(program) if values is None else values
        told = StreamEvents(model, program, values)
        if model.batches is None:
            there: set[Key] = set()
            told.graph(schedule.forward, there)
            if idle > 0:
                told.results_to_idle()
            told.event(BOUNDARY)
            told.graph(schedule.backward, there)
        else:
            told.loop(schedule, model.batches, each_turn=each_turn)
            if idle > 0:
                told.results_to_idle()
            told.event(BOUNDARY)
        self.events, self.collectives, self.turns = told.events, told.collectives, told.turns
        self._steps, self._started = told.places, told.started
        self._weights, self._parts = told.weights, told.parts
        self._moves, self._contention = self._priced()
        copied = {id(c): self._copied(c) for c in self._distinct()}
        self._nbytes = [0.0 if c is None else copied[id(c)] for c in self.collectives]
        self.instructions, signatures = self._computed()
        self._unique, inverse = np.unique(signatures, return_inverse=True)
        self._inverse: Index = inverse.reshape(-1)
        at = sorted({0, *(a for a, _, _ in self.events)} - {len(signatures)})
        self._groups: Index = np.array(at, dtype=np.int64)

    def _computed(self) -> tuple[list[int], Index]:
        """The instruction and the signature of each computation."""
        facts, steps = self.model.facts, self.program.steps
        told = [facts(step).signature if isinstance(step, Compute) else -1 for step in steps]
        instructions = [step.instruction if isinstance(step, Compute) else -1 for step in steps]
        signatures: Index = np.array(told, dtype=np.int64)[np.array(self._steps, dtype=np.int64)]
        return [instructions[place] for place in self._steps], signatures

    def _copied(self, collective: Communicate | Bucket) -> float:
        """Bytes that a device copies to issue a collective, but for what :attr:`MoveForm.pack` is of. A bucket is
        packed; of a gather a device sends about its part of the tensor."""
        nbytes = float(sum(self.model.theory.graph.tensors[m.tensor].nbytes for m in members(collective)))
        kind = KINDS[collective.kind]
        if kind.gathers:
            return nbytes / self.model.world
        return 0.0 if kind.scatters and isinstance(collective, Communicate) else nbytes

    def _distinct(self) -> list[Communicate | Bucket]:
        """The collectives, once each, though several passes have them."""
        return list({id(c): c for c in self.collectives if c is not None}.values())

    def _priced(self) -> tuple[list[tuple[MoveForm, ...]], Contention | None]:
        kinds = [None if c is None else c.kind for c in self.collectives]
        idle = (MoveForm(self.idle),)
        told = {id(c): self.model.transfer_forms(c) for c in self._distinct()}
        forms = [idle if c is None else told[id(c)] for c in self.collectives]
        return forms, Contention.of(self.model.cluster.devices, kinds)

    def turns_of(self, device: int) -> list[int | None]:
        """Of each computation the turn of an active device, from 0, in which it is; None outside of the loop. The
        last pass is the last turn of each device (:mod:`hetspmd.cost.turn_passes`)."""
        batches = self.model.batches
        if batches is None:
            return [None] * len(self.instructions)
        last = batches.turns_of(self.model.world)[device] - 1
        return [None if turn is None else min(turn, last) for turn in self.turns]

    def on(self, model: CostModel, *, idle: float = 0.0) -> TwoStreams:
        """The same steps on another cluster of as many devices; ``idle`` must be 0 there if it is here."""
        other = copy.copy(self)
        other.model, other.idle = model, idle
        other._moves, other._contention = other._priced()
        return other

    def seconds(self, shares: Array) -> float:
        """Seconds until the last device has finished the step."""
        return float(self.run(shares).final.max())

    def completed(self, run: SimulatedRun, device: int | None = None) -> dict[int, int]:
        """The step of the program that runs first after each collective has ended, by the collective's own step.

        Of those that have ended before any device waits for them; their buffers are free from then on. ``device``:
        as one device sees it, not the one that is farthest behind.
        """
        completions: dict[int, int] = {}
        in_flight: list[int] = []
        clocks = np.array(run.clocks).reshape(-1, self.model.world)
        earliests = clocks.min(axis=1) if device is None else clocks[:, device]
        for (at, what, collective), earliest in zip(self.events, earliests.tolist(), strict=True):
            for c in [c for c in in_flight if run.ended(c) <= earliest]:
                in_flight.remove(c)
                if at < len(self._steps):
                    completions.update(dict.fromkeys(self._started[c], self._steps[at]))
            if what == START:
                in_flight.append(collective)
            elif what == WAIT and collective in in_flight:
                in_flight.remove(collective)
        return completions

    def _carried(self, shares: Array) -> StreamSeconds:
        """By collective, the seconds on the communication stream, and those of the devices before and after it."""
        told: dict[int, tuple[float, float, float]] = {}
        for forms in {id(forms): forms for forms in self._moves}.values():
            pack, unpack = sum(m.pack for m in forms), sum(m.unpack for m in forms)
            seconds = sum(self.model.form_seconds(m, shares) for m in forms)
            told[id(forms)] = max(seconds - pack - unpack, 0.0), pack, unpack
        moves, packs, unpacks = ([told[id(forms)][part] for forms in self._moves] for part in range(3))
        for collective, (part, latencies) in self._parts.items():
            latency = latencies * self.model.form_latency(self._moves[collective][0], shares)
            moves[collective] = part * moves[collective] + (latency if moves[collective] else 0.0)
            packs[collective] *= part
            unpacks[collective] *= part
        return moves, packs, unpacks

    def _seconds(self, shares: Array) -> Array:
        """Of each computation on each device; of those of a loop the part of a pass."""
        seconds: Array = self.model.seconds(self._unique, shares)[self._inverse]
        return seconds if self._weights is None else seconds * self._weights

    def _issuing(self) -> tuple[Array, Array, Array]:
        """By device: seconds to issue a collective, seconds for a byte that is copied for it, and the latter as a
        part of the slowest device's."""
        devices = self.model.cluster.devices
        issue, copying = np.array([d.issue for d in devices]), np.array([d.copying for d in devices])
        return issue, copying, copying / copying.max() if copying.any() else copying

    def run(self, shares: Array) -> SimulatedRun:
        """All clocks at the given shares (of :meth:`CostModel.shares`)."""
        seconds = self._seconds(shares)
        sums = np.add.reduceat(seconds, self._groups, axis=0) if len(self._groups) else seconds
        carried = self._carried(shares)
        beside = None if self._contention is None else Beside(self._contention, sums)
        run = self._pass(shares, seconds, sums, carried, beside)
        while beside is not None and (beside := beside.then(run.starts, run.ends)) is not None:
            run = self._pass(shares, seconds, sums, carried, beside)
        return run

    def _pass(
        self, shares: Array, seconds: Array, sums: Array, carried: StreamSeconds, beside: Beside | None
    ) -> SimulatedRun:
        moves, packs, unpacks = carried
        moves = (
            moves if beside is None else [m * k for m, k in zip(moves, beside.longer.tolist(), strict=True)]
        )
        dropped = tuple(f[0].moved and s == 0 for f, s in zip(self._moves, moves, strict=True))
        lanes = self.model.cluster.lanes
        latencies = [self.model.form_latency(f[0], shares) if lanes > 1 else 0.0 for f in self._moves]
        issue, per_byte, copying = self._issuing()
        issues, issued = bool(issue.any() or per_byte.any()), dict[int, Array]()
        first: Array = np.eye(self.model.world)[0]
        everyone: Array = np.ones(self.model.world)
        unpacked: dict[int, Array] = {}
        clock: Array = np.zeros(self.model.world)
        forward = issuing = clock
        clocks: list[Array] = []
        starts, ends = list[float](), list[float]()
        free, group, done = 0.0, 0, 0
        for at, what, collective in self.events:
            if at != done:
                clock = clock + sums[group] if beside is None else beside.computed(clock, group)
                group, done = group + 1, at
            if what == START and packs[collective]:
                own = packs[collective] * copying
                clock, issuing = clock + own, issuing + own
            clocks.append(clock)
            if what == START:
                ready = float(clock.max())
                starts.append(free if dropped[collective] else max(free, ready))
                if not dropped[collective]:
                    latency, before = latencies[collective], len(ends) - lanes
                    begun = max(ready, ends[before]) if before >= 0 else ready
                    # Without lanes begun is the start, and the sum below is kept exact.
                    late = max(begun + latency, free) - latency if lanes > 1 else starts[-1]
                    free = late + moves[collective]
                    if beside is not None:
                        beside.begun(collective, starts[-1], free)
                    if issues:
                        own = issued[len(clocks) - 1] = np.minimum(
                            issue + per_byte * self._nbytes[collective], moves[collective]
                        )
                        clock, issuing = clock + own, issuing + own
                ends.append(free)
            elif what == BOUNDARY:
                forward = clock
            elif not dropped[collective]:
                clock = waited(what, clock, ends[collective])
                if unpacks[collective]:  # once on each device, however often it is waited for
                    remaining = unpacked.get(collective, everyone)
                    mine = remaining * first if what == WAIT_FIRST else remaining
                    unpacked[collective] = remaining - mine
                    own = issued[len(clocks) - 1] = unpacks[collective] * copying * mine
                    clock, issuing = clock + own, issuing + own
        if done != len(self._steps):
            clock = clock + sums[group] if beside is None else beside.computed(clock, group)
        return SimulatedRun(
            seconds, clocks, starts, ends, forward, clock, dropped, issuing, issued, self._groups, beside
        )
