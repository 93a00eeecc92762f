"""``hetspmd.loader``: every rank loads its own rows, and trains as one device does."""

from __future__ import annotations

import pytest
from loader_cases import TRAININGS, WORLD, check, on_a_rank, on_one_device

from hetspmd.dist.simulated_world import run_ranks


@pytest.mark.parametrize("optimizer", ["SGD", "AdamW"])
@pytest.mark.parametrize("name", TRAININGS)
def test_it_trains_as_one_device(name: str, optimizer: str) -> None:
    training = TRAININGS[name]()
    want = on_one_device(training, optimizer)
    for got in run_ranks(WORLD, lambda c: on_a_rank(training, optimizer, c)):
        check(got, want)
