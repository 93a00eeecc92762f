"""Lower bounds of a step on sets of devices, and the sets that they leave out."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import numpy as np
import pytest
from cost_graphs import cluster, mlp, random_program
from test_segments import halves

from hetspmd.cost.model import CostModel
from hetspmd.cost.step import Stages
from hetspmd.ratios import ratios as ratios_module
from hetspmd.ratios.lower_bound import LowerBound
from hetspmd.ratios.problem import Problem
from hetspmd.ratios.ratios import optimise
from hetspmd.ratios.starts import proportional

RATES = (1e8, 1e8, 2e8, 4e8)


@pytest.mark.parametrize("segments", [1, 2, 3])
def test_no_ratios_on_a_set_take_less(segments: int) -> None:
    random = np.random.default_rng(segments)
    theory = mlp(batch=12, width=6, hidden=10, layers=3)
    theory = halves(theory, segments) if segments > 1 else theory
    near = list[float]()
    for seed in range(25):
        launch, bandwidth, memory = random.choice([1e-9, 1e-6, 1e-4]), random.choice([1e5, 1e7, 1e9]), 1e8
        model = CostModel(
            theory, cluster(*RATES, bandwidth=bandwidth, memory_bandwidth=memory, launch=launch)
        )
        problem = Problem(Stages(model, random_program(theory, seed)))
        bound = LowerBound(problem, random.dirichlet(np.ones(4), segments))
        for _ in range(40):
            present = random.random((segments, 4)) < 0.6
            present[:, random.integers(4)] = True
            # Any part of the set, with shares of any size.
            shares = present * random.dirichlet(np.ones(4) * random.choice([0.1, 1.0, 10.0]), segments)
            if not shares.sum(axis=1).all():
                continue
            shares /= shares.sum(axis=1, keepdims=True)
            least, seconds = bound.seconds(present), problem.step_seconds(shares)
            assert least <= seconds * (1 + 1e-12)
            near.append(least / seconds)
    assert max(near) > 0.95, "bounds are near what can be had"


def test_a_set_without_devices_takes_for_ever() -> None:
    theory = mlp(batch=12, width=6, hidden=10)
    model = CostModel(theory, cluster(*RATES))
    bound = LowerBound(Problem(Stages(model, random_program(theory, 1))), np.full((1, 4), 0.25))
    assert bound.seconds(np.zeros((1, 4), dtype=bool)) == np.inf


def programs_saved(
    monkeypatch: pytest.MonkeyPatch, bound: type, problems: Iterable[Callable[[], object]]
) -> int:
    """How many linear programs are not solved thanks to a lower bound, which changes the ratios of no problem."""
    solved, counts = ratios_module.minimise, {True: 0, False: 0}
    for best in problems:
        found = {}
        for bounded in (True, False):

            def counting(*args: Any, bounded: bool = bounded) -> object:
                counts[bounded] += 1
                return solved(*args)

            with monkeypatch.context() as patch:
                patch.setattr(ratios_module, "minimise", counting)
                if not bounded:
                    patch.setattr(bound, "seconds", lambda *_: -np.inf)
                found[bounded] = best()
        assert found[True] == found[False]
    return counts[False] - counts[True]


@pytest.mark.parametrize("segments", [1, 2])
def test_sets_that_are_left_out_change_nothing(segments: int, monkeypatch: pytest.MonkeyPatch) -> None:
    theory = mlp(batch=12, width=6, hidden=10, layers=2)
    theory = halves(theory, segments) if segments > 1 else theory

    def problem(seed: int) -> Callable[[], object]:
        model = CostModel(theory, cluster(*RATES, bandwidth=[1e5, 1e7, 1e9][seed % 3], launch=1e-5))
        return partial(optimise, theory, model, random_program(theory, seed))

    assert programs_saved(monkeypatch, LowerBound, map(problem, range(12))) > 0


def test_the_best_number_of_many_devices() -> None:
    """As good as every number of the fastest devices, whichever the best is: a launch on each costs time."""
    theory = mlp(batch=240, width=6, hidden=10)
    fewer = set[int]()
    for seed in range(8):
        for bandwidth in (3e6, 3e7, 3e8):
            model = CostModel(
                theory, cluster(*np.linspace(1e8, 4e8, 40), bandwidth=bandwidth, launch=1e-5, latency=1e-5)
            )
            chosen = random_program(theory, seed)
            problem = Problem(Stages(model, chosen))
            start = np.array([proportional(model)])
            found = np.array(optimise(theory, model, chosen))
            best = min(
                problem.seconds_within(ratios_module.minimise(problem, present[None], start))
                for present in problem.sets()
            )
            fewer.add(np.count_nonzero(found))
            assert problem.seconds_within(found) <= best * (1 + 1e-8)
    assert len(fewer) > 3
