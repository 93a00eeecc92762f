"""The simulation: right collectives, mismatches named, nothing hangs."""

from __future__ import annotations

import random
import threading

import pytest
import torch
from collective_cases import check_collectives

from hetspmd.dist.communicator import Communicator, LoneCommunicator
from hetspmd.dist.process_group import communicator_for
from hetspmd.dist.simulated_world import run_ranks
from hetspmd.errors import CollectiveMismatchError, PlanMismatchError


@pytest.mark.parametrize("world", [2, 3, 4])
def test_collectives_by_brute_force(world: int) -> None:
    counts = run_ranks(world, check_collectives)
    assert min(counts) > 100
    assert len(set(counts)) == 1


def test_delays_change_nothing() -> None:
    dice = random.Random(3)
    pauses = [[dice.random() * 2e-4 for _ in range(97)] for _ in range(3)]
    run_ranks(3, check_collectives, delay=lambda rank, number: pauses[rank][number % 97])


def test_sums_are_in_rank_order() -> None:
    values = [1e16, 1.0, -1e16]

    def body(comm: Communicator) -> float:
        x = torch.tensor([values[comm.rank]], dtype=torch.float64)
        comm.all_reduce(x).wait()
        return x.item()

    assert run_ranks(3, body) == [(1e16 + 1.0) - 1e16] * 3


def test_different_collectives_are_named() -> None:
    def body(comm: Communicator) -> None:
        x = torch.zeros(4)
        if comm.rank == 1:
            comm.broadcast(x, 0).wait()
        else:
            comm.all_reduce(x).wait()

    with pytest.raises(
        CollectiveMismatchError, match=r"collective 0.*(all_reduce.*broadcast|broadcast.*all_reduce)"
    ):
        run_ranks(3, body)


def test_different_sizes_are_named() -> None:
    def body(comm: Communicator) -> None:
        comm.all_reduce(torch.zeros(3 + comm.rank)).wait()

    with pytest.raises(PlanMismatchError, match="do not run the same program"):
        run_ranks(2, body)


def test_different_splits_are_named() -> None:
    def body(comm: Communicator) -> None:
        comm.all_to_all(torch.zeros(4), torch.zeros(4), [2, 2], [1 + comm.rank, 3 - comm.rank]).wait()

    with pytest.raises(CollectiveMismatchError, match="expects"):
        run_ranks(2, body)


def test_a_rank_that_stops_early_is_named() -> None:
    def body(comm: Communicator) -> None:
        for _ in range(3 - comm.rank):
            comm.all_reduce(torch.zeros(1)).wait()

    with pytest.raises(CollectiveMismatchError, match="rank 1 has finished"):
        run_ranks(2, body)


def test_an_error_on_one_rank_stops_the_others() -> None:
    def body(comm: Communicator) -> None:
        if comm.rank == 2:
            raise ZeroDivisionError("on rank 2")
        comm.all_reduce(torch.zeros(1)).wait()

    before = threading.active_count()
    with pytest.raises(ZeroDivisionError, match="on rank 2"):
        run_ranks(3, body)
    assert threading.active_count() == before


def test_one_device_needs_no_group() -> None:
    comm = communicator_for(None, 1)
    assert isinstance(comm, LoneCommunicator)
    assert comm.exchange("x") == ["x"]
    from hetspmd.cluster.collective_kinds import KINDS
    from hetspmd.dist import collectives
    from hetspmd.dist.random import Randomness
    from hetspmd.dist.runtime import Runtime

    runtime = Runtime(comm, Randomness(0, 0, torch.device("cpu")))
    x = torch.arange(6.0).view(2, 3)
    for name, kind in KINDS.items():
        if kind.sharded_ends == 1:
            assert torch.equal(collectives.STARTS[name].one(runtime, x, 1, (3,)).wait(), x)
    assert torch.equal(collectives.start_all_to_all(runtime, x, 0, 1, (2,), (3,)).wait(), x)
    assert torch.equal(collectives.start_all_reduce(runtime, x).wait(), x)


def test_scripts_may_import_it_from_its_earlier_place() -> None:
    from hetspmd.run import simulate

    assert simulate.run_ranks is run_ranks
