"""Lower bounds of a step within the memory of sets of devices, and the steps of a program that can be full."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
from cost_graphs import cluster, mlp, random_program
from test_lower_bound import programs_saved
from test_segments import halves

from hetspmd.cost.memory import memory_profile
from hetspmd.cost.model import CostModel
from hetspmd.cost.step import Stages
from hetspmd.program.lengths import lengths_for
from hetspmd.program.program import Program
from hetspmd.ratios.bound_within_memory import MemoryBound
from hetspmd.ratios.problem import Problem, Room
from hetspmd.ratios.ratios import minimise, optimise
from hetspmd.rules.theory import Theory

RATES = (1e8, 1e8, 2e8, 4e8)


def made(segments: int, seed: int) -> tuple[Theory, CostModel, Program]:
    theory = mlp(batch=12, width=6, hidden=10, layers=3)
    theory = halves(theory, segments) if segments > 1 else theory
    bandwidth, launch = [1e5, 1e7, 1e9][seed % 3], [1e-9, 1e-6, 1e-5][seed // 3 % 3]
    model = CostModel(theory, cluster(*RATES, bandwidth=bandwidth, memory_bandwidth=1e8, launch=launch))
    return theory, model, random_program(theory, seed)


def room_for(theory: Theory, program: Program, parts: np.ndarray) -> Room:
    """Of what even shares hold, so large parts for each device."""
    even = (1 / len(parts),) * len(parts)
    profile = memory_profile(theory, program, lengths_for(theory.axes, even))
    free = Room.of(profile, np.full(len(parts), np.inf))
    held = free.held(np.full((theory.axes.segments, len(parts)), 1 / len(parts))).max(axis=0)
    return Room.of(profile, held * parts)


@pytest.mark.parametrize("segments", [1, 2, 3])
def test_no_ratios_within_the_memory_take_less(segments: int) -> None:
    random = np.random.default_rng(segments)
    near, closed, fitting = list[float](), 0, 0
    for seed in range(20):
        theory, model, program = made(segments, seed)
        # Equal devices have equal memory, so that they are of one kind.
        parts = random.uniform(0.8, 2.0, 3)[[0, 0, 1, 2]]
        problem = Problem(Stages(model, program), room=room_for(theory, program, parts))
        assert problem.room is not None
        bound = MemoryBound(problem, problem.room, random.dirichlet(np.ones(4), segments))
        for _ in range(60):
            present = random.random((segments, 4)) < 0.7
            present[:, random.integers(4)] = True
            shares = present * random.dirichlet(np.ones(4) * random.choice([1.0, 10.0, 100.0]), segments)
            if not shares.sum(axis=1).all():
                continue
            shares /= shares.sum(axis=1, keepdims=True)
            least, seconds = bound.seconds(present), problem.seconds_within(shares)
            closed += least == math.inf
            fitting += seconds < math.inf
            if seconds < math.inf:
                assert least <= seconds * (1 + 1e-12)
        best = minimise(problem, np.ones((segments, 4), dtype=bool), np.full((segments, 4), 0.25))
        if (seconds := problem.seconds_within(best)) < math.inf:
            near.append(bound.seconds(np.ones((segments, 4), dtype=bool)) / seconds)
    assert closed > 50
    assert fitting > 50
    assert max(near) > 0.95, "bounds are near what can be had"


def test_the_bound_knows_the_memory() -> None:
    """Of devices that have room for half of the work, one more or one less decides."""
    theory, model, program = made(1, 4)
    tight = room_for(theory, program, np.array([1.02, 1.02, 1.02, 1.02]))
    problem = Problem(Stages(model, program), room=tight)
    bound = MemoryBound(problem, tight, np.full((1, 4), 0.25))
    assert bound.seconds(np.ones((1, 4), dtype=bool)) < math.inf
    assert bound.seconds(np.array([[True, True, False, True]])) == math.inf
    # The program is as it was.
    assert bound.seconds(np.ones((1, 4), dtype=bool)) < math.inf


def test_sets_that_are_left_out_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def problem(seed: int) -> Callable[[], object]:
        theory, model, program = made(2, seed)
        room = room_for(theory, program, np.array([1.0, 1.0, 1.0 + seed / 50, 1.05]))
        return partial(optimise, theory, model, program, room=room)

    assert programs_saved(monkeypatch, MemoryBound, map(problem, range(12))) > 50


@pytest.mark.parametrize("segments", [1, 2])
def test_the_steps_that_are_kept_say_what_all_of_them_do(segments: int) -> None:
    random = np.random.default_rng(segments)
    for seed in range(6):
        theory, _, program = made(segments, seed)
        profile = memory_profile(theory, program, lengths_for(theory.axes, (0.25,) * 4))
        room = Room.of(profile, np.full(4, np.inf))
        every = Room(profile.whole, profile.cut, profile.in_turn, profile.times, room.capacity)
        assert len(room.whole) < len(every.whole)
        for _ in range(30):
            ratios = random.dirichlet(np.ones(4) * random.choice([0.1, 1.0, 10.0]), segments)
            assert room.held(ratios).max(axis=0) == pytest.approx(every.held(ratios).max(axis=0))
        parts = np.column_stack([room.whole, room.cut, room.in_turn])
        for place, row in enumerate(parts):
            others = np.delete(parts, place, axis=0)
            assert not (others >= row).all(axis=1).any()
