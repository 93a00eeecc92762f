"""A linear program at which the simplex method goes round in circles is solved at a looser tolerance."""

from __future__ import annotations

from dataclasses import replace

import highspy
import numpy as np
import pytest
from cost_graphs import cluster, data_parallel, mlp

import hetspmd
from hetspmd.cost.model import CostModel
from hetspmd.ratios import linear
from hetspmd.ratios.lower_bound import LowerBound
from hetspmd.ratios.ratio_thresholds import THRESHOLDS
from hetspmd.ratios.ratios import optimise_ratios
from workbench import cluster as devices
from workbench import traced


@pytest.fixture(autouse=True)
def every_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """No set of devices is left out for its lower bound."""
    monkeypatch.setattr(LowerBound, "seconds", lambda *_: -np.inf)


def test_where_no_tolerance_is_loose_enough_the_last_has_no_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    theory = mlp(batch=64, width=32, hidden=64)
    model = CostModel(theory, cluster(4e8, 2e8, 1e8, 1e8, bandwidth=1e6, memory_bandwidth=1e6))
    solved: list[int] = []
    solve = linear.LinearProgram.solve

    def noted(self: linear.LinearProgram) -> tuple[np.ndarray, np.ndarray]:
        found = solve(self)
        solved.append(len(self._looser))
        return found

    monkeypatch.setattr(linear.LinearProgram, "solve", noted)
    usual = optimise_ratios(theory, model, data_parallel(theory), start=(0.25,) * 4)
    assert set(solved) == {len(THRESHOLDS.tolerances) - 1}, "small programs need no looser one"
    solved.clear()
    monkeypatch.setattr(linear, "THRESHOLDS", replace(THRESHOLDS, simplex_steps=0))
    limited = optimise_ratios(theory, model, data_parallel(theory), start=(0.25,) * 4)
    assert 0 in solved, "some that need steps"
    assert limited == pytest.approx(usual, abs=1e-5)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::hetspmd.errors.MissingRuleWarning")
def test_no_program_of_googlenet_takes_millions_of_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Six of its 86 took ten million steps, and 84 of the 99 seconds of a compile, at the first tolerance alone."""
    steps: list[float] = []
    run = highspy.Highs.run

    def noted(self: highspy.Highs) -> object:
        found = run(self)
        size = self.getNumRow() + self.getNumCol()
        steps.append(self.getInfo().simplex_iteration_count / size)
        return found

    monkeypatch.setattr(highspy.Highs, "run", noted)
    entry = traced("googlenet")
    hetspmd.compile(entry.model, entry.example, devices(4, 2, 1, 1), loss=entry.loss, time_limit=3.0)
    assert len(steps) > 50
    assert max(steps) <= THRESHOLDS.simplex_steps
