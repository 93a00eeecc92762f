"""All ranks of a program in one process: one thread per rank, collectives by rendezvous.

A primitive deposits its buffers under its sequence number; the first rank that waits once all have deposited
computes every rank's result, sums in rank order, so that a simulation gives the same bits in every run.
Ranks whose primitives differ (in kind, sizes, dtype or root) get a CollectiveMismatchError, and so does a
rank that waits for one that has finished; an exception on one rank stops the others. Ranks may form
subgroups, with rendezvous of their own; ranks that wait for each other in different groups get the same error.
Nothing can hang.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch

from hetspmd.errors import CollectiveMismatchError
from hetspmd.dist.communicator import Communicator, Work
from hetspmd.dist.roll import Roll
from hetspmd.dist.simulated_channel import SimulatedChannel

T = TypeVar("T")

Delay = Callable[[int, int], float]
"""(rank, sequence number) to seconds; injected before each deposit in tests."""


class SimulationAbortedError(CollectiveMismatchError):
    """This rank was stopped because another one failed; that one's error is what is reported."""


@dataclass
class _Slot:
    """One primitive of all ranks."""

    signature: tuple[Any, ...]
    deposits: dict[int, Any] = field(default_factory=dict)
    results: list[Any] | None = None
    taken: int = 0


@dataclass
class _Shared:
    """What a world and its subgroups have in common.

    ``waiting``: what each rank of the world waits for; ``done``: the ranks that issue nothing more, anywhere;
    ``looks``: what a rank does that waits and is woken; ``places``: what says where it is.
    """

    condition: threading.Condition = field(default_factory=threading.Condition)
    failure: BaseException | None = None
    waiting: dict[int, tuple[SimulatedWorld, _Slot]] = field(default_factory=dict)
    done: set[int] = field(default_factory=set)
    looks: dict[int, Callable[[], None]] = field(default_factory=dict)
    places: dict[int, Callable[[], str]] = field(default_factory=dict)


