"""Devices that run the loop over micro-batches in turns of their own compute what one device computes."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from program_builder import divided_in_the_loop, uneven
from ranks_in_turns import error_in_turns
from test_ranks_in_turns import MODELS, inputs_of

from hetspmd.errors import ProofError
from hetspmd.optimize.compiler import plan_for
from hetspmd.program.loop_steps import loop_steps, waits_in_loop
from hetspmd.program.micro_batch_check import check_own_turns
from hetspmd.program.micro_batches import in_own_turns, micro_batches
from hetspmd.program.program import Communicate
from hetspmd.program.turn_layout import TurnLayout
from hetspmd.program.turn_lengths import own_table
from hetspmd.search import constraints as known
from test_random_programs import subject
from workbench import cluster, single_device, traced

CLUSTER = cluster(5, 1, 3, 2)
RATIOS = (0.4, 0.1, 0.3, 0.2)


@pytest.mark.parametrize("name", MODELS)
def test_models(name: str) -> None:
    t = traced(name)
    want = single_device(t.theory, t.model, inputs_of(t))
    single = any(tensor.dtype == "float32" for tensor in t.theory.graph.tensors)  # the losses of some models
    for seed, (turns, ratios) in enumerate(
        [((1, 1, 3, 2), RATIOS), ((2, 1, 1, 5), (0.6, 0.0, 0.4, 0.0)), ((4, 1, 1, 1), RATIOS)]
    ):
        constraints = divided_in_the_loop(t.theory, seed)
        plan = plan_for(t.theory, CLUSTER, constraints, ratios)
        batches = in_own_turns(t.theory, micro_batches(t.theory, 2), turns)
        check_own_turns(t.theory, batches, plan.program, 4)
        moved = sum(isinstance(step, Communicate) for step in plan.program.steps)
        assert moved, "the program divides the work"
        error = error_in_turns(
            t.theory, plan.program, plan.schedule, batches, plan.lengths, t.model, inputs_of(t), want
        )
        assert error < (1e-6 if single else 1e-9), turns


@pytest.mark.parametrize("name", ["mlp", "attention", "vocabulary", "experts"])
def test_random_turns_and_lengths(name: str) -> None:
    of = subject(name)
    for seed in range(8):
        draw = random.Random(seed)
        world = draw.randrange(1, 6)
        constraints = divided_in_the_loop(of.theory, seed)
        plan = plan_for(of.theory, cluster(*range(1, world + 1)), constraints, (1 / world,) * world)
        turns = tuple(draw.randrange(1, 5) for _ in range(world))
        batches = in_own_turns(of.theory, micro_batches(of.theory, 2), turns)
        error = error_in_turns(
            of.theory,
            plan.program,
            plan.schedule,
            batches,
            uneven(of.theory, world, seed),
            of.model,
            of.inputs,
            of.want,
        )
        assert error < 1e-9, (seed, turns)


def test_a_table_of_turns() -> None:
    draw = random.Random(3)
    for _ in range(200):
        world = draw.randrange(1, 6)
        turns = [draw.randrange(1, 7) for _ in range(world)]
        units = [draw.choice((0, 1, 2, 5, 17)) for _ in range(world)]
        table = own_table(turns, units)
        assert len(table) == max(turns)
        for j in range(world):
            own = [row[j] for row in table]
            assert sum(own) == units[j]
            assert not any(own[turns[j] :])
            assert max(own[: turns[j]]) - min(own[: turns[j]]) <= 1


def test_micro_batches_are_what_the_devices_take_at_a_time() -> None:
    of = subject("mlp")
    batches = in_own_turns(of.theory, micro_batches(of.theory, 2), (1, 3))
    lengths = uneven(of.theory, 2, 0)
    layout = TurnLayout(of.theory, batches, lengths)
    for axis in batches.loop.axes:
        mine, other = lengths.units[axis]
        first, *rest = layout.outer.lengths.units[axis]
        assert first + sum(rest) == mine + other
        assert first >= mine
        assert layout.inside(axis, first, 0)[0] == mine
    assert batches.turns_of(2) == (1, 3)


def test_collectives_in_the_loop_are_refused_by_the_proof() -> None:
    """The proof says of each program what the walk through its steps says."""
    refused = 0
    for name in ("mlp", "attention"):
        of = subject(name)
        batches = in_own_turns(of.theory, micro_batches(of.theory, 2), (2, 1, 1))
        kinds = (known.data_parallel, known.zero_like, known.tensor_parallel)
        programs = [plan_for(of.theory, cluster(3, 2, 1), kind(of.theory), (0.5, 0.3, 0.2)) for kind in kinds]
        programs.append(
            plan_for(of.theory, cluster(3, 2, 1), divided_in_the_loop(of.theory, 1), (0.5, 0.3, 0.2))
        )
        for plan in programs:
            steps = loop_steps(of.theory.graph, batches, plan.program).places
            inside = [p for p in steps if isinstance(plan.program.steps[p], Communicate)]
            assert waits_in_loop(of.theory.graph, batches, plan.program) == bool(inside)
            if inside:
                refused += 1
                with pytest.raises(
                    ProofError, match="is in the loop, which devices run in turns of their own"
                ):
                    check_own_turns(of.theory, batches, plan.program, 3)
            else:
                check_own_turns(of.theory, batches, plan.program, 3)
            for turns in ((2, 1), (2, 0, 1), (3, 1, 1)):
                with pytest.raises(ProofError, match="cannot be turns of their own"):
                    check_own_turns(of.theory, replace(batches, own_turns=turns), plan.program, 3)
    assert refused >= 2
