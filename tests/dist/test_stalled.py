"""Ranks that wait for each other at different places are told so; ranks of which one does not wait are not."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from hetspmd.dist import stalled
from hetspmd.dist.board import Board
from hetspmd.dist.stalled import Stalled

WORLD = 3
APART = "ranks 0 and 2 in the backward of step 3, rank 1 in step 4"


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> list[Stalled]:
    monkeypatch.setattr(stalled, "_EVERY", 0.0)
    store = dist.HashStore()
    return [Stalled(Board(store, "of these", rank, WORLD, 5.0)) for rank in range(WORLD)]


def place(rank: int) -> str:
    return "step 4" if rank == 1 else "the backward of step 3"


def test_all_wait_on_at_different_places(ranks: list[Stalled]) -> None:
    rounds = [[one.look(0.5, place(rank)) for rank, one in enumerate(ranks)] for _ in range(4)]
    assert rounds[0] == [""] * WORLD
    assert all(APART in text for text in rounds[-1])
    assert len(set(rounds[-1])) == 1


def test_what_was_found_is_of_those_waits_alone(ranks: list[Stalled]) -> None:
    for _ in range(4):
        for rank, one in enumerate(ranks):
            one.look(0.5, place(rank))
    assert ranks[0].look(7.5, "step 9") == ""


def test_at_one_place(ranks: list[Stalled]) -> None:
    assert not any(one.look(0.5, "step 4") for _ in range(8) for one in ranks)
    assert ranks[0]._board.read("parted") == {}


def test_a_rank_that_goes_on(ranks: list[Stalled]) -> None:
    """It waits again and again, each time in another wait."""
    for turn in range(8):
        assert not any(one.look(float(turn * (rank == 2)), place(rank)) for rank, one in enumerate(ranks))


@pytest.mark.parametrize("waited", [0, 1])
def test_a_rank_that_does_not_wait(ranks: list[Stalled], waited: int) -> None:
    """It has never waited, or did once, and computes."""
    for turn in range(8):
        found = [one.look(0.5, place(rank)) for rank, one in enumerate(ranks) if rank < 2 or turn < waited]
        assert not any(found)