class SimulatedWorld:
    """The meeting place of ``world`` simulated ranks.

    ``members`` are their ranks in the world that this is a subgroup of.
    """

    def __init__(
        self,
        world: int,
        delay: Delay | None = None,
        *,
        members: Sequence[int] | None = None,
        shared: _Shared | None = None,
    ) -> None:
        self.world = world
        self.delay = delay
        self.members = tuple(range(world) if members is None else members)
        self._shared = _Shared() if shared is None else shared
        self._condition = self._shared.condition
        self._slots: dict[int, _Slot] = {}
        self._finished: dict[int, int] = {}
        self._parts: dict[tuple[tuple[int, ...], int], SimulatedWorld] = {}
        self.rolls: dict[int, Roll] = {}

    def part(self, ranks: Sequence[int], count: int) -> SimulatedWorld:
        """The subgroup of these ranks that each of them asks for as its ``count``-th of them."""
        key = (tuple(ranks), count)
        with self._condition:
            if key not in self._parts:
                members = [self.members[r] for r in ranks]
                self._parts[key] = SimulatedWorld(len(members), members=members, shared=self._shared)
            return self._parts[key]

    def fail(self, error: BaseException) -> None:
        """Stop all ranks; the first error is kept."""
        with self._condition:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        if self._shared.failure is None:
            self._shared.failure = error
        self._condition.notify_all()

    def leave(self, rank: int) -> None:
        """A rank is done, here and in all subgroups."""
        with self._condition:
            self._shared.done.add(rank)
            self._condition.notify_all()

    def finish(self, rank: int, count: int) -> None:
        """A rank is done after ``count`` primitives."""
        with self._condition:
            self._finished[rank] = count
            self._condition.notify_all()

    def look_with(self, rank: int, look: Callable[[], None], place: Callable[[], str]) -> None:
        """Have ``look`` called where a rank of this world waits and is woken; ``place`` says where it is."""
        self._shared.looks[self.members[rank]] = look
        self._shared.places[self.members[rank]] = place

    def _places(self) -> str:
        places = [f"rank {r} in {place()}" for r, place in sorted(self._shared.places.items())]
        return f" (last: {', '.join(places)})" if places else ""

    @property
    def failure(self) -> BaseException | None:
        """The first error of any rank."""
        return self._shared.failure

    def deposit(self, rank: int, number: int, signature: tuple[Any, ...], value: Any) -> None:
        """Take part in primitive ``number``."""
        if self.delay is not None:
            time.sleep(self.delay(rank, number))
        with self._condition:
            self._check()
            slot = self._slots.setdefault(number, _Slot(signature))
            if slot.signature != signature:
                other = min(slot.deposits)
                error = CollectiveMismatchError(
                    f"collective {number}: rank {other} issued {slot.signature}, rank {rank} {signature}; "
                    "the ranks do not run the same program"
                )
                self._fail(error)
                raise error
            slot.deposits[rank] = value
            self._condition.notify_all()

    def collect(self, rank: int, number: int, combine: Callable[[list[Any]], list[Any]]) -> Any:
        """Wait for all deposits of primitive ``number``; this rank's share of ``combine(deposits)``."""
        with self._condition:
            slot = self._slots[number]
            while len(slot.deposits) < self.world:
                self._shared.looks.get(self.members[rank], _nothing)()
                self._check()
                for other in range(self.world):
                    if other not in slot.deposits and self._finished.get(other, number + 1) <= number:
                        error = CollectiveMismatchError(
                            f"rank {rank} waits in collective {number} {slot.signature}, but rank {other} "
                            f"has finished after {number}; the ranks do not run the same program{self._places()}"
                        )
                        self._fail(error)
                        raise error
                self._shared.waiting[self.members[rank]] = (self, slot)
                if self._hopeless(self.members[rank]):
                    error = CollectiveMismatchError(
                        f"rank {rank} waits in collective {number} {slot.signature} for ranks that have left or "
                        f"wait for it in another group; the ranks do not run the same program{self._places()}"
                    )
                    self._fail(error)
                    raise error
                self._condition.wait()
            self._shared.waiting.pop(self.members[rank], None)
            self._check()
            if slot.results is None:
                slot.results = combine([slot.deposits[r] for r in range(self.world)])
                slot.deposits = dict.fromkeys(slot.deposits)
            result = slot.results[rank]
            slot.results[rank] = None
            slot.taken += 1
            if slot.taken == self.world:
                del self._slots[number]
            return result

    def ready(self, number: int) -> bool:
        """Whether all ranks have taken part in primitive ``number``, so that to collect it takes no waiting."""
        with self._condition:
            slot = self._slots.get(number)
            return self._shared.failure is None and slot is not None and len(slot.deposits) == self.world

    def _hopeless(self, start: int) -> bool:
        """Whether a rank waits for itself, by way of others, or for one that has left."""
        ranks: set[int] = set()
        ahead = [start]
        while ahead:
            place = self._shared.waiting.get(ahead.pop())
            if place is None:
                continue
            world, slot = place
            missing = {world.members[r] for r in range(world.world) if r not in slot.deposits}
            if start in missing or missing & self._shared.done:
                return True
            ahead += sorted(missing - ranks)
            ranks |= missing
        return False

    def _check(self) -> None:
        failure = self._shared.failure
        if failure is not None:
            raise SimulationAbortedError(f"another rank failed: {failure}") from failure


class _SimulatedWork(Generic[T]):
    def __init__(
        self, collect: Callable[[], torch.Tensor | None], ready: Callable[[], bool], output: torch.Tensor
    ) -> None:
        self._collect, self._ready, self._output = collect, ready, output

    def wait(self) -> object:
        result = self._collect()
        if result is not None:
            self._output.copy_(result)
        return None

    def is_completed(self) -> bool:
        return self._ready()


