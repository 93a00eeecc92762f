"""Loaders of own rows in real gloo processes, with workers: as one device, or a named error on every rank."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from loader_cases import CLOSE, TRAININGS, WORLD, check, check_all, data_parallel, on_one_device
from loader_worker import WRONG, read, worker

from processes import launched_once

pytestmark = pytest.mark.slow
SOON = 30.0


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Of each rank."""
    folder = launched_once(tmp_path_factory, "loader", worker, WORLD)
    return read(folder, WORLD)


@pytest.mark.parametrize("name", TRAININGS)
def test_it_trains_as_one_device(results: list[dict[str, Any]], name: str) -> None:
    training = TRAININGS[name]()
    for rank in range(WORLD):
        check_all(results[rank][f"train {name}"], training)


def test_it_is_gone_on_with(results: list[dict[str, Any]]) -> None:
    want = on_one_device(data_parallel(), "AdamW")
    for rank in range(WORLD):
        check(results[rank]["resumed"], want)


def test_what_samples_draw_is_the_same_on_ranks_that_load_them(results: list[dict[str, Any]]) -> None:
    for rank in range(1, WORLD):
        torch.testing.assert_close(results[rank]["augmented"], results[0]["augmented"], **CLOSE)


TOLD = {
    "plain": ("BatchMismatchError", "none of these tensors is one of its rows"),
    "seeds": ("CollectiveMismatchError", "the ranks have parted in loader(...)"),
    "order": ("BatchMismatchError", "rank 1 was given another list of samples"),
    "lengths": ("CollectiveMismatchError", "rank 1 with drop_last=True"),
    "pads": ("BatchMismatchError", "Pad to a fixed length"),
    "stops": ("CollectiveMismatchError", "rank 1 in full_state_dict()"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_use_is_named_on_every_rank(results: list[dict[str, Any]], name: str) -> None:
    kind, text = TOLD[name]
    for rank in range(WORLD):
        found = copy.copy(results[rank][name])
        assert found["error"] == kind, found
        assert text in found["text"]
        assert found["seconds"] < SOON
