"""What a recording holds: when every rank computed, waited and communicated, on one clock.

As in the simulated timeline, a device's communication stream takes the collectives in the order in which they are
issued, one at a time. With ready_c the time at which the last rank has issued collective c,

    start_c = max(ready_c, end_{c-1}),   end_c = max(start_c, completed_c)

on each device. A backend may carry several at once; ``issued`` and ``completed`` are as they were seen.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

import hetspmd
from hetspmd.cluster.machines import machine_of
from hetspmd.codec.files import write_output
from hetspmd.cost.timeline import IDLE_RESULTS, Event, Stream
from hetspmd.record.timestamps import GraphCall, What, offsets

if TYPE_CHECKING:
    import os

    from hetspmd.cluster.cluster import Cluster
    from hetspmd.plan.plan import Plan


@dataclass(frozen=True, slots=True)
class Span:
    """What the thread of a ``device`` (a rank) did from ``start`` to ``end`` seconds, in run ``run`` of a local
    graph of the recording's ``plans[plan]``; -1 and -1 for what is not part of one."""

    device: int
    plan: int
    run: int
    what: What
    name: str
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class LocalRun:
    """A run of a local graph on a device: ``graph`` is ``forward`` or ``backward``."""

    device: int
    plan: int
    run: int
    graph: str
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class MeasuredCollective:
    """A collective that was carried out: by rank the seconds at which it was issued, complete, and the stretch
    for which it held the rank's communication stream."""

    name: str
    plan: int
    run: int
    issued: Mapping[int, float]
    completed: Mapping[int, float]
    streams: Mapping[int, tuple[float, float]]


@dataclass(frozen=True)
class MeasuredSteps:
    """The recorded steps; seconds from the first thing recorded, on rank 0's clock.

    devices      names of the cluster's devices, in rank order; of a machine with several accelerators, once each
    plans        what ran; there is more than one where batches or modes differ
    spans        what each rank's thread did, by rank, then time
    runs         of local graphs, by rank, then time
    carried      the collectives in the order in which they were issued
    machines     the device of the cluster that each rank is (an accelerator of)
    clock_error  seconds by which the ranks' clocks may be apart: 0 on one machine; otherwise a bound from
                 rounds before and after the steps, and half of what the clocks drifted between them
    """

    devices: tuple[str, ...]
    plans: tuple[Plan, ...] = field(repr=False)
    spans: tuple[Span, ...] = field(repr=False)
    runs: tuple[LocalRun, ...] = field(repr=False)
    carried: tuple[MeasuredCollective, ...] = field(repr=False)
    clock_error: float
    machines: tuple[int, ...]

    @cached_property
    def events(self) -> tuple[Event, ...]:
        """All that took time as the simulated timeline has it, by device, then stream, then start."""
        events: list[Event] = []
        streams: tuple[Stream, ...] = ("compute", "waiting")
        for rank in range(len(self.devices)):
            mine = [s for s in self.spans if s.device == rank]
            for stream in streams:
                events += [
                    Event(rank, stream, s.name, s.start, s.end)
                    for s in mine
                    if (s.what == "wait") == (stream == "waiting")
                ]
            events += [
                Event(rank, "communication", c.name, *c.streams[rank])
                for c in self.carried
                if rank in c.streams
            ]
        return tuple(events)

    def exposed(self, rank: int) -> Callable[[float, float], float]:
        """The seconds between two times for which a rank's communication stream carries something, as a function.

        A wait's exposed seconds are those; in the others the stream stands idle, because a device has not yet
        issued the next collective.
        """
        streams = [one.streams[rank] for one in self.carried if rank in one.streams]
        starts = [start for start, _ in streams]
        before = [0.0, *accumulate(end - start for start, end in streams)]

        def until(time: float) -> float:
            place = bisect_right(starts, time)
            if place == 0:
                return 0.0
            start, end = streams[place - 1]
            return before[place - 1] + min(time, end) - start

        return lambda start, end: until(end) - until(start)

    def text(self) -> str:
        """Measured against simulated, for people: by device, by op, by kind of collective."""
        text: str = hetspmd.attached("recording_text")(self)
        return text

    __str__ = text

    def to_chrome_trace(self) -> str:
        """The events as Chrome trace JSON, laid out as :meth:`Timeline.to_chrome_trace` lays out its own."""
        text: str = hetspmd.attached("recording_trace")(self)
        return text

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write :meth:`to_chrome_trace` to a file, whole or not at all. Raises OutputError if it cannot."""
        write_output(self.to_chrome_trace(), path)


def assemble(cluster: Cluster, plans: Sequence[Plan], logs: Sequence[Mapping[str, Any]]) -> MeasuredSteps:
    """What the ranks' ``logs`` (of :meth:`hetspmd.record.record.Recording`) say together."""
    machines = machine_of(cluster)
    devices = [cluster.devices[machine].name for machine in machines]
    shifts, error = _shifts(logs)
    first = min((t + shift for log, shift in zip(logs, shifts, strict=True) for t in _times(log)), default=0)
    spans: list[Span] = []
    runs: list[LocalRun] = []
    seen: dict[tuple[int, int, int], _Seen] = {}
    for rank, (log, shift) in enumerate(zip(logs, shifts, strict=True)):
        one = _Rank(rank, machines[rank], log, shift - first, seen)
        spans += sorted(one.spans, key=lambda s: s.start)
        runs += one.runs
    return MeasuredSteps(
        tuple(devices),
        tuple(plans),
        tuple(spans),
        tuple(runs),
        _carried(seen, len(devices)),
        error / 1e9,
        machines,
    )


