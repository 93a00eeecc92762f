"""Searches that end where they turn out to be hard, so that alike layers are folded."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import nn

import hetspmd
from hetspmd.cost.model import CostModel
from hetspmd.optimize.synthesis import Synthesis
from hetspmd.program.checker import check
from hetspmd.program.lengths import Lengths, lengths_for
from hetspmd.rules.theory import Theory, derive
from hetspmd.search.constraints import Constraints
from hetspmd.search.search import Limits, Searcher
from hetspmd.search.space import search_space
from hetspmd.trace.trace import trace
from memory_cases import devices, stack, with_memory

CLUSTER = devices(0.4, 0.2, 0.2, 0.2, flops=2e7)


def theory_of(layers: int) -> Theory:
    model, example = stack(layers)
    return derive(trace(model, (), example, loss=None))


def made(theory: Theory) -> tuple[Searcher, tuple[CostModel, Lengths]]:
    at = CostModel(theory, CLUSTER), lengths_for(theory.axes, (0.4, 0.2, 0.2, 0.2))
    return Searcher(search_space(theory, Constraints())), at


def test_a_brief_search_ends_where_it_is_hard(monkeypatch: pytest.MonkeyPatch) -> None:
    theory = theory_of(6)
    searcher, at = made(theory)
    best = made(theory)[0].search(*at, Limits())
    assert best.stop_reason == "optimal"
    easy = searcher.search(*at, Limits(brief=True))
    assert (easy.cost, easy.stop_reason, searcher.hard) == (best.cost, "optimal", False)
    searcher, _ = made(theory)
    monkeypatch.setattr("hetspmd.search.search.HARD", 0)
    brief = searcher.search(*at, Limits(brief=True))
    assert brief.stop_reason == "sweep_limit"
    assert searcher.hard
    assert searcher.folds
    assert check(theory, brief.program) > 0
    assert brief.lower_bound <= best.cost < brief.cost
    again = searcher.search(*at, Limits(), start=brief)
    assert (again.cost, again.stop_reason) == (best.cost, "optimal")


def test_a_model_without_alike_layers_is_searched_to_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 8))
    searcher, at = made(derive(trace(model, (torch.zeros(64, 16),), {}, loss=lambda m, x: m(x).mean())))
    assert not searcher._may_fold
    monkeypatch.setattr("hetspmd.search.search.HARD", 0)
    assert searcher.search(*at, Limits(brief=True)).stop_reason == "optimal"


def test_a_brief_search_without_a_program_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    theory = theory_of(6)
    searcher, at = made(theory)
    best = made(theory)[0].search(*at, Limits())

    class Core:
        """Finds nothing within a limit on sweeps."""

        def __init__(self, core: Any) -> None:
            self.core, self.limits = core, list[int | None]()

        def __getattr__(self, name: str) -> Any:
            return getattr(self.core, name)

        def solve(self, *, max_sweeps: int | None, **options: Any) -> str:
            self.limits.append(max_sweeps)
            text = str(self.core.solve(max_sweeps=max_sweeps, **options))
            if max_sweeps is None:
                return text
            return json.dumps(json.loads(text) | {"cost": None, "rows": [], "moves": []})

    core = Core(searcher.core)
    monkeypatch.setitem(vars(searcher), "core", core)
    monkeypatch.setattr("hetspmd.search.search.HARD", 0)
    found = searcher.search(*at, Limits(brief=True))
    assert core.limits == [0, None]
    assert (found.cost, found.stop_reason) == (best.cost, "optimal")


def test_the_first_hard_search_is_folded(monkeypatch: pytest.MonkeyPatch) -> None:
    """It starts from the program of the brief one; what is to be certain is searched among all programs."""
    theory = theory_of(6)
    monkeypatch.setattr("hetspmd.search.search.HARD", 0)
    ctx = Synthesis(theory, CLUSTER, Constraints(), Limits())
    costs, lengths = ctx.costs(ctx.everyone), lengths_for(theory.axes, (0.4, 0.2, 0.2, 0.2))
    asked = list[tuple[bool, bool, str | None]]()
    search = Searcher.search

    def watched(self: Searcher, *args: Any, **more: Any) -> Any:
        start = more.get("start")
        asked.append((args[2].brief, more["folded"], None if start is None else start.stop_reason))
        return search(self, *args, **more)

    monkeypatch.setattr(Searcher, "search", watched)
    first = ctx.search(costs, lengths)
    assert asked == [(True, False, None), (False, True, "sweep_limit")]
    assert (first.stop_reason, first.lower_bound) == ("folded", 0.0)
    asked.clear()
    ctx.search(costs, lengths, start=first)
    certain = ctx.search(costs, lengths, start=first, certain=True)
    assert asked == [(False, True, "folded"), (False, False, "folded")]
    assert (certain.stop_reason, certain.gap) == ("optimal", 0.0)
    assert certain.cost <= first.cost


def test_bounds_at_prices_of_memory_are_brief_where_searches_are_hard(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They are still bounds: no program that fits costs less."""
    model, example = stack(6)
    free = hetspmd.compile(model, example, CLUSTER)
    limited = with_memory(CLUSTER, [0.75 * n for n in free.cost.memory_bytes])
    easy = hetspmd.compile(model, example, limited)
    search, asked = Searcher.search, list[bool]()

    def watched(self: Searcher, *args: Any, **more: Any) -> Any:
        if more.get("prices") is not None and not more["folded"]:
            asked.append(args[2].brief)
        return search(self, *args, **more)

    monkeypatch.setattr(Searcher, "search", watched)
    monkeypatch.setattr("hetspmd.search.search.HARD", 0)
    plan = hetspmd.compile(model, example, limited)
    assert asked
    assert all(asked)
    assert 0.0 < plan.search.lower_bound <= plan.search.cost
    assert plan.cost.step_seconds <= 1.02 * easy.cost.step_seconds
