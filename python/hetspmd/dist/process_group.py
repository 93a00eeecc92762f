"""The primitives over ``torch.distributed``: gloo or NCCL, whichever a process group has."""

from __future__ import annotations

import atexit
import itertools
import pickle
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from datetime import timedelta
from functools import cached_property, partial
from typing import Any, Final

import torch
import torch.distributed as dist

from hetspmd.errors import RankFailedError, WorldSizeError
from hetspmd.dist.board import Board
from hetspmd.dist.board_channel import BoardChannel
from hetspmd.dist.communicator import Communicator, DoneWork, LoneCommunicator, Work
from hetspmd.dist.own_groups import close_links, close_own_links, destroy_groups, made_group, own_group
from hetspmd.dist.processes import this_process
from hetspmd.dist.ring import LANES, Carrier, Message, Ports, end_carriers, ring_gather, ring_reduce
from hetspmd.dist.roll import Roll, RollCall
from hetspmd.dist.staging import StagedCommunicator, copies_for
from hetspmd.dist.failure_detection import FailureDetector
from hetspmd.trace.compat.groups import forget_default_group, group_store, hosted_by_a_rank

_GUARDED = itertools.count()


class ProcessGroupCommunicator(Communicator):
    """The ranks of a ``torch.distributed`` process group (None: the default group)."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        self.rank = dist.get_rank(group)
        self.world = dist.get_world_size(group)
        self.watch: FailureDetector | None = None
        self._staging_of: dict[torch.device, Communicator] = {}
        _COMMUNICATORS.add(self)

    def release(self) -> None:
        """Let go of the group, for good."""
        self._staging_of.clear()
        for name in ("_lanes", "_staging_of_host"):
            self.__dict__.pop(name, None)
        self.group = None

    def guard(self, timeout: float) -> None:
        if (entry := _ROLLS.get(self._torch_group)) is not None:
            entry[0].meet(RollCall("HAP(...) or tune(...)"))
        # Counted by the ranks alike, so that notes of an earlier run on the same store are not read.
        number, name = next(_GUARDED), getattr(self.group, "group_name", "default")
        processes = self.exchange(this_process())
        store = group_store()
        ranks = dist.get_process_group_ranks(self.group)
        prefix = f"hetspmd/{name}/{self.exchange(number)[0]}"
        host = ranks.index(0) if 0 in ranks and hosted_by_a_rank(store) else None
        self.watch = FailureDetector(store, prefix, self.rank, processes, host, timeout)

    def roll(self) -> Roll | None:
        if not dist.is_gloo_available() or self.watch is None:
            return None
        group = self._torch_group
        entry = _ROLLS.get(group)
        if entry is None:
            ranks = dist.get_process_group_ranks(group)
            apart, board = ProcessGroupCommunicator(made_group(ranks, "gloo", _FOR_EVER)), self.watch.board
            notes = Board(board.store, f"{board.prefix}/roll", self.rank, self.world, _ANSWER)
            entry = _ROLLS[group] = Roll(BoardChannel(apart, notes, board.part("roll"))), apart
        roll, apart = entry
        apart.watch = self.watch
        self.watch.alarm, self.watch.place = roll.look, roll.place
        self.watch.stalled = roll.stalled
        return roll

    @property
    def _torch_group(self) -> dist.ProcessGroup:
        group = dist.group.WORLD if self.group is None else self.group
        assert group is not None
        return group

    def busy(self) -> AbstractContextManager[None]:
        return nullcontext() if self.watch is None else self.watch.busy()

    def report(self, error: BaseException) -> None:
        if self.watch is not None and not isinstance(error, RankFailedError):
            self.watch.note("raised", f"{type(error).__name__}: {error}".strip().split("\n")[0])

    def all_reduce(self, buffer: torch.Tensor) -> Work:
        if self._staged(buffer):
            return self._from_host(self._staging(buffer).all_reduce(buffer))
        return self._issued(dist.all_reduce(buffer, group=self.group, async_op=True), buffer)

    def reduce(self, buffer: torch.Tensor, root: int) -> Work:
        if self._staged(buffer):
            return self._from_host(self._staging(buffer).reduce(buffer, root))
        return self._issued(dist.reduce(buffer, group=self.group, async_op=True, group_dst=root), buffer)

    def reduce_scatter(self, output: torch.Tensor, buffer: torch.Tensor, *, spare: bool = False) -> Work:
        if self._staged(buffer):
            return self._from_host(self._staging(buffer).reduce_scatter(output, buffer, spare=spare))
        if buffer.device.type == "cpu":
            # gloo's own is an all-reduce of a copy too, with the same bits, but completes, and frees the copy, only
            # in wait.
            total = buffer if spare else buffer.clone()
            part = total.chunk(self.world)[self.rank]
            return CopiedWork(self.all_reduce(total), output, part)
        return self._issued(
            dist.reduce_scatter_tensor(output, buffer, group=self.group, async_op=True), output, buffer
        )

    def all_gather(self, output: torch.Tensor, buffer: torch.Tensor) -> Work:
        if self._staged(buffer):
            return self._from_host(self._staging(buffer).all_gather(output, buffer))
        work = dist.all_gather_into_tensor(output, buffer, group=self.group, async_op=True)
        return self._issued(work, output, buffer)

    def broadcast(self, buffer: torch.Tensor, root: int) -> Work:
        if self._staged(buffer):
            return self._from_host(self._staging(buffer).broadcast(buffer, root))
        return self._issued(dist.broadcast(buffer, group=self.group, async_op=True, group_src=root), buffer)

    def all_to_all(
        self, output: torch.Tensor, buffer: torch.Tensor, output_splits: Sequence[int], splits: Sequence[int]
    ) -> Work:
        if self._staged(buffer):
            return self._from_host(self._staging(buffer).all_to_all(output, buffer, output_splits, splits))
        work = dist.all_to_all_single(
            output, buffer, list(output_splits), list(splits), group=self.group, async_op=True
        )
        return self._issued(work, output, buffer)

    def ring_gather(self, parts: Sequence[torch.Tensor]) -> Work:
        if self._staged(parts[0]):
            return self._from_host(self._staging(parts[0]).ring_gather(parts))
        if not self._rings(parts[0]):
            return super().ring_gather(parts)
        return self._ring(ring_gather, parts)

    def ring_reduce(self, parts: Sequence[torch.Tensor]) -> Work:
        if self._staged(parts[0]):
            return self._from_host(self._staging(parts[0]).ring_reduce(parts))
        if not self._rings(parts[0]):
            return super().ring_reduce(parts)
        return self._ring(ring_reduce, parts)

    def _ring(
        self, run: Callable[[Ports, Sequence[torch.Tensor]], None], parts: Sequence[torch.Tensor]
    ) -> Work:
        """A ring in the next lane: all ranks issue their rings in the same order."""
        carrier, ports = next(self._lanes)
        return self._issued(carrier.carry(partial(run, ports, parts)), parts[0])

    def _rings(self, part: torch.Tensor) -> bool:
        """Whether rings are messages of this program; other backends' broadcasts and reduces are rings."""
        return part.device.type == "cpu" and dist.get_backend(self.group) == "gloo"

    def _staged(self, buffer: torch.Tensor) -> bool:
        """Whether the backend carries the host's tensors and this is none."""
        return buffer.device.type != "cpu" and dist.get_backend(self.group) == "gloo"

    def _from_host(self, work: Work) -> Work:
        """A staged primitive, watched as the host's are."""
        return IssuedWork(work, (), self.watch)

    def _staging(self, buffer: torch.Tensor) -> Communicator:
        """For tensors of a device. One thread sends those of all devices, in the order in which they are issued."""
        staging = self._staging_of.get(buffer.device)
        if staging is None:
            plain, carrier = self._staging_of_host
            staging = StagedCommunicator(plain, carrier, copies_for(buffer.device))
            self._staging_of[buffer.device] = staging
        return staging

    @cached_property
    def _staging_of_host(self) -> tuple[Communicator, Carrier]:
        return ProcessGroupCommunicator(self.group), Carrier(self._ports(0))

    @cached_property
    def _lanes(self) -> Iterator[tuple[Carrier, _Ports]]:
        lanes = [self._ports(tag) for tag in range(LANES)]
        return itertools.cycle([(Carrier(ports), ports) for ports in lanes])

    def _ports(self, tag: int) -> _Ports:
        return _Ports(self.group, self.rank, self.world, tag)

    def exchange(self, value: Any) -> list[Any]:
        if self.watch is None or dist.get_backend(self.group) != "gloo":
            values: list[Any] = [None] * self.world
            dist.all_gather_object(values, value, group=self.group)
            return values
        own = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        sizes = torch.empty(self.world, dtype=torch.int64)
        self.all_gather(sizes, torch.tensor([own.numel()])).wait()
        most = int(sizes.max())
        everything = torch.empty(self.world * most, dtype=torch.uint8)
        self.all_gather(everything, torch.cat((own, own.new_zeros(most - own.numel())))).wait()
        texts = zip(everything.view(self.world, most), sizes.tolist(), strict=True)
        return [pickle.loads(text[:size].numpy().tobytes()) for text, size in texts]

    def _part(self, ranks: Sequence[int]) -> Communicator:
        every = dist.get_process_group_ranks(self.group)
        part = ProcessGroupCommunicator(made_group([every[r] for r in ranks], dist.get_backend(self.group)))
        part.watch = self.watch
        return part

    def _issued(self, work: Any, *buffers: torch.Tensor) -> Work:
        """c10d returns None for a collective that needs no waiting."""
        return DoneWork() if work is None else IssuedWork(work, buffers, self.watch)


