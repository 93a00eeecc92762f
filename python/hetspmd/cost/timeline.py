"""Who computes, communicates and waits when: the simulation of :mod:`hetspmd.cost.simulator`, accounted for.

While a device waits, either a collective is being carried out, or the stream stands idle because the next
collective lacks a device that still computes. The first is time exposed to communication, the second time
lost to that device (imbalance). So for each device j

    end_j = compute_j + exposed_j + sum over k of waits_for_jk
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Final, Literal

import numpy as np

import hetspmd
from hetspmd.cluster.cluster import Cluster
from hetspmd.codec.files import write_output
from hetspmd.cost.model import Array
from hetspmd.cost.simulated_run import START, WAIT, WAIT_FIRST, SimulatedRun, waited
from hetspmd.cost.simulator import TwoStreams
from hetspmd.cost.step import StepModel
from hetspmd.program.buckets import Bucket, transfer_text
from hetspmd.program.lengths import Lengths
from hetspmd.program.program import Communicate
from hetspmd.trace.graph import Graph

if TYPE_CHECKING:
    import os

Stream = Literal["compute", "waiting", "communication"]

IDLE_RESULTS: Final = "Broadcast(results to idle devices)"


@dataclass(frozen=True, slots=True)
class Event:
    """What a device does from ``start`` to ``end`` (seconds from the step's beginning).

    ``device`` is a rank of the cluster; ``name`` the instruction on ``compute``, the collective on
    ``communication`` and on ``waiting``, which fills gaps of the compute stream; ``turn`` the device's micro-batch,
    from 0, of an instruction in the loop over them, else None.
    """

    device: int
    stream: Stream
    name: str
    start: float
    end: float
    turn: int | None = None


@dataclass(frozen=True, slots=True)
class Transfer:
    """A collective on the shared stream, from ``start`` to ``end`` seconds.

    issued   seconds at which the first device issued it
    ready    seconds at which the last one did, rank ``last`` of the cluster (the lowest of equals)
    waited   seconds that devices wait for it, summed over them
    step     None for what idle devices are sent
    """

    name: str
    step: Communicate | Bucket | None
    issued: float
    ready: float
    last: int
    start: float
    end: float
    waited: float


@dataclass(frozen=True)
class Timeline:
    """When each device computes, communicates and waits in one training step.

    devices                names of the cluster's devices, in rank order
    active                 ranks that run the program
    step_seconds           until the last device has finished
    forward_seconds        until the last device may begin backward
    stage_seconds          the stage model's prediction: no overlap
    communication_seconds  in which the communication stream is busy, alike on every active device
    compute_seconds        per device of the cluster, as all below, issuing collectives included; 0 for an idle one
    waiting_seconds        blocked by collectives: ``exposed_seconds`` + the row of ``waits_for``
    exposed_seconds        waiting while a collective is being carried out
    waits_for              [j][k]: device j waits and nothing is carried out, because device k, the last to
                           issue the next collective, still computes
    end_seconds            when it has finished: ``compute_seconds + waiting_seconds``
    transfers              the collectives in the order of the stream

    Up to rounding. The optimizer's step stands at the beginning, with the parameters that it has updated.
    """

    devices: tuple[str, ...]
    active: tuple[int, ...]
    step_seconds: float
    forward_seconds: float
    stage_seconds: float
    communication_seconds: float
    compute_seconds: tuple[float, ...]
    waiting_seconds: tuple[float, ...]
    exposed_seconds: tuple[float, ...]
    waits_for: tuple[tuple[float, ...], ...]
    end_seconds: tuple[float, ...]
    transfers: tuple[Transfer, ...]
    graph: Graph = field(repr=False, compare=False)
    _streams: TwoStreams = field(repr=False, compare=False)
    _run: SimulatedRun = field(repr=False, compare=False)

    @cached_property
    def events(self) -> tuple[Event, ...]:
        """All that takes time, by device, then stream, then start. Large: instructions times devices."""
        instructions = self.graph.instructions
        names = [instructions[i].name for i in self._streams.instructions]
        starts = self._compute_starts()
        waits = [
            (clock, what, self.transfers[c])
            for (_, what, c), clock in zip(self._streams.events, self._run.clocks, strict=True)
            if what in (WAIT, WAIT_FIRST) and not self._run.dropped[c]
        ]
        events: list[Event] = []
        for rank in range(len(self.devices)):
            if rank not in self.active:
                events += [
                    Event(rank, "communication", t.name, t.start, t.end)
                    for t in self.transfers
                    if t.step is None
                ]
                continue
            j = self.active.index(rank)
            seconds = self._run.seconds[:, j].tolist()
            turns = self._streams.turns_of(j)
            for name, start, length, turn in zip(names, starts[:, j].tolist(), seconds, turns, strict=True):
                if length > 0:
                    events.append(Event(rank, "compute", name, start, start + length, turn))
            for clock, what, t in waits:
                if t.end > clock[j] and (what == WAIT or j == 0):
                    events.append(Event(rank, "waiting", t.name, float(clock[j]), t.end))
            events += [Event(rank, "communication", t.name, t.start, t.end) for t in self.transfers]
        return tuple(events)

    def _compute_starts(self) -> Array:
        """When each computation begins on each active device, shape (computations, active)."""
        run, events = self._run, self._streams.events
        count = len(self._streams.instructions)
        before: Array = np.zeros((count + 1, len(self.active)))
        np.cumsum(run.seconds, axis=0, out=before[1:])
        starts: Array = np.zeros((count, len(self.active)))
        done, clock = 0, np.zeros(len(self.active))
        for event, ((at, what, collective), arrived) in enumerate(zip(events, run.clocks, strict=True)):
            if at != done:
                starts[done:at] = clock + (before[done:at] - before[done])
                done = at
            clock = arrived
            if what in (WAIT, WAIT_FIRST) and not run.dropped[collective]:
                clock = waited(what, clock, run.ends[collective])
            clock = clock + run.issued[event] if event in run.issued else clock
        starts[done:] = clock + (before[done:count] - before[done])
        return starts

    def text(self) -> str:
        """Who waits for whom, and how busy each device is, for people."""
        text: str = hetspmd.attached("timeline_text")(self)
        return text

    __str__ = text

    def to_chrome_trace(self) -> str:
        """The events as Chrome trace JSON, which https://ui.perfetto.dev and chrome://tracing show."""
        text: str = hetspmd.attached("timeline_trace")(self)
        return text

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write :meth:`to_chrome_trace` to a file, whole or not at all. Raises OutputError if it cannot."""
        write_output(self.to_chrome_trace(), path)


def timeline(
    step: StepModel,
    lengths: Lengths,
    cluster: Cluster | None = None,
    active: Sequence[int] | None = None,
) -> Timeline:
    """The simulation of one step at integer lengths.

    ``step`` is of the active devices; they are the ranks ``active`` of ``cluster`` (default: all of them). Raises
    ValueError for ranks that are not the step's.
    """
    model, streams = step.model, step.turn_by_turn
    graph = model.theory.graph
    cluster = model.cluster if cluster is None else cluster
    ranks = tuple(range(cluster.world) if active is None else active)
    if len(ranks) != model.world:
        raise ValueError(f"{len(ranks)} active devices and a cost model of {model.world}")
    shares = model.shares(lengths)
    run = streams.run(shares)
    transfers, exposed, waits = _transfers(streams, run, ranks)
    everyone = cluster.world
    place = np.array(ranks, dtype=np.int64)

    def spread(values: Array) -> tuple[float, ...]:
        per_device = np.zeros(everyone)
        per_device[place] = values
        return tuple(map(float, per_device))

    matrix = np.zeros((everyone, everyone))
    matrix[np.ix_(place, place)] = waits
    return Timeline(
        tuple(d.name for d in cluster.devices),
        ranks,
        float(run.final.max()),
        float(run.forward.max()),
        step.stages.seconds(shares) + step.idle,
        float(sum(t.end - t.start for t in transfers)),
        spread(run.seconds.sum(axis=0) + run.issuing),
        spread(exposed + waits.sum(axis=1)),
        spread(exposed),
        tuple(tuple(map(float, row)) for row in matrix),
        spread(run.final),
        transfers,
        graph,
        streams,
        run,
    )


def _transfers(
    streams: TwoStreams, run: SimulatedRun, ranks: tuple[int, ...]
) -> tuple[tuple[Transfer, ...], Array, Array]:
    """The collectives; per device the seconds that it waits while one is carried out; [j, k] the seconds that
    device j waits for device k.

    The stream's time is cut into segments: 2 c before collective c, where the last device to issue c computes
    (nothing can block it: all that was issued before has ended), and 2 c + 1, where c is carried out. A wait
    begins somewhere in a segment and ends with one.
    """
    n, count = len(ranks), len(run.ends)
    bounds = np.zeros(2 * count + 1)
    bounds[1::2], bounds[2::2] = run.starts, run.ends
    issued: list[Array] = [
        clock for (_, w, _), clock in zip(streams.events, run.clocks, strict=True) if w == START
    ]
    last = [int(clock.argmax()) for clock in issued]
    total = np.zeros(count)
    covered = np.zeros((n, 2 * count))
    whole = np.zeros((n, 2 * count + 1))
    for (_, what, c), clock in zip(streams.events, run.clocks, strict=True):
        if what not in (WAIT, WAIT_FIRST) or run.dropped[c]:
            continue
        blocked = np.flatnonzero(clock < run.ends[c])
        if what == WAIT_FIRST:
            blocked = blocked[blocked == 0]
        if len(blocked):
            begin = clock[blocked]
            segment = np.searchsorted(bounds, begin, side="right") - 1
            covered[blocked, segment] += bounds[segment + 1] - begin
            whole[blocked, segment + 1] += 1
            whole[blocked, 2 * c + 2] -= 1
            total[c] += float((run.ends[c] - begin).sum())
    covered += whole.cumsum(axis=1)[:, :-1] * np.diff(bounds)
    waits = np.zeros((n, n))
    np.add.at(waits.T, last, covered[:, 0::2].T)
    names = [t.name for t in streams.model.theory.graph.tensors]
    transfers = tuple(
        Transfer(
            IDLE_RESULTS if step is None else transfer_text(step, names),
            step,
            float(clock.min()),
            float(clock[k]),
            ranks[k],
            start,
            end,
            float(seconds),
        )
        for step, clock, k, start, end, seconds in zip(
            streams.collectives, issued, last, run.starts, run.ends, total, strict=True
        )
    )
    return transfers, covered[:, 1::2].sum(axis=1), waits