class SimulatedCommunicator(Communicator):
    """One rank of a :class:`SimulatedWorld`."""

    def __init__(self, meeting: SimulatedWorld, rank: int) -> None:
        self.meeting = meeting
        self.rank = rank
        self.world = meeting.world
        self.count = 0
        self._parts: list[tuple[tuple[int, ...], SimulatedCommunicator]] = []

    def _part(self, ranks: Sequence[int]) -> Communicator:
        key = tuple(ranks)
        count = sum(members == key for members, _ in self._parts)
        part = type(self)(self.meeting.part(key, count), key.index(self.rank))
        self._parts.append((key, part))
        return part

    def roll(self) -> Roll:
        rolls = self.meeting.rolls
        if self.rank not in rolls:
            part = self._part(range(self.world))
            assert isinstance(part, SimulatedCommunicator)
            rolls[self.rank] = Roll(SimulatedChannel(part))
        return rolls[self.rank]

    def finish(self) -> None:
        """This rank issues nothing more, here and in its subgroups."""
        self.meeting.finish(self.rank, self.count)
        for _, part in self._parts:
            part.finish()

    def _issue(
        self,
        kind: tuple[Any, ...],
        output: torch.Tensor,
        value: Any,
        combine: Callable[[list[Any]], list[Any]],
    ) -> Work:
        number, self.count = self.count, self.count + 1
        self.meeting.deposit(self.rank, number, kind, value)
        return _SimulatedWork(
            lambda: self.meeting.collect(self.rank, number, combine),
            lambda: self.meeting.ready(number),
            output,
        )

    def all_reduce(self, buffer: torch.Tensor) -> Work:
        kind = ("all_reduce", buffer.numel(), buffer.dtype)
        return self._issue(kind, buffer, buffer, lambda parts: [_sum(parts)] * self.world)

    def reduce(self, buffer: torch.Tensor, root: int) -> Work:
        kind = ("reduce", buffer.numel(), buffer.dtype, root)
        return self._issue(
            kind,
            buffer,
            buffer,
            lambda parts: [_sum(parts) if r == root else None for r in range(self.world)],
        )

    def reduce_scatter(self, output: torch.Tensor, buffer: torch.Tensor, *, spare: bool = False) -> Work:
        kind = ("reduce_scatter", output.numel(), buffer.numel(), buffer.dtype)
        return self._issue(kind, output, buffer, lambda parts: list(_sum(parts).chunk(self.world)))

    def all_gather(self, output: torch.Tensor, buffer: torch.Tensor) -> Work:
        kind = ("all_gather", output.numel(), buffer.numel(), buffer.dtype)
        return self._issue(kind, output, buffer, lambda parts: [torch.cat(parts)] * self.world)

    def broadcast(self, buffer: torch.Tensor, root: int) -> Work:
        kind = ("broadcast", buffer.numel(), buffer.dtype, root)

        def combine(parts: list[torch.Tensor]) -> list[torch.Tensor | None]:
            value = parts[root].clone()
            return [None if r == root else value for r in range(self.world)]

        return self._issue(kind, buffer, buffer, combine)

    def all_to_all(
        self, output: torch.Tensor, buffer: torch.Tensor, output_splits: Sequence[int], splits: Sequence[int]
    ) -> Work:
        def combine(parts: list[tuple[torch.Tensor, list[int], list[int]]]) -> list[torch.Tensor]:
            rows = [torch.split(sent, sizes) for sent, sizes, _ in parts]
            for r, (_, _, wanted) in enumerate(parts):
                came = [rows[s][r].numel() for s in range(self.world)]
                if came != wanted:
                    raise CollectiveMismatchError(
                        f"all_to_all: rank {r} expects {wanted} elements, gets {came}"
                    )
            return [torch.cat([rows[s][r] for s in range(self.world)]) for r in range(self.world)]

        value = (buffer, list(splits), list(output_splits))
        return self._issue(("all_to_all", buffer.dtype), output, value, combine)

    def exchange(self, value: Any) -> list[Any]:
        return self.collect_values(self.issue_value(("exchange",), value))

    def issue_value(self, kind: tuple[Any, ...], value: Any) -> int:
        """Give the others a value; the number under which theirs are to be had."""
        number, self.count = self.count, self.count + 1
        self.meeting.deposit(self.rank, number, kind, value)
        return number

    def collect_values(self, number: int) -> list[Any]:
        """Wait for the values of all ranks."""
        return list(self.meeting.collect(self.rank, number, lambda values: [values] * self.world))


def _nothing() -> None:
    return None


def _sum(parts: list[torch.Tensor]) -> torch.Tensor:
    """The sum in rank order."""
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total


def run_ranks(world: int, function: Callable[[Communicator], T], *, delay: Delay | None = None) -> list[T]:
    """Run ``function`` once per rank, each on its thread with its communicator; the results by rank.

    The first error of any rank is raised after all have stopped. Grad mode is per thread: functions start
    with gradients enabled.
    """
    meeting = SimulatedWorld(world, delay)
    results: list[Any] = [None] * world

    def body(rank: int) -> None:
        communicator = SimulatedCommunicator(meeting, rank)
        try:
            results[rank] = function(communicator)
        except SimulationAbortedError:
            pass
        except BaseException as error:
            meeting.fail(error)
        finally:
            communicator.finish()
            meeting.leave(rank)

    threads = [threading.Thread(target=body, args=(rank,), name=f"rank {rank}") for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if meeting.failure is not None:
        raise meeting.failure
    return results
