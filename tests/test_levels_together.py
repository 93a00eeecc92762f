"""Gathers ahead in programs across machines, and in programs of several segments, equal the single device.

Parameters that lie in shards are gathered up to four groups ahead, in buckets of several sizes. Machines have one
to three accelerators; segments have lengths of their own.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from functools import cache

import pytest

from hetspmd.cost.level_memory import inside_bytes
from hetspmd.optimize.compiler import plan_for
from hetspmd.optimize.partition import partition, segmented
from hetspmd.placement import is_sharded, same_dim
from hetspmd.program.lengths import lengths_for
from hetspmd.program.level_layout import LevelLayout
from hetspmd.program.levels import between
from hetspmd.program.program import Communicate, Program
from hetspmd.rules.theory import Theory
from hetspmd.search import constraints as known
from hetspmd.trace.graph import PARAMETER
from hetspmd.verify.comparison import verify
from scheduled import nested_steps, rescheduled
from test_nested_programs import BUCKETS, MODES, error_of, inner_program
from test_random_programs import TOLERANCE, Subject, subject
from workbench import cluster, single_device, traced

from program_builder import cheap_random_program, random_program, uneven  # isort: skip  # found by workbench

AHEAD = (1, 2, 4)
DEVICES = cluster(5, 1, 3, 2)
MATRIX = ((0.5, 0.0, 0.3, 0.2), (0.0, 0.4, 0.1, 0.5))
NAMES = (
    "mlp",
    *(pytest.param(n, marks=pytest.mark.slow) for n in ("conv", "attention", "vocabulary", "experts")),
)
COUNT = 12


def program_of(of: Subject, seed: int) -> Program:
    return (random_program if seed % 2 else cheap_random_program)(of.theory, seed)


def gathers(of: Subject, program: Program) -> int:
    """Collectives of parameters, of which some are ahead of what reads them."""
    graph = of.theory.graph
    moved = (s.tensor for s in program.steps if isinstance(s, Communicate))
    return sum(graph.producer(t).op == PARAMETER for t in moved)


@cache
def cut(name: str) -> Theory:
    """The model's graph in two segments."""
    theory = traced(name).theory
    return segmented(theory, partition(theory, [1.0] * len(theory.graph.instructions), 2))


@pytest.mark.parametrize("name", NAMES)
def test_across_machines(name: str) -> None:
    of, seen = subject(name), Counter[str]()
    for seed in range(COUNT):
        dice = random.Random(seed)
        accelerators = [dice.choice((1, 2, 3)) for _ in range(dice.choice((2, 3)))]
        outer = program_of(of, seed)
        layout = LevelLayout(of.theory, uneven(of.theory, len(accelerators), seed), accelerators)
        inner = inner_program(of, layout, outer, seed, MODES[seed % 3])
        distance = AHEAD[seed % 3]
        sizes = BUCKETS[seed // 3 % 3], BUCKETS[(seed // 3 + seed) % 3]
        nested = nested_steps(of.theory, outer, inner, *sizes, prefetch_distance=distance)
        error = error_of(of, nested, layout)
        assert error <= TOLERANCE, f"seed {seed}: {error}"
        seen["gathers"] += gathers(of, outer) if distance > 1 else 0
        seen["accelerators"] += max(accelerators) > 1
    assert seen["gathers"] > COUNT // 4
    assert seen["accelerators"] > COUNT // 2


@pytest.mark.parametrize("ahead", AHEAD[1:])
@pytest.mark.parametrize("name", ["gpt2", pytest.param("bert-moe", marks=pytest.mark.slow)])
def test_in_segments(name: str, ahead: int) -> None:
    """Parameters in shards; two devices have no share of one of the segments."""
    entry, theory = traced(name), cut(name)
    plan = plan_for(theory, DEVICES, known.zero_like(theory), MATRIX)
    moved = [s for s in plan.program.steps if isinstance(s, Communicate)]
    assert sum(s.kind == "rebalance" for s in moved) > 1
    assert sum(theory.graph.producer(s.tensor).op == PARAMETER for s in moved) > 4
    plan = plan.with_step(schedule=rescheduled(plan, ahead))
    verify(
        entry.model, entry.example, DEVICES, plan=plan, loss=entry.loss, optimizers=("sgd",), tolerance=1e-9
    ).require()


@cache
def cut_subject(name: str) -> Subject:
    """By modules, or a model that is one module by thirds of its instructions."""
    of = subject(name)
    count = len(of.theory.graph.instructions)
    places = partition(of.theory, [1.0] * count, 3)
    theory = segmented(of.theory, places if max(places) else [3 * i // count for i in range(count)])
    assert theory.graph.segment_count > 1
    # What is drawn depends on an instruction's number.
    return replace(of, theory=theory, want=single_device(theory, of.model, of.inputs))


@pytest.mark.parametrize("name", NAMES)
def test_segments_across_machines(name: str) -> None:
    """Every axis has lengths of its own, so that the copies at the cuts change hands; some lengths agree."""
    of, seen = cut_subject(name), Counter[str]()
    for seed in range(COUNT):
        dice = random.Random(seed)
        accelerators = [dice.choice((1, 2, 3)) for _ in range(dice.choice((2, 3)))]
        lengths = uneven(of.theory, len(accelerators), seed)
        if seed % 3 == 2:
            shares = [dice.random() for _ in accelerators]
            lengths = lengths_for(of.theory.axes, shares)
        outer = program_of(of, seed)
        layout = LevelLayout(of.theory, lengths, accelerators)
        inner = inner_program(of, layout, outer, seed, MODES[seed // 2 % 3])
        distance = AHEAD[seed % 3]
        sizes = BUCKETS[seed // 3 % 3], BUCKETS[(seed // 3 + seed) % 3]
        nested = nested_steps(of.theory, outer, inner, *sizes, prefetch_distance=distance)
        error = error_of(of, nested, layout)
        assert error <= TOLERANCE, f"seed {seed}: {error}"
        inside_bytes(layout, nested)
        for step in (*nested.forward, *nested.backward):
            seen["nothing"] += layout.is_nothing(step)
            for move in between(step):
                if move.kind == "rebalance" and not layout.is_nothing(step):
                    seen["rebalance"] += 1
                    seen["of slices inside"] += is_sharded(move.collected)
                    seen["of the same dim"] += same_dim(move.source, move.collected)
        seen["inner"] += sum(s.kind == "rebalance" for s in inner.steps if isinstance(s, Communicate))
    assert seen["rebalance"] > COUNT
    if name == "mlp":
        assert min(seen[k] for k in ("nothing", "of slices inside", "of the same dim", "inner")) > 0, seen
