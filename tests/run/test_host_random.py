"""``HAP(...)`` leaves the random states of the process as they were: a seed gives the batches of one device."""

from __future__ import annotations

import copy
import random

import numpy as np
import pytest
import torch
from ranks import lone, loss_of
from small_models import Case, case
from small_plans import cluster

from hetspmd.dist.communicator import Communicator
from hetspmd.dist.random import next_seed
from hetspmd.dist.simulated_world import run_ranks
from hetspmd.run.module import HAP


def states() -> tuple[object, ...]:
    drawn = np.random.get_state()
    return torch.get_rng_state().tolist(), random.getstate(), str(drawn)


@pytest.mark.parametrize("name", ["mlp", "attention"])
def test_making_and_calling_draw_nothing(name: str) -> None:
    """With dropout, too, whose numbers are the program's own; compiling another plan included."""
    c = case(name)
    torch.manual_seed(5)
    before = states()
    models = [copy.deepcopy(c.model) for _ in range(2)]

    def body(communicator: Communicator) -> None:
        hap = HAP(models[communicator.rank], cluster(1, 2), example=c.batch, process_group=communicator)
        loss_of(hap(**c.batch)).backward()
        hap.eval()
        hap(**c.batch)
        hap.load_full_state_dict(hap.full_state_dict())

    run_ranks(2, body)
    assert states() == before
    lone(c)
    assert states() == before


def drawn(c: Case, seed: int) -> tuple[float, ...]:
    torch.manual_seed(seed)
    models = [copy.deepcopy(c.model) for _ in range(2)]

    def body(communicator: Communicator) -> tuple[float, ...]:
        hap = HAP(models[communicator.rank], cluster(1, 2), example=c.batch, process_group=communicator)
        return tuple(loss_of(hap(**c.batch)).item() for _ in range(2))

    return run_ranks(2, body)[0]


def test_the_seed_decides_what_a_program_draws() -> None:
    c = case("attention")
    assert drawn(c, 1) == drawn(c, 1)
    assert drawn(c, 1) != drawn(c, 2)


def test_the_next_seed_is_what_torch_would_draw() -> None:
    torch.manual_seed(7)
    assert next_seed() == next_seed() == int(torch.randint(2**62, ()))


def test_modules_of_the_same_ranks_draw_differently() -> None:
    c = case("attention")
    torch.manual_seed(1)
    models = [[copy.deepcopy(c.model) for _ in range(2)] for _ in range(2)]

    def body(communicator: Communicator) -> list[float]:
        pair = models[communicator.rank]
        haps = [HAP(m, cluster(1, 2), example=c.batch, process_group=communicator) for m in pair]
        return [loss_of(hap(**c.batch)).item() for hap in haps]

    first, second = run_ranks(2, body)[0]
    assert first != second
