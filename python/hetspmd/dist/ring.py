"""Uneven gathers and reductions around a ring of point-to-point messages.

Rank r sends to rank r + 1 and receives from rank r - 1 only, exact sizes, in chunks of at most :data:`CHUNK` bytes:
a chunk goes on as soon as it has come, so that a large shard is on all links at a time, and a ring of E bytes takes
about the time of E bytes on one link whatever the skew.

    gather   every chunk starts at its owner and ends at the rank before it
    reduce   every chunk of summands starts at the rank behind its owner, is added to on the way, and ends at it

A rank passes on what is its own first, then what was of the ranks behind it, nearest first; so do all, and
messages between two ranks keep their order. Nothing can block for good: receives of a gather are all posted at the
start, each where it belongs, and a reduction adds what has come to its own part before it posts the receive after
the next, so that no receive waits for a send.

Someone must pass the chunks on while the rank computes. gloo's messages tell only in ``wait`` that they are
complete; therefore a :class:`Carrier` is a thread. A communicator has :data:`LANES` of them, which take turns, so
that a link has the next ring's chunks to carry while a rank finds that a ring is over. Chunks stay in order on a
link, so that a ring does not take longer for the one behind it.
"""

from __future__ import annotations

import atexit
import queue
import threading
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Final, Protocol

import torch

CHUNK: Final = 1 << 19

LANES: Final = 2
"""Rings that are on their way at a time; gloo carries as many of its collectives."""

_PATIENCE, _LIMIT = 0.2, 2.0
"""Seconds that a process which ends gives messages that are on their way, and those that it has ended."""


class Message(Protocol):
    """A message on its way."""

    def wait(self) -> object:
        """Return once the buffer may be used again. Raises if it failed."""


class Ports(Protocol):
    """The links of this rank; messages to a rank arrive in the order in which they are sent."""

    rank: int
    world: int

    def send(self, buffer: torch.Tensor, to: int) -> Message:
        """Send a contiguous buffer, which is left alone until the message has been waited for."""

    def receive(self, buffer: torch.Tensor, source: int) -> Message:
        """Receive as many elements as the buffer has."""

    def close(self) -> None:
        """End every message that waits here, with an error; the links are of no use afterwards."""


def ring_gather(ports: Ports, parts: Sequence[torch.Tensor]) -> None:
    """Fill ``parts[o]``, flat, with rank o's, for every o."""
    rank, world = ports.rank, ports.world
    after, before = (rank + 1) % world, (rank - 1) % world
    coming = [chunk for k in range(1, world) for chunk in _chunks(parts[(rank - k) % world])]
    passed_on = len(coming) - len(_chunks(parts[after]))
    received = [ports.receive(chunk, before) for chunk in coming]
    sent = [ports.send(chunk, after) for chunk in _chunks(parts[rank])]
    for index, (message, chunk) in enumerate(zip(received, coming, strict=True)):
        message.wait()
        if index < passed_on:
            sent.append(ports.send(chunk, after))
    for message in sent:
        message.wait()


def ring_reduce(ports: Ports, parts: Sequence[torch.Tensor]) -> None:
    """Sum ``parts[rank]``, flat, over all ranks' ``parts[rank]``; the other parts are overwritten."""
    rank, world = ports.rank, ports.world
    after, before = (rank + 1) % world, (rank - 1) % world
    coming = [chunk for k in range(2, world + 1) for chunk in _chunks(parts[(rank - k) % world])]
    passed_on = len(coming) - len(_chunks(parts[rank]))
    largest = max((chunk.numel() for chunk in coming), default=0)
    room = [parts[0].new_empty(largest) for _ in range(min(len(coming), 2))]

    def receive(index: int) -> Message:
        return ports.receive(room[index % 2][: coming[index].numel()], before)

    received = [receive(index) for index in range(len(room))]
    sent = [ports.send(chunk, after) for chunk in _chunks(parts[before])]
    for index, chunk in enumerate(coming):
        received[index].wait()
        chunk += room[index % 2][: chunk.numel()]
        if index + 2 < len(coming):
            received.append(receive(index + 2))
        if index < passed_on:
            sent.append(ports.send(chunk, after))
    for message in sent:
        message.wait()


def _chunks(part: torch.Tensor) -> list[torch.Tensor]:
    """Consecutive pieces of at most ``CHUNK`` bytes; none of an empty part."""
    return list(torch.split(part, max(CHUNK // part.itemsize, 1))) if part.numel() else []


class RingTask:
    """A task of a :class:`Carrier`, waited for like c10d's work."""

    def __init__(self, task: Callable[[], None]) -> None:
        self._task: Callable[[], None] | None = task
        self._error: BaseException | None = None
        self._over = threading.Event()

    def run(self) -> None:
        """Run the task, once, and let go of it."""
        try:
            assert self._task is not None
            self._task()
        except BaseException as error:  # raised where it is waited for
            self._error = error
        self._task = None
        self._over.set()

    def is_completed(self) -> bool:
        """Whether the task has run or failed."""
        return self._over.is_set()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return once the task has run; raise its error, or RuntimeError after ``timeout``."""
        if not self._over.wait(None if timeout is None else timeout.total_seconds()):
            raise RuntimeError("timed out")
        if self._error is not None:
            raise self._error
        return True


class Carrier:
    """A thread that runs tasks in their order, until this object is gone; they send messages of ``ports``."""

    def __init__(self, ports: Ports) -> None:
        self._ports = ports
        self._tasks: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        weakref.finalize(self, self._tasks.put, None)

    def carry(self, task: Callable[[], None]) -> RingTask:
        """Run ``task`` after those before it."""
        if self._thread is None:
            arguments = (self._tasks,)
            self._thread = threading.Thread(target=_carry, args=arguments, daemon=True, name="hetspmd ring")
            _CARRYING[self._thread] = (self._tasks, self._ports)
            self._thread.start()
        carried = RingTask(task)
        self._tasks.put(carried)
        return carried


_CARRYING: dict[threading.Thread, tuple[queue.SimpleQueue[Any], Ports]] = {}
"""The threads that run, whether or not their carriers still exist."""


def _carry(tasks: queue.SimpleQueue[Any]) -> None:
    while (carried := tasks.get()) is not None:
        with torch.no_grad():
            carried.run()
        del carried
    del _CARRYING[threading.current_thread()]


@atexit.register
def end_carriers() -> None:
    """End the threads before the interpreter does: one that waits for a rank that has died would come back from the
    wait to an interpreter that is gone, which ends the process by SIGABRT."""
    for thread, (tasks, ports) in list(_CARRYING.items()):
        tasks.put(None)
        thread.join(_PATIENCE)
        if thread.is_alive():
            ports.close()
            thread.join(_LIMIT)