class _Ports:
    """Point-to-point messages between the ranks of a group, apart from those of another tag."""

    def __init__(self, group: dist.ProcessGroup | None, rank: int, world: int, tag: int) -> None:
        self.group, self.rank, self.world, self.tag = group, rank, world, tag

    def send(self, buffer: torch.Tensor, to: int) -> Message:
        return _message(dist.isend(buffer, group=self.group, group_dst=to, tag=self.tag))

    def receive(self, buffer: torch.Tensor, source: int) -> Message:
        return _message(dist.irecv(buffer, group=self.group, group_src=source, tag=self.tag))

    def close(self) -> None:
        with suppress(RuntimeError, ValueError):  # the program has destroyed the group
            close_links(self.group)


def _message(work: Any) -> Message:
    assert work is not None, "this rank is of the group"
    message: Message = work
    return message


_ON_THE_WAY: Final[set[Any]] = set()
"""c10d's work that was not waited for with success, held until the interpreter is gone: a thread of gloo that lets
go of the last reference to a tensor asks for the GIL, and if the process ends at that moment, it ends by SIGABRT.
With a rank that fails the others' work fails, too, and they end at about the same time."""
_MANY: Final = 256
_MOMENT: Final = 0.5
"""Seconds that a process which ends gives what is on its way."""


