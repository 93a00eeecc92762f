"""Rings over links on which a message is over only when it has been received."""

from __future__ import annotations

import gc
import random
import threading
from collections import defaultdict
from datetime import timedelta
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hetspmd.dist import ring
from hetspmd.dist.collectives import lone, ranges
from hetspmd.dist.process_group import ProcessGroupCommunicator
from hetspmd.dist.ring import LANES, Carrier, ring_gather, ring_reduce


class Letter:
    """A message whose sender waits for its receiver."""

    def __init__(self) -> None:
        self.content: torch.Tensor | None = None
        self.room: torch.Tensor | None = None
        self.over = threading.Event()

    def put(self) -> None:
        if self.content is not None and self.room is not None:
            assert self.content.shape == self.room.shape
            self.room.copy_(self.content)
            self.over.set()

    def wait(self) -> object:
        assert self.over.wait(20), "blocked"
        return None


class Links:
    """All ranks' links; ``sent[a, b]`` elements went from rank a to rank b."""

    def __init__(self, world: int) -> None:
        self.world = world
        self.lock = threading.Lock()
        self.letters: dict[tuple[int, int, int], Letter] = defaultdict(Letter)
        self.count: dict[tuple[int, int, bool], int] = defaultdict(int)
        self.sent: dict[tuple[int, int], int] = defaultdict(int)

    def letter(self, source: int, to: int, sends: bool) -> Letter:
        number = self.count[source, to, sends]
        self.count[source, to, sends] += 1
        return self.letters[source, to, number]


class Ports:
    def __init__(self, links: Links, rank: int) -> None:
        self.links, self.rank, self.world = links, rank, links.world

    def send(self, buffer: torch.Tensor, to: int) -> Letter:
        with self.links.lock:
            self.links.sent[self.rank, to] += buffer.numel()
            letter = self.links.letter(self.rank, to, sends=True)
            letter.content = buffer
            letter.put()
        return letter

    def receive(self, buffer: torch.Tensor, source: int) -> Letter:
        with self.links.lock:
            letter = self.links.letter(source, self.rank, sends=False)
            letter.room = buffer
            letter.put()
        return letter

    def close(self) -> None:
        raise AssertionError("nobody leaves")


def everywhere(links: Links, parts: list[list[torch.Tensor]], reduce: bool) -> None:
    errors: list[BaseException] = []

    def body(rank: int) -> None:
        try:
            (ring_reduce if reduce else ring_gather)(Ports(links, rank), parts[rank])
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=body, args=(rank,), daemon=True) for rank in range(links.world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 23), min_size=2, max_size=6), st.integers(1, 40), st.integers(0, 10**6))
def test_any_shards_in_any_chunks(extents: list[int], chunk: int, seed: int) -> None:
    """Right, exact in what each link carries, and never blocked; what rank r has no use for does not pass it."""
    world, dice = len(extents), random.Random(seed)
    summands = [[dice.randrange(100) for _ in range(sum(extents))] for _ in range(world)]
    whole = [torch.tensor(s, dtype=torch.int64) for s in summands]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ring, "CHUNK", 8 * chunk)
        links = Links(world)
        parts = [list(torch.split(t.clone(), extents)) for t in whole]
        everywhere(links, parts, reduce=True)
        total = torch.stack(whole).sum(0)
        for rank, (start, extent) in enumerate(ranges(extents)):
            assert torch.equal(parts[rank][rank], total[start : start + extent])
            assert links.sent[rank, (rank + 1) % world] == sum(extents) - extent
        links = Links(world)
        rooms = [torch.full((sum(extents),), -1) for _ in range(world)]
        for rank, (start, extent) in enumerate(ranges(extents)):
            rooms[rank][start : start + extent] = total[start : start + extent]
        everywhere(links, [list(torch.split(t, extents)) for t in rooms], reduce=False)
        for rank, room in enumerate(rooms):
            assert torch.equal(room, total)
            after = (rank + 1) % world
            assert links.sent[rank, after] == sum(extents) - extents[after]
    assert set(links.sent) <= {(r, (r + 1) % world) for r in range(world)}


def test_a_carrier_runs_tasks_in_order_and_tells_their_errors() -> None:
    carrier, order, gate = Carrier(Ports(Links(2), 0)), [], threading.Event()

    def first() -> None:
        gate.wait(20)
        order.append(1)

    def second() -> None:
        order.append(2)
        raise ValueError("lost")

    one, two = carrier.carry(first), carrier.carry(second)
    with pytest.raises(RuntimeError, match="timed out"):
        one.wait(timedelta(seconds=0.01))
    assert not one.is_completed()
    gate.set()
    assert one.wait()
    with pytest.raises(ValueError, match="lost"):
        two.wait(timedelta(seconds=20))
    assert (order, two.is_completed()) == ([1, 2], True)


def test_as_many_rings_as_lanes_are_on_their_way() -> None:
    """The next ring is begun while one is not over, with messages of another tag; one more waits for its lane."""
    comm = object.__new__(ProcessGroupCommunicator)
    comm.group, comm.rank, comm.world, comm.watch = None, 0, 2, None
    gate, begun = threading.Event(), [threading.Event() for _ in range(LANES + 1)]
    tags: list[int] = []

    def ring(number: int) -> Any:
        def run(ports: Any, parts: Any) -> None:
            tags.append(ports.tag)
            begun[number].set()
            assert gate.wait(20)

        return run

    works = [comm._ring(ring(number), [torch.ones(1)] * 2) for number in range(LANES + 1)]
    assert all(event.wait(20) for event in begun[:LANES])
    assert not begun[LANES].wait(0.1)
    gate.set()
    for work in works:
        work.wait()
    assert begun[LANES].is_set()
    assert len(set(tags[:LANES])) == LANES


def test_a_carriers_thread_ends_with_it() -> None:
    carrier = Carrier(Ports(Links(2), 0))
    carrier.carry(lambda: None).wait()
    thread = carrier._thread
    assert thread is not None
    assert thread.is_alive()
    del carrier
    gc.collect()
    thread.join(20)
    assert not thread.is_alive()


class Closable(Ports):
    def __init__(self) -> None:
        super().__init__(Links(2), 0)
        self.closed = threading.Event()

    def close(self) -> None:
        self.closed.set()


@pytest.mark.parametrize("stuck", [False, True])
def test_a_process_that_ends_ends_the_threads(stuck: bool) -> None:
    """Messages on their way arrive; those that never will are ended, even if the carrier is gone."""
    ports, began = Closable(), threading.Event()

    def task() -> None:
        began.set()
        if stuck:
            assert ports.closed.wait(20)

    carrier = Carrier(ports)
    carried, thread = carrier.carry(task), carrier._thread
    assert thread is not None
    assert began.wait(20)
    if stuck:
        del carrier
        gc.collect()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ring, "_CARRYING", only := {thread: ring._CARRYING.pop(thread)})
        ring.end_carriers()
        thread.join(20)
    assert not thread.is_alive()
    assert not only
    assert carried.wait()
    assert ports.closed.is_set() == stuck


def test_the_only_holder() -> None:
    assert [lone(e) for e in ((0, 3, 0), (1, 0, 2), (0, 0), (4,))] == [1, None, None, 0]
