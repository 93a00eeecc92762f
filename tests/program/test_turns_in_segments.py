"""Programs of several segments in micro-batches: every rank computes what one device computes of the whole batch,
whatever the lengths of the segments."""

from __future__ import annotations

from dataclasses import replace

import pytest
from program_builder import cheap_random_program, random_program, uneven
from ranks_in_turns import error_in_turns
from test_ranks_in_turns import CLUSTER, KINDS, PARTS, in_loop, inputs_of

from hetspmd.errors import ProofError
from hetspmd.optimize.compiler import plan_for
from hetspmd.optimize.in_micro_batches import composed, in_micro_batches
from hetspmd.optimize.partition import partition, segmented
from hetspmd.placement import after_cut, is_before_cut, is_sharded
from hetspmd.program.micro_batch_check import check_loop
from hetspmd.program.micro_batches import micro_batches
from hetspmd.program.program import Communicate, Program
from hetspmd.program.schedule import make_schedule
from hetspmd.program.turn_layout import TurnLayout
from hetspmd.program.turn_lengths import turn_lengths
from hetspmd.program.turn_steps import turn_steps
from hetspmd.rules.theory import Theory
from hetspmd.search.constraints import Constraints, data_parallel
from hetspmd.trace.graph import REBALANCE
from test_random_programs import subject
from workbench import cluster, single_device, traced

MATRIX = ((0.5, 0.0, 0.3, 0.2), (0.0, 0.4, 0.1, 0.5), (0.25, 0.25, 0.25, 0.25))
MODELS = ["gpt2", *(pytest.param(name, marks=pytest.mark.slow) for name in ("vit", "t5", "unet"))]

pytestmark = pytest.mark.filterwarnings("ignore::hetspmd.errors.DroppedOutputWarning")


def cut(theory: Theory, count: int) -> Theory:
    """The theory in so many segments, or as many as there are pieces."""
    return segmented(theory, partition(theory, [1.0] * len(theory.graph.instructions), count))


def rebalances(program: Program) -> list[Communicate]:
    return [s for s in program.steps if isinstance(s, Communicate) and s.kind == "rebalance"]


@pytest.mark.parametrize("name", ["mlp", "attention", "vocabulary"])
def test_random_programs(name: str) -> None:
    of = subject(name)
    theory = cut(of.theory, 3)
    want, moved = single_device(theory, of.model, of.inputs), 0
    assert theory.axes.segments > 1
    for seed in range(8):
        batches = in_loop(theory, micro_batches(theory, 2), seed % 3 / 2, seed)
        check_loop(theory, batches.loop)
        program = (random_program if seed % 2 else cheap_random_program)(theory, seed)
        turns = turn_lengths(theory, batches.loop.axes, parts := PARTS[seed % 3])
        error = error_in_turns(
            theory,
            program,
            make_schedule(theory, program, 1000.0),
            replace(batches, count=len(parts), turns=turns),
            uneven(theory, 3, seed),
            of.model,
            of.inputs,
            want,
        )
        assert error < 1e-9, seed
        moved += len(rebalances(program))
    assert moved > 8


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", MODELS)
def test_known_programs(name: str, kind: str) -> None:
    """Of tied weights, too, whose copies are in shards."""
    t = traced(name)
    theory = cut(t.theory, 3)
    plan = plan_for(theory, CLUSTER, KINDS[kind](theory), MATRIX)
    assert rebalances(plan.program)
    want = single_device(theory, t.model, inputs_of(t))
    single = any(tensor.dtype == "float32" for tensor in theory.graph.tensors)  # the losses of some models
    for parts, part in zip(PARTS, (1.0, 0.5, 0.0), strict=True):
        batches = in_loop(theory, micro_batches(theory, 2), part)
        turns = turn_lengths(theory, batches.loop.axes, parts)
        error = error_in_turns(
            theory,
            plan.program,
            plan.schedule,
            replace(batches, count=len(parts), turns=turns),
            plan.lengths,
            t.model,
            inputs_of(t),
            want,
        )
        assert error < (1e-6 if single else 1e-9), parts


def test_a_copy_lies_in_time_as_what_it_is_a_copy_of() -> None:
    """On the devices it lies as its original until it is exchanged, turn by turn."""
    theory, batches = in_micro_batches(traced("gpt2").theory, 2)
    theory = cut(theory, 2)
    batches = micro_batches(theory, 2)
    ratios = ((0.5, 0.5), (0.8, 0.2))
    plan = plan_for(
        theory, cluster(1, 1), composed(theory, batches, data_parallel(theory)), ratios, batches=batches
    )
    layout, steps = (
        TurnLayout(theory, batches, plan.lengths),
        turn_steps(theory, plan.program, plan.schedule, batches),
    )
    inside = [s for s in steps.turn if getattr(s, "kind", "") == "rebalance"]
    assert inside
    for step in inside:
        key = step.tensor, step.outer, step.source
        assert is_sharded(step.outer)
        assert is_before_cut(step.source)
        for turn in range(2):
            before, after = layout.extents(key, turn), layout.extents((*key[:2], step.target), turn)
            assert sum(before) == sum(after)
        assert not layout.is_nothing(step)
    alike = TurnLayout(theory, batches, plan_for(theory, cluster(1, 1), Constraints(), (0.5, 0.5)).lengths)
    assert all(alike.is_nothing(step) for step in inside)


def test_cuts_at_equal_ratios_cost_nothing() -> None:
    seconds = []
    for count in (1, 3):
        theory, _ = in_micro_batches(traced("gpt2").theory, 3)
        theory = theory if count == 1 else cut(theory, count)
        batches = micro_batches(theory, 3)
        constraints = composed(theory, batches, data_parallel(theory))
        plan = plan_for(
            theory, cluster(4, 2, 1), constraints, ((4 / 7, 2 / 7, 1 / 7),) * count, batches=batches
        )
        seconds.append(plan.cost.step_seconds)
    assert seconds[1] == pytest.approx(seconds[0], rel=1e-9)


def test_the_proof_asks_that_copies_are_divided_alike_in_time() -> None:
    theory = cut(traced("gpt2").theory, 2)
    loop = micro_batches(theory, 2).loop
    copies = [
        i for i in theory.graph.instructions if i.op == REBALANCE and is_before_cut(loop.rows[i.id].post[0])
    ]
    axes = {
        theory.axes.sharded(i.outputs[0], form)
        for i in copies
        for form in (loop.rows[i.id].post[0], after_cut(loop.rows[i.id].post[0]))
    }
    assert copies
    for axis in axes:
        assert axis is not None
        with pytest.raises(ProofError):
            check_loop(theory, replace(loop, axes=loop.axes - {axis.id}))
