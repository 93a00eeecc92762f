"""Communicators: the few equal-size primitives from which :mod:`hetspmd.run.collectives` is built.

Every primitive takes flat, contiguous buffers, returns at once, and is finished by ``Work.wait``. All ranks
issue the same primitives in the same order; the caller leaves the buffers untouched until ``wait`` returns, and
the work keeps alive those that its primitive needs. There are two implementations:
:class:`ProcessGroupCommunicator` over ``torch.distributed`` (gloo or NCCL, whichever the group has) and
:class:`~hetspmd.run.simulate.SimulatedCommunicator` for all ranks as threads of one process.

So that memory follows completion and not the wait for the result, a communicator remembers what is in flight;
:meth:`Communicator.settle` lets go of what has completed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from functools import cached_property
from typing import Any, Protocol

import torch
import torch.distributed as dist


class Work(Protocol):
    """A primitive that was issued. On a GPU ``wait`` makes the current stream wait, not the host."""

    def wait(self) -> object:
        """Return once the output buffer may be used. Raises if the primitive failed."""

    def is_completed(self) -> bool:
        """Whether ``wait`` would return or raise at once. On a GPU: whether the primitive has run, so that no
        stream touches the buffers any more. Never blocks."""


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


class ProcessGroupCommunicator(Communicator):
    """The ranks of a ``torch.distributed`` process group (None: the default group)."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        self.rank = dist.get_rank(group)
        self.world = dist.get_world_size(group)

    def all_reduce(self, buffer: torch.Tensor) -> Work:
        return _issued(dist.all_reduce(buffer, group=self.group, async_op=True), buffer)

    def reduce(self, buffer: torch.Tensor, root: int) -> Work:
        return _issued(dist.reduce(buffer, group=self.group, async_op=True, group_dst=root), buffer)

    def reduce_scatter(self, output: torch.Tensor, buffer: torch.Tensor, *, spare: bool = False) -> Work:
        if buffer.device.type == "cpu":
            # gloo's own is an all-reduce of a copy too, with the same bits, but completes, and frees the copy, only
            # in wait.
            total = buffer if spare else buffer.clone()
            part = total.chunk(self.world)[self.rank]
            return _CopiedWork(self.all_reduce(total), output, part)
        return _issued(
            dist.reduce_scatter_tensor(output, buffer, group=self.group, async_op=True), output, buffer
        )

    def all_gather(self, output: torch.Tensor, buffer: torch.Tensor) -> Work:
        work = dist.all_gather_into_tensor(output, buffer, group=self.group, async_op=True)
        return _issued(work, output, buffer)

    def broadcast(self, buffer: torch.Tensor, root: int) -> Work:
        return _issued(dist.broadcast(buffer, group=self.group, async_op=True, group_src=root), buffer)

    def all_to_all(
        self, output: torch.Tensor, buffer: torch.Tensor, output_splits: Sequence[int], splits: Sequence[int]
    ) -> Work:
        work = dist.all_to_all_single(
            output, buffer, list(output_splits), list(splits), group=self.group, async_op=True
        )
        return _issued(work, output, buffer)

    def exchange(self, value: Any) -> list[Any]:
        found: list[Any] = [None] * self.world
        dist.all_gather_object(found, value, group=self.group)
        return found

    def _part(self, ranks: Sequence[int]) -> Communicator:
        # torch names a group by its ranks and by how many groups this process has made: every rank makes one
        # here, so that the numbers stay equal, even where it is alone in it.
        every = dist.get_process_group_ranks(self.group)
        made = dist.new_group(
            [every[r] for r in ranks], backend=dist.get_backend(self.group), use_local_synchronization=True
        )
        assert isinstance(made, dist.ProcessGroup)
        return ProcessGroupCommunicator(made)


class _IssuedWork:
    """c10d's work, with the buffers that must outlive it: on a GPU another stream than the one that allocated
    them uses them, and the allocator does not know."""

    __slots__ = ("_buffers", "_work")

    def __init__(self, work: Any, buffers: tuple[torch.Tensor, ...]) -> None:
        self._work, self._buffers = work, buffers

    def wait(self) -> object:
        return self._work.wait()

    def is_completed(self) -> bool:
        return bool(self._work.is_completed())


class _CopiedWork:
    """Work whose result, a part of its buffer, is copied to ``output``."""

    __slots__ = ("_output", "_part", "_work")

    def __init__(self, work: Work, output: torch.Tensor, part: torch.Tensor) -> None:
        self._work, self._output, self._part = work, output, part

    def wait(self) -> object:
        self._work.wait()
        self._output.copy_(self._part)
        return None

    def is_completed(self) -> bool:
        return self._work.is_completed()


def _issued(work: Any, *buffers: torch.Tensor) -> Work:
    """c10d returns None for a collective that needs no waiting."""
    return DoneWork() if work is None else _IssuedWork(work, buffers)


def communicator_for(group: dist.ProcessGroup | None, devices: int) -> Communicator:
    """The communicator of a group that must have ``devices`` ranks.

    Without a group and without an initialised default group the world has one rank. Raises WorldSizeError
    if the sizes differ.
    """
    from hetspmd.errors import WorldSizeError

    ready = dist.is_available() and dist.is_initialized()
    world = dist.get_world_size(group) if ready else 1
    if world != devices:
        hint = (
            f"start {devices} processes (torchrun --nproc-per-node) or give a cluster of {world}"
            if ready
            else f"call torch.distributed.init_process_group in each of {devices} processes first"
        )
        raise WorldSizeError(f"the cluster has {devices} devices, the process group {world}: {hint}")
    if ready and world > 1:
        return ProcessGroupCommunicator(group)
    return LoneCommunicator()
