"""Times inside a local graph: a copy of it that reads the clock between its instructions.

The copy computes what the original does, in the same order, and lets go of values at the same places; behind each
of its n calls stands one reading of the clock, so that n + 1 readings bound them, and a call's time is that
between two. Freeing what a call was the last to read is within its time. The original graph is left alone, so that
nothing is paid when nothing is recorded.

A collective completes in another thread. On the CPU the backend tells when (a callback), or, if it cannot, it is
looked at behind each call; on a GPU it counts as complete when the wait for it has ended. One between machines is
that of their first accelerators: what goes on inside a machine before it is part of issuing it, what goes on after
it of unpacking its result; for the other accelerators it is complete when they have their part.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import fx

from hetspmd.dist.coalesced import PendingBucket
from hetspmd.dist.communicator import DoneWork, Work
from hetspmd.dist.machine_levels import PendingAcross
from hetspmd.dist.process_group import CopiedWork, IssuedWork
from hetspmd.lower import calls
from hetspmd.lower.emit import ALSO
from hetspmd.lower.instrument import instrumented
from hetspmd.program.buckets import Bucket, transfer_text
from hetspmd.program.levels import Across, InsideCollective, Together, Transfer, between, within
from hetspmd.program.program import Communicate
from hetspmd.trace.graph import Graph

if TYPE_CHECKING:
    from collections.abc import Sequence

What = Literal["instruction", "local", "issue", "wait", "optimizer"]
"""What a rank's thread does: an instruction of the program; slices and copies, of which the cost model knows
nothing; issuing a collective; waiting for one; the optimizer's step."""


class HostClock:
    """``time.monotonic``, in nanoseconds: one clock for all processes of a machine."""

    def now(self) -> int:
        return time.monotonic_ns()

    def nanoseconds(self, readings: Sequence[Any]) -> list[int]:
        """The readings on the host's clock."""
        return list(readings)


class CudaClock:
    """Events on the current stream of a GPU, brought to the host's clock. Written by the documentation of
    ``torch.cuda.Event``; it has never run on a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        torch.cuda.synchronize(device)
        self._began = time.monotonic_ns()
        self._base = self.now()

    def now(self) -> torch.cuda.Event:
        event: torch.cuda.Event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch has no types there
        event.record(torch.cuda.current_stream(self._device))
        return event

    def nanoseconds(self, readings: Sequence[Any]) -> list[int]:
        """The readings on the host's clock, with the resolution of events (about half a microsecond)."""
        torch.cuda.synchronize(self._device)
        return [self._began + round(1e6 * self._base.elapsed_time(event)) for event in readings]


Clock = HostClock | CudaClock


def clock_of(device: torch.device) -> Clock:
    """The clock by which work on ``device`` is timed."""
    return CudaClock(device) if device.type == "cuda" else HostClock()


@dataclass(frozen=True, slots=True)
class GraphCall:
    """A call of a local graph: ``transfer`` counts the graph's collectives, for issues and waits; ``inside``: of
    the accelerators of one machine."""

    what: What
    name: str
    transfer: int = -1
    inside: bool = False


@dataclass(slots=True)
class Flight:
    """A collective on its way. ``primitives`` are sent for it (0: nothing is); ``done`` holds when each of them was
    complete."""

    primitives: int
    done: list[Any] = field(default_factory=list)


@dataclass(slots=True)
class GraphRun:
    """One run of a local graph: the readings of the clock, and its collectives in order."""

    timestamps: Timestamps
    times: list[Any]
    flights: list[Flight] = field(default_factory=list)


class Timestamps:
    """What the copy of a graph calls. ``calls`` are its calls in order; each finished run goes to ``keep``."""

    def __init__(self, clock: Clock, plan: int, keep: Callable[[GraphRun], None]) -> None:
        self.calls: list[GraphCall] = []
        self.plan = plan
        self._clock, self._keep = clock, keep
        self._now: Callable[[], Any] = clock.now
        self._pass = GraphRun(self, [])
        self._watched: list[tuple[Work, Flight]] = []

    def begin(self) -> None:
        """The first reading of a run."""
        self._watched.clear()
        self._pass = GraphRun(self, [self._now()])

    def stamp(self) -> None:
        """Behind a call."""
        if self._watched:
            self._look()
        self._pass.times.append(self._now())

    def issued(self, pending: Any) -> None:
        """Behind the start of a collective."""
        inner: Any = pending.pending if isinstance(pending, PendingBucket) else pending
        if isinstance(inner, PendingAcross):
            inner = inner.carried
        works = [] if inner is None else [w for w in inner._works if not isinstance(w, DoneWork)]
        flight = Flight(1 if inner is None else len(works))
        self._pass.flights.append(flight)
        if isinstance(self._clock, HostClock):
            for work in works:
                future = _future(work)
                if future is None:
                    self._watched.append((work, flight))
                else:
                    future.add_done_callback(lambda _, done=flight.done, now=self._now: done.append(now()))
        self.stamp()

    def end(self) -> None:
        """Behind the last call."""
        self._watched.clear()
        self._keep(self._pass)

    def _look(self) -> None:
        now, waiting = self._now(), []
        for work, flight in self._watched:
            if work.is_completed():
                flight.done.append(now)
            else:
                waiting.append((work, flight))
        self._watched = waiting


