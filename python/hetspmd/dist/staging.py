"""Tensors of accelerators over a backend that carries the host's, as gloo does.

A primitive's operands are copied to pinned memory on a stream of their own, a thread sends them from there, and
what comes is copied back on another stream, for which the stream that computes waits. The host waits for a
primitive only where its result is read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, Protocol

import torch

from hetspmd.dist.communicator import Communicator, Work
from hetspmd.dist.ring import RingTask, Carrier

Pairs = Sequence[tuple[torch.Tensor, torch.Tensor]]
"""Destination and source of copies."""


class Mark(Protocol):
    """A point of a stream."""

    def synchronize(self) -> object:
        """Return once the stream has passed it."""

    def query(self) -> bool:
        """Whether the stream has passed it."""


class Copies(Protocol):
    """Copies between an accelerator and the host."""

    def room(self, like: torch.Tensor) -> torch.Tensor:
        """Flat memory of the host for the elements of a tensor."""

    def outward(self, pairs: Pairs) -> Mark:
        """Start copies to the host of what the current stream has computed by now."""

    def inward(self, pairs: Pairs, after: Mark) -> Mark:
        """Start copies from the host, behind a mark of :meth:`outward`."""

    def join(self, mark: Mark) -> None:
        """Have the current stream wait for a mark of :meth:`inward`."""


class _Passed:
    """A mark that every stream has passed."""

    def synchronize(self) -> object:
        return None

    def query(self) -> bool:
        return True


class HostCopies:
    """The same for tensors of the host, at once: for tests, and devices without streams."""

    def room(self, like: torch.Tensor) -> torch.Tensor:
        return torch.empty(like.numel(), dtype=like.dtype)

    def outward(self, pairs: Pairs) -> Mark:
        for to, source in pairs:
            to.copy_(source)
        return _Passed()

    def inward(self, pairs: Pairs, after: Mark) -> Mark:
        return self.outward(pairs)

    def join(self, mark: Mark) -> None:
        return None


class CudaCopies:
    """Copies of a GPU, in both directions at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._out, self._in = (
            torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch has no types there
            for _ in range(2)
        )

    def room(self, like: torch.Tensor) -> torch.Tensor:
        return torch.empty(like.numel(), dtype=like.dtype, pin_memory=True)

    def outward(self, pairs: Pairs) -> Mark:
        self._out.wait_stream(torch.cuda.current_stream(self._device))
        return self._copied(self._out, pairs)

    def inward(self, pairs: Pairs, after: Mark) -> Mark:
        assert isinstance(after, torch.cuda.Event)
        self._in.wait_event(after)  # what is written to may be read by what the device was told before
        return self._copied(self._in, pairs)

    def join(self, mark: Mark) -> None:
        assert isinstance(mark, torch.cuda.Event)
        torch.cuda.current_stream(self._device).wait_event(mark)

    def _copied(self, stream: torch.cuda.Stream, pairs: Pairs) -> Mark:
        with torch.cuda.stream(stream):
            for to, source in pairs:
                to.copy_(source, non_blocking=True)
            mark: Mark = stream.record_event()
        return mark


def copies_for(device: torch.device) -> Copies:
    """The copies of a device."""
    return CudaCopies(device) if device.type == "cuda" else HostCopies()


class StagedWork:
    """A staged primitive. It holds the tensors: another stream than the one that allocated them uses them."""

    def __init__(self, carried: RingTask, copies: Copies, arrived: list[Mark], *held: torch.Tensor) -> None:
        self._carried, self._copies, self._arrived, self._held = carried, copies, arrived, held

    def wait(self, timeout: timedelta | None = None) -> object:
        """Wait for the host's part, and have the current stream wait for the copy. Raises RuntimeError after
        ``timeout``."""
        self._carried.wait(timeout)
        self._copies.join(self._arrived[0])
        return None

    def is_completed(self) -> bool:
        return self._carried.is_completed() and all(mark.query() for mark in self._arrived)


class StagedCommunicator(Communicator):
    """The primitives of ``inner``, a communicator of host tensors, for the tensors of a device.

    ``carrier``: the thread that sends them, one after the other.
    """

    def __init__(self, inner: Communicator, carrier: Carrier, copies: Copies) -> None:
        self.rank, self.world = inner.rank, inner.world
        self._inner, self._carrier, self._copies = inner, carrier, copies

    def all_reduce(self, buffer: torch.Tensor) -> Work:
        return self._send(self._inner.all_reduce, [buffer], [buffer], [buffer])

    def reduce(self, buffer: torch.Tensor, root: int) -> Work:
        taken = [buffer] if self.rank == root else []
        return self._send(partial(self._inner.reduce, root=root), [buffer], [buffer], taken)

    def reduce_scatter(self, output: torch.Tensor, buffer: torch.Tensor, *, spare: bool = False) -> Work:
        send = partial(self._inner.reduce_scatter, spare=True)  # the host's copy is ours
        return self._send(send, [output, buffer], [buffer], [output])

    def all_gather(self, output: torch.Tensor, buffer: torch.Tensor) -> Work:
        return self._send(self._inner.all_gather, [output, buffer], [buffer], [output])

    def broadcast(self, buffer: torch.Tensor, root: int) -> Work:
        own = self.rank == root
        send = partial(self._inner.broadcast, root=root)
        return self._send(send, [buffer], [buffer] if own else [], [] if own else [buffer])

    def all_to_all(
        self, output: torch.Tensor, buffer: torch.Tensor, output_splits: Sequence[int], splits: Sequence[int]
    ) -> Work:
        send = partial(self._inner.all_to_all, output_splits=output_splits, splits=splits)
        return self._send(send, [output, buffer], [buffer], [output])

    def ring_gather(self, parts: Sequence[torch.Tensor]) -> Work:
        own = [parts[self.rank]]
        others = [part for rank, part in enumerate(parts) if rank != self.rank]
        return self._send(lambda *hosts: self._inner.ring_gather(hosts), parts, own, others)

    def ring_reduce(self, parts: Sequence[torch.Tensor]) -> Work:
        return self._send(lambda *hosts: self._inner.ring_reduce(hosts), parts, parts, [parts[self.rank]])

    def exchange(self, value: Any) -> list[Any]:
        return self._inner.exchange(value)

    def _part(self, ranks: Sequence[int]) -> Communicator:
        return StagedCommunicator(self._inner._part(ranks), self._carrier, self._copies)

    def _send(
        self,
        primitive: Callable[..., Work],
        buffers: Sequence[torch.Tensor],
        read_buffers: Sequence[torch.Tensor],
        written_buffers: Sequence[torch.Tensor],
    ) -> Work:
        """Issue ``primitive(*buffers)`` on the host, which reads ``read_buffers`` and writes ``written_buffers``."""
        copies = self._copies
        hosts = [copies.room(buffer) for buffer in buffers]
        host_of = {id(buffer): host for buffer, host in zip(buffers, hosts, strict=True)}
        ready = copies.outward([(host_of[id(b)], b) for b in read_buffers])
        arrived: list[Mark] = []

        def send() -> None:
            ready.synchronize()
            primitive(*hosts).wait()
            arrived.append(copies.inward([(b, host_of[id(b)]) for b in written_buffers], ready))

        return StagedWork(self._carrier.carry(send), copies, arrived, *buffers, *hosts)