def _shifts(logs: Sequence[Mapping[str, Any]]) -> tuple[list[int], int]:
    before = list(offsets([log["before"] for log in logs]))
    after = list(offsets([log["after"] for log in logs]))
    error = 0
    for (one, wrong), (other, also) in zip(before, after, strict=True):
        error = max(error, max(wrong, also) + abs(one - other) // 2)
    return [(one + other) // 2 for (one, _), (other, _) in zip(before, after, strict=True)], error


def _times(log: Mapping[str, Any]) -> Iterable[int]:
    for *_, times, _ in log["passes"]:
        yield times[0]
    for begin, _ in (*log["optimizer"], *log["shares"]):
        yield begin


@dataclass
class _Seen:
    """A collective by rank, as far as the logs were read."""

    name: str
    plan: int
    issued: dict[int, float] = field(default_factory=dict)
    completed: dict[int, float] = field(default_factory=dict)


EVERYWHERE = -1
"""In place of the machine that a collective is inside of."""


class _Rank:
    """The log of one rank of a machine, its clock moved by ``shift`` nanoseconds."""

    def __init__(
        self,
        rank: int,
        machine: int,
        log: Mapping[str, Any],
        shift: int,
        seen: dict[tuple[int, int, int], _Seen],
    ) -> None:
        self.rank, self.machine, self.shift, self.seen = rank, machine, shift, seen
        self.spans: list[Span] = []
        self.runs: list[LocalRun] = []
        for run, (plan, graph, times, flights) in enumerate(log["passes"]):
            self._run(run, plan, graph, log["calls"][plan, graph], times, flights)
        for begin, end in log["optimizer"]:
            self._span(-1, -1, "optimizer", "optimizer's step", begin, end)
        for count, (begin, end) in enumerate(log["shares"]):
            self._span(-1, -1, "wait", IDLE_RESULTS, begin, end)
            collective = seen.setdefault((-1, count, EVERYWHERE), _Seen(IDLE_RESULTS, -1))
            collective.issued[rank], collective.completed[rank] = self._seconds(begin), self._seconds(end)

    def _seconds(self, nanoseconds: int) -> float:
        return (nanoseconds + self.shift) / 1e9

    def _span(self, plan: int, run: int, what: What, name: str, begin: int, end: int) -> None:
        self.spans.append(Span(self.rank, plan, run, what, name, self._seconds(begin), self._seconds(end)))

    def _run(
        self,
        run: int,
        plan: int,
        graph: str,
        calls: Sequence[GraphCall],
        times: Sequence[int],
        flights: Sequence[tuple[int, Sequence[int]]],
    ) -> None:
        self.runs.append(
            LocalRun(self.rank, plan, run, graph, self._seconds(times[0]), self._seconds(times[-1]))
        )
        for call, (begin, end) in zip(calls, pairwise(times), strict=True):
            if call.what == "wait":
                self._wait(run, plan, call, flights[call.transfer], begin, end)
                continue
            name = f"issue {call.name}" if call.what == "issue" else call.name
            self._span(plan, run, call.what, name, begin, end)
            if call.what == "issue" and flights[call.transfer][0]:
                collective = self.seen.setdefault(self._key(run, call), _Seen(call.name, plan))
                collective.issued[self.rank] = self._seconds(end)

    def _key(self, run: int, call: GraphCall) -> tuple[int, int, int]:
        """Ranks tell of the same collective under the same key."""
        return run, call.transfer, self.machine if call.inside else EVERYWHERE

    def _wait(
        self, run: int, plan: int, call: GraphCall, flight: tuple[int, Sequence[int]], begin: int, end: int
    ) -> None:
        """Blocked until the collective is complete; then its result is unpacked."""
        primitives, done = flight
        until = begin
        if primitives:
            complete = min(max(done), end) if len(done) == primitives else end
            until = max(begin, complete)
            collective = self.seen[self._key(run, call)]
            collective.completed.setdefault(self.rank, self._seconds(complete))
        if until > begin:
            self._span(plan, run, "wait", call.name, begin, until)
        if end > until:
            self._span(plan, run, "local", f"unpack {call.name}", until, end)


def _carried(seen: Mapping[tuple[int, int, int], _Seen], world: int) -> tuple[MeasuredCollective, ...]:
    free = [float("-inf")] * world
    collectives = []
    for (run, *_), one in sorted(seen.items(), key=lambda item: max(item[1].issued.values())):
        ready = max(one.issued.values())
        streams = {}
        for rank, completed in sorted(one.completed.items()):
            start = max(ready, free[rank])
            free[rank] = max(start, completed)
            streams[rank] = (start, free[rank])
        collectives.append(MeasuredCollective(one.name, one.plan, run, one.issued, one.completed, streams))
    return tuple(collectives)
