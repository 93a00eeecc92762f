"""How a rank of the comparison times its arms: which turns they have, and which of their steps count."""

from __future__ import annotations

import mmap
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from versus import points, rank
from versus.points import COMPILED, DDP, FSDP


@pytest.mark.parametrize(("growing", "made"), [(0, 2), (1, 4), (9, 6)])
def test_steps_that_take_new_memory_are_not_timed(
    growing: int, made: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = 0  # pages, of a process whose allocator holds nothing that could be given again

    def step() -> torch.Tensor:
        nonlocal taken
        taken += rank.NEW_PAGES + 1 if len(losses) < 2 * growing else 1
        return torch.tensor(float(len(losses)))

    monkeypatch.setattr(rank, "_most", lambda of: of)  # one rank
    monkeypatch.setattr(rank.dist, "barrier", lambda: None)
    monkeypatch.setattr(rank, "_pages", lambda: taken)
    losses: list[torch.Tensor] = []
    stamps, pace = rank.timed(step, 2, losses)
    assert len(losses) == made
    assert len(stamps) == 3
    assert pace >= (stamps[-1] - stamps[0]) / 2 > 0
    assert rank.timed(None, 2, [])[0] != []


@pytest.mark.parametrize(
    ("growing", "seconds", "made"), [(0, 1.0, 1), (1, 1.0, 2), (9, 1.0, 3), (9, 31.0, 1)]
)
def test_an_arm_is_warm_when_its_steps_take_no_new_memory(
    growing: int, seconds: float, made: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken, losses = 0, list[torch.Tensor]()

    def first(step: Any, losses: list[torch.Tensor]) -> float:
        nonlocal taken
        taken += rank.NEW_PAGES + 1 if len(losses) < growing else 1
        losses.append(step())
        return seconds

    monkeypatch.setattr(rank, "_most", lambda of: of)  # one rank
    monkeypatch.setattr(rank, "_pages", lambda: taken)
    monkeypatch.setattr(rank, "first", first)
    assert rank.warm(lambda: torch.ones(()), losses) == seconds
    assert len(losses) == made


@pytest.mark.parametrize("steady", [True, False])
@pytest.mark.parametrize("longest", [0.0, 2.5, 1e9])
def test_further_turns_end(longest: float, steady: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """hetspmd and the best incumbent take equally long: they have turns until these have lasted for so long, or
    until their ratio is known."""
    now = 0.0
    built: list[str] = []

    def build(context: Any, model: str, size: str, arm: Any) -> Any:
        built.append(arm["arm"])
        return lambda: torch.ones(())

    def timed(step: Any, count: int, losses: list[torch.Tensor]) -> tuple[list[float], float]:
        nonlocal now
        now += 1.0
        losses.append(step())
        return [now - 1.0, now], 1.0 if steady else 1.0 + 0.04 * (now % 3)

    class Unthrottled:
        rank = 0

        def throttle(self, on: bool) -> None:
            pass

    monkeypatch.setattr(rank, "_most", lambda of: of)  # one rank
    monkeypatch.setattr(rank, "build_arm", build)
    monkeypatch.setattr(rank, "timed", timed)
    monkeypatch.setattr(rank, "first", lambda step, losses: losses.append(step()) or 1.0)
    monkeypatch.setattr(rank, "give_back", lambda part: None)
    monkeypatch.setattr(rank, "LONGEST", longest)
    monkeypatch.setattr(rank, "time", SimpleNamespace(monotonic=lambda: now))
    arms = {name: {"arm": name, "rows": None, "plan": None} for name in (DDP, FSDP, COMPILED)}
    monkeypatch.setattr(points, "INCUMBENTS", (DDP,))
    found = rank.train(
        Unthrottled(), model="BERT", size="tiny", arms=arms, fastest=0, rounds=3, steps=2, keep=True
    )
    further = min(int(longest // 2) + 1, points.MORE + (0 if steady else points.MOST))
    assert [len(found[name]["stamps"]) for name in arms] == [3 + further, 3, 3 + further]
    assert built == list(arms), "made once"
    assert found[DDP]["losses"] == [1.0, 1.0]


def test_pages_are_counted() -> None:
    before = rank._pages()
    with mmap.mmap(-1, 1 << 24) as fresh:  # memory that no allocator has held before
        fresh.madvise(mmap.MADV_NOHUGEPAGE)
        fresh.write(b"x" * len(fresh))
        assert rank._pages() - before >= len(fresh) // mmap.PAGESIZE