def _future(work: Any) -> Any:
    """c10d's future of a primitive, None if the backend has none."""
    while isinstance(work, (IssuedWork, CopiedWork)):
        work = work._work
    try:
        return work.get_future()
    except (AttributeError, RuntimeError):
        return None


def timestamped(module: fx.GraphModule, timestamps: Timestamps, graph: Graph) -> fx.GraphModule:
    """The copy of a local graph of ``graph``, with those of its turns; ``timestamps.calls`` is set."""
    order: dict[fx.Node, int] = {}
    in_turns = any(node.op == "call_module" for node in module.graph.nodes)

    def behind(
        graph_copy: fx.Graph, reader: fx.Node, node: fx.Node, copied: Callable[[fx.Node], fx.Node]
    ) -> None:
        if node.op == "call_module":  # its own calls have their times
            return
        call = _call(node, order, graph, in_turns)
        timestamps.calls.append(call)
        if call.what == "issue":
            graph_copy.call_method("issued", (reader, copied(node)))
        else:
            graph_copy.call_method("stamp", (reader,))
        for other in node.meta.get(ALSO, ()):  # done by the same call: no time of its own
            timestamps.calls.append(GraphCall("instruction", graph.instructions[other].name))
            graph_copy.call_method("stamp", (reader,))

    return instrumented(module, timestamps, f"Recorded{type(module).__name__}", behind, ends=("begin", "end"))


def _call(node: fx.Node, order: dict[fx.Node, int], graph: Graph, in_turns: bool) -> GraphCall:
    if (instruction := node.meta.get("instruction")) is not None:
        return GraphCall("instruction", graph.instructions[instruction].name)
    if (step := node.meta.get("transfer")) is not None:
        order[node] = len(order)
        return GraphCall("issue", *_transfer(step, graph, in_turns, order[node]))
    if node.target in (calls.wait, calls.take):
        (pending, *_) = node.args
        assert isinstance(pending, fx.Node)
        return GraphCall("wait", *_transfer(pending.meta["transfer"], graph, in_turns, order[pending]))
    return GraphCall("local", node.name)


def _transfer(step: Transfer, graph: Graph, in_turns: bool, number: int) -> tuple[str, int, bool]:
    """A collective's name, its number, and whether it is one of the accelerators of a machine. In a turn of two
    levels the outer one is time: its collectives are those of all devices."""
    if in_turns and not isinstance(step, (Communicate, Bucket)):
        members = within(step)
        if members and all(m.time is None for m in members):
            step = _of_devices(step, members)
    inside = not isinstance(step, (Communicate, Bucket)) and bool(within(step))
    return transfer_name(step, graph), number, inside


def transfer_name(step: Transfer, graph: Graph) -> str:
    """As the simulated timeline calls a collective; it knows of none inside a machine."""
    names = [t.name for t in graph.tensors]
    if isinstance(step, (Communicate, Bucket)):
        return transfer_text(step, names)
    text = transfer_text(_of_devices(step, between(step) or within(step)), names)
    return text.replace("(", " inside(", 1) if within(step) else text


def _of_devices(
    step: InsideCollective | Across | Together, members: Sequence[InsideCollective | Across]
) -> Communicate | Bucket:
    """What these members of a step on two levels are on one."""
    moves = tuple(Communicate(m.tensor, m.kind, m.source, m.target) for m in members)
    return Bucket(moves) if isinstance(step, Together) else moves[0]


def offsets(of_all: Sequence[Mapping[str, Any]]) -> Iterator[tuple[int, int]]:
    """For each rank (nanoseconds that its clock is behind rank 0's, half of how far that may be wrong).

    Each mapping holds the ``machine`` and, per round in which every rank told something to every other, when
    it ``began`` and ``ended``. No rank can end a round before all have begun it, so for clocks that are o behind

        began_0 <= ended + o   and   began + o <= ended_0

    in every round; the offset is the middle of what all rounds leave. Ranks on one machine share a clock, unless
    the rounds contradict it.
    """
    first = of_all[0]
    for other in of_all:
        low = max(b - e for b, e in zip(first["began"], other["ended"], strict=True))
        high = min(e - b for b, e in zip(other["began"], first["ended"], strict=True))
        one = other["machine"] != "" and other["machine"] == first["machine"]
        yield (0, 0) if one and low <= 0 <= high else ((low + high) // 2, max(0, high - low) // 2)
