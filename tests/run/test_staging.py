"""Tensors of an accelerator over gloo; the accelerator is played by the host."""

from __future__ import annotations

import gc
import threading
import weakref
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from collective_cases import check_collectives
from staging_worker import worker

from hetspmd.dist import process_group
from hetspmd.dist.communicator import Communicator, LoneCommunicator, Work
from hetspmd.dist.process_group import ProcessGroupCommunicator
from hetspmd.dist.ring import Carrier, Message
from hetspmd.dist.simulated_world import run_ranks
from hetspmd.dist.staging import HostCopies, Mark, Pairs, StagedCommunicator
from processes import spawn


class NoPorts:
    """Links that nothing is sent over."""

    rank, world = 0, 1

    def send(self, buffer: torch.Tensor, to: int) -> Message:
        raise AssertionError("nothing is sent here")

    receive = send

    def close(self) -> None:
        return None


def staged(inner: Communicator, copies: HostCopies | None = None) -> StagedCommunicator:
    return StagedCommunicator(inner, Carrier(NoPorts()), copies or HostCopies())


@pytest.mark.parametrize("world", [2, 3, 4])
def test_collectives_by_brute_force(world: int) -> None:
    counts = run_ranks(world, lambda comm: check_collectives(staged(comm)))
    assert min(counts) > 100
    assert counts == run_ranks(world, check_collectives)


class Later:
    """A mark that the test lets the stream pass."""

    def __init__(self) -> None:
        self.passed = threading.Event()

    def synchronize(self) -> object:
        assert self.passed.wait(20)
        return None

    def query(self) -> bool:
        return self.passed.is_set()


class SlowCopies(HostCopies):
    """Copies that the test sees begin and lets end; ``log`` has what began."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.marks = {"out": Later(), "in": Later()}
        self.joined: list[Mark] = []

    def outward(self, pairs: Pairs) -> Mark:
        super().outward(pairs)
        self.log.append("out")
        return self.marks["out"]

    def inward(self, pairs: Pairs, after: Mark) -> Mark:
        assert after is self.marks["out"]
        super().outward(pairs)
        self.log.append("in")
        return self.marks["in"]

    def join(self, mark: Mark) -> None:
        self.joined.append(mark)


class Doubling(LoneCommunicator):
    """An all-reduce with a twin of this rank."""

    def __init__(self, log: list[str]) -> None:
        self.log = log

    def all_reduce(self, buffer: torch.Tensor) -> Work:
        self.log.append("send")
        buffer *= 2
        return super().all_reduce(buffer)


def test_each_part_waits_for_the_one_before() -> None:
    copies = SlowCopies()
    buffer = torch.arange(3.0)
    work = staged(Doubling(copies.log), copies).all_reduce(buffer)
    with pytest.raises(RuntimeError, match="timed out"):
        work.wait(timedelta(milliseconds=20))  # type: ignore[call-arg]  # what a watch does
    assert copies.log == ["out"], "nothing is sent before it has been copied"
    assert not work.is_completed()
    copies.marks["out"].passed.set()
    work.wait()
    assert copies.log == ["out", "send", "in"]
    assert copies.joined == [copies.marks["in"]], (
        "the stream that computes waits for the copy, the host does not"
    )
    assert not work.is_completed(), "the copy may still write"
    copies.marks["in"].passed.set()
    assert work.is_completed()
    assert buffer.tolist() == [0.0, 2.0, 4.0]


def test_buffers_live_until_the_copy_has_been_made() -> None:
    copies = SlowCopies()
    copies.marks["out"].passed.set()
    buffer = torch.ones(4)
    alive = weakref.ref(buffer)
    work = staged(Doubling([]), copies).all_reduce(buffer)
    work.wait()
    del buffer
    gc.collect()
    assert alive() is not None
    del work
    gc.collect()
    assert alive() is None


def test_what_fails_is_raised_where_it_is_waited_for() -> None:
    class Broken(LoneCommunicator):
        def all_reduce(self, buffer: torch.Tensor) -> Work:
            raise RuntimeError("no cable")

    work = staged(Broken()).all_reduce(torch.ones(2))
    with pytest.raises(RuntimeError, match="no cable"):
        work.wait()
    assert work.is_completed()


def test_copies_are_of_the_device_that_holds_the_tensor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not of the current device: its streams know nothing of what another one computes."""
    copied: list[torch.device] = []
    threads: set[int] = set()

    class Logged(HostCopies):
        def __init__(self, device: torch.device) -> None:
            self.device = device

        def outward(self, pairs: Pairs) -> Mark:
            copied.extend({self.device} | {source.device for _, source in pairs})
            return super().outward([])

        def inward(self, pairs: Pairs, after: Mark) -> Mark:
            threads.add(threading.get_ident())
            return super().outward([])

    monkeypatch.setattr(process_group, "copies_for", Logged)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    comm = ProcessGroupCommunicator()
    try:
        monkeypatch.setattr(comm, "_staged", lambda buffer: True)
        for device in ("meta", "cpu", "meta"):
            comm.all_reduce(torch.ones(3, device=device)).wait()
        comm.all_to_all(torch.empty(3, device="meta"), torch.ones(3, device="meta"), [3], [3]).wait()
    finally:
        comm.release()
        dist.destroy_process_group()
    assert [device.type for device in copied] == ["meta", "cpu", "meta", "meta"]
    assert len(threads) == 1, "one thread sends all, or ranks could send in other orders"


@pytest.mark.slow
def test_over_gloo(tmp_path: Path) -> None:
    spawn(worker, (3, str(tmp_path)), nprocs=3)
    found = [torch.load(tmp_path / f"{rank}.pt") for rank in range(3)]
    assert min(r["collectives"] for r in found) > 100
    for r in found:
        plain, carried = r["losses"]
        assert carried == pytest.approx(plain, rel=1e-6)
        assert plain[0] > plain[-1]
    assert "error" not in found[0]
    assert all("rank 0" in r["error"] for r in found[1:])
