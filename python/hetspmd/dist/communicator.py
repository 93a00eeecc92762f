"""Communicators: the few equal-size primitives from which :mod:`hetspmd.dist.collectives` is built.

Every primitive takes flat, contiguous buffers, returns at once, and is finished by ``Work.wait``. All ranks
issue the same primitives in the same order; the caller leaves the buffers untouched until ``wait`` returns, and
the work keeps alive those that its primitive needs. There are two implementations:
:class:`~hetspmd.dist.process_group.ProcessGroupCommunicator` over ``torch.distributed`` (gloo or NCCL, whichever the
group has) and :class:`~hetspmd.dist.simulated_world.SimulatedCommunicator` for all ranks as threads of one process.

So that memory follows completion and not the wait for the result, a communicator remembers what is in flight;
:meth:`Communicator.settle` lets go of what has completed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import Any, Protocol

import torch

from hetspmd.dist.roll import Roll


class Work(Protocol):
    """A primitive that was issued. On a GPU ``wait`` makes the current stream wait, not the host."""

    def wait(self) -> object:
        """Return once the output buffer may be used. Raises if the primitive failed."""

    def is_completed(self) -> bool:
        """Whether ``wait`` would return or raise at once. On a GPU: whether the primitive has run, so that no
        stream touches the buffers any more. Never blocks."""


class Member(Protocol):
    """What takes part in collectives: it has the communicator of its ranks."""

    communicator: Communicator


class InFlight(Protocol):
    """A collective, made of primitives, that was started."""

    def settle(self) -> bool:
        """Let go of what complete primitives needed; whether all of them are complete. Never blocks."""


class Communicator(ABC):
    """The ranks that run one program."""

    rank: int
    world: int

    @cached_property
    def in_flight(self) -> deque[InFlight]:
        """The collectives that were started and had not completed when last looked at, oldest first."""
        return deque()

    def settle(self) -> None:
        """Let go of what completed collectives needed, oldest first, up to one that is still on its way.

        Backends complete them nearly in the order in which they are issued, so that few beyond that one are
        missed, and each is looked at once more than it is found unfinished. Never blocks. Raises what a failed
        primitive raises; nothing is remembered then.
        """
        try:
            while self.in_flight and self.in_flight[0].settle():
                self.in_flight.popleft()
        except BaseException:
            self.in_flight.clear()
            raise

    def guard(self, timeout: float) -> None:  # noqa: B027  # most communicators need none
        """From now on give up a collective within ``timeout`` seconds, naming the rank that failed. All ranks call
        this. A simulation needs none."""

    def busy(self) -> AbstractContextManager[None]:
        """A context in which this rank may keep the others waiting for longer."""
        return nullcontext()

    def roll(self) -> Roll | None:
        """The roll call of the ranks, the same one at every call; None where there is none. All ranks call this."""
        return None

    def report(self, error: BaseException) -> None:  # noqa: B027  # most communicators tell by themselves
        """Tell the ranks that wait for this one that it has failed."""

    @abstractmethod
    def all_reduce(self, buffer: torch.Tensor) -> Work:
        """Sum ``buffer`` over the ranks, in place."""

    @abstractmethod
    def reduce(self, buffer: torch.Tensor, root: int) -> Work:
        """Sum ``buffer`` over the ranks into the root's; the others' content is undefined afterwards."""

    @abstractmethod
    def reduce_scatter(self, output: torch.Tensor, buffer: torch.Tensor, *, spare: bool = False) -> Work:
        """Sum ``buffer`` (world equal parts) over the ranks; ``output`` receives this rank's part.

        ``spare``: nobody else needs the buffer, which may be overwritten.
        """

    @abstractmethod
    def all_gather(self, output: torch.Tensor, buffer: torch.Tensor) -> Work:
        """Concatenate the ranks' equal ``buffer`` into ``output``."""

    @abstractmethod
    def broadcast(self, buffer: torch.Tensor, root: int) -> Work:
        """Overwrite ``buffer`` with the root's."""

    @abstractmethod
    def all_to_all(
        self, output: torch.Tensor, buffer: torch.Tensor, output_splits: Sequence[int], splits: Sequence[int]
    ) -> Work:
        """Send the i-th of the parts of sizes ``splits`` to rank i; ``output`` holds what came, by rank."""

    def ring_gather(self, parts: Sequence[torch.Tensor]) -> Work:
        """Fill ``parts[r]`` with rank r's, for every r; they may be of different sizes, or empty.

        This is a broadcast each, where a backend's broadcasts are pipelined, as NCCL's are.
        """
        return _Together([self.broadcast(part, root) for root, part in enumerate(parts) if part.numel()])

    def ring_reduce(self, parts: Sequence[torch.Tensor]) -> Work:
        """Sum each ``parts[r]`` over the ranks into rank r's; the others' content is undefined afterwards."""
        return _Together([self.reduce(part, root) for root, part in enumerate(parts) if part.numel()])

    @abstractmethod
    def exchange(self, value: Any) -> list[Any]:
        """Every rank's picklable ``value``, in rank order. Blocks."""

    def split(self, parts: Sequence[Sequence[int]]) -> Communicator:
        """The communicator of this rank's part, whose ranks are numbered from 0.

        ``parts`` holds every rank once, each part ascending. All ranks call this, with the same parts.
        """
        if len(parts) == 1:
            return self
        return self._part(next(p for p in parts if self.rank in p))

    @abstractmethod
    def _part(self, ranks: Sequence[int]) -> Communicator:
        """The communicator of ``ranks``, this one among them, while the other ranks make theirs."""


class DoneWork:
    """Work that is finished already."""

    def wait(self) -> object:
        return None

    def is_completed(self) -> bool:
        return True


class _Together:
    """Several primitives as one."""

    __slots__ = ("_works",)

    def __init__(self, works: Sequence[Work]) -> None:
        self._works = works

    def wait(self) -> object:
        for work in self._works:
            work.wait()
        return None

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)


class LoneCommunicator(Communicator):
    """A world of one device: needs no process group."""

    rank = 0
    world = 1

    def all_reduce(self, buffer: torch.Tensor) -> Work:
        return DoneWork()

    def reduce(self, buffer: torch.Tensor, root: int) -> Work:
        return DoneWork()

    def reduce_scatter(self, output: torch.Tensor, buffer: torch.Tensor, *, spare: bool = False) -> Work:
        output.copy_(buffer)
        return DoneWork()

    def all_gather(self, output: torch.Tensor, buffer: torch.Tensor) -> Work:
        output.copy_(buffer)
        return DoneWork()

    def broadcast(self, buffer: torch.Tensor, root: int) -> Work:
        return DoneWork()

    def all_to_all(
        self, output: torch.Tensor, buffer: torch.Tensor, output_splits: Sequence[int], splits: Sequence[int]
    ) -> Work:
        output.copy_(buffer)
        return DoneWork()

    def exchange(self, value: Any) -> list[Any]:
        return [value]

    def _part(self, ranks: Sequence[int]) -> Communicator:
        return self