class IssuedWork:
    """c10d's work, with the buffers that must outlive it: on a GPU another stream than the one that allocated
    them uses them, and the allocator does not know. None for work that blocks the host and holds its own."""

    __slots__ = ("_buffers", "_watch", "_work")

    def __init__(self, work: Any, buffers: tuple[torch.Tensor, ...], watch: FailureDetector | None) -> None:
        self._work, self._buffers, self._watch = work, buffers, watch
        if len(_ON_THE_WAY) >= _MANY:  # left behind by errors that the caller has caught
            _ON_THE_WAY.difference_update([work for work in _ON_THE_WAY if work.is_completed()])
        _ON_THE_WAY.add(work)

    def wait(self) -> object:
        if self._watch is None:
            self._work.wait()
        elif not self._buffers or self._buffers[0].device.type == "cpu":
            self._watch.wait(self._work)
        else:
            self._watch.finish(self._work)
        _ON_THE_WAY.discard(self._work)
        return None

    def is_completed(self) -> bool:
        return bool(self._work.is_completed())


class CopiedWork:
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


_ROLLS: Final[weakref.WeakKeyDictionary[dist.ProcessGroup, tuple[Roll, ProcessGroupCommunicator]]] = (
    weakref.WeakKeyDictionary()
)
"""Of each group its roll and the group over which that travels."""
_FOR_EVER: Final = timedelta(days=30)
_ANSWER: Final = 5.0

_COMMUNICATORS: Final[weakref.WeakSet[ProcessGroupCommunicator]] = weakref.WeakSet()


@atexit.register
def _leave() -> None:
    """Let go of all groups before the interpreter ends: this ends the threads of those that hetspmd has made or the
    program has destroyed, which would ask for the GIL of an interpreter that is gone to drop a tensor (SIGABRT)."""
    end_carriers()
    for communicator in list(_COMMUNICATORS):
        if communicator.watch is not None:  # the others see links that are closed by a process that is alive
            communicator.watch.note("ended", communicator.watch.place() or "its last step")
    over = _all_is_over()
    if not over:
        close_own_links()
        over = _all_is_over()
    for communicator in list(_COMMUNICATORS):
        communicator.release()
    _ROLLS.clear()
    if over:
        destroy_groups()


def _all_is_over() -> bool:
    """Whether nothing is on its way any more; what is gets a moment."""
    end = time.monotonic() + _MOMENT
    while not all(work.is_completed() for work in list(_ON_THE_WAY)):
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


def communicator_for(group: dist.ProcessGroup | None, devices: int) -> Communicator:
    """The communicator of a group that must have ``devices`` ranks.

    Without a group and without an initialised default group the world has one rank. Raises WorldSizeError
    if the sizes differ.
    """
    ready = dist.is_available() and dist.is_initialized()
    world = dist.get_world_size(group) if ready else 1
    if world != devices:
        hint = (
            f"start {devices} processes (torchrun --nproc-per-node) or give a cluster of {world}"
            if ready
            else f"call torch.distributed.init_process_group in each of {devices} processes first"
        )
        raise WorldSizeError(f"the cluster has {devices} devices, the process group {world}: {hint}")
    if ready:
        forget_default_group()
    if ready and world > 1:
        return ProcessGroupCommunicator(own_group(group))
    return LoneCommunicator()
