"""From chosen values to a program: every value is there before it is read, and collectives stand where they
should."""

from __future__ import annotations

from functools import cache

import pytest
from small_models import case

from hetspmd.cost.model import CostModel
from hetspmd.placement import REPLICATE, Placement, available, shard
from hetspmd.program.lengths import lengths_for
from hetspmd.program.program import Communicate, Compute, Program
from hetspmd.rules.theory import Theory
from hetspmd.search import constraints as known
from hetspmd.search.constraints import Constraints
from hetspmd.search.order import assemble_program
from hetspmd.search.search import Limits, SearchResult, search
from hetspmd.search.space import Space, search_space
from hetspmd.trace.graph import PARAMETER
from workbench import cluster, randomness  # noqa: F401  # workbench finds the shared helpers

STYLES = {
    "free": lambda _: Constraints(),
    "data-parallel": known.data_parallel,
    "zero": known.zero_like,
    "tensor-parallel": known.tensor_parallel,
}
CASES = [(model, style) for model in ("mlp", "conv", "attention") for style in STYLES]


@cache
def theory_of(name: str) -> Theory:
    return case(name).theory


@cache
def found(name: str, style: str) -> tuple[Space, SearchResult]:
    theory = theory_of(name)
    space = search_space(theory, STYLES[style](theory))
    costs = CostModel(theory, cluster(4, 2, 1))
    return space, search(space, costs, lengths_for(theory.axes, (0.6, 0.25, 0.15)), Limits())


def readers(theory: Theory, program: Program, tensor: int, source: Placement) -> list[int]:
    """Positions of computations that need more of ``tensor`` than its produced form."""
    return [
        position
        for position, step in enumerate(program.steps)
        if isinstance(step, Compute)
        and any(
            t == tensor and not available(source, form)
            for t, form in zip(theory.graph.instructions[step.instruction].inputs, step.row.pre, strict=True)
        )
    ]


@pytest.mark.parametrize(("model", "style"), CASES)
def test_every_form_is_there_before_it_is_read(model: str, style: str) -> None:
    theory, program = theory_of(model), found(model, style)[1].program
    there: dict[int, set[Placement]] = {}
    for step in program.steps:
        if isinstance(step, Communicate):
            assert step.source in there[step.tensor]
            there[step.tensor].add(step.target)
            continue
        instruction = theory.graph.instructions[step.instruction]
        for t, form in zip(instruction.inputs, step.row.pre, strict=True):
            assert any(available(have, form) for have in there[t]), instruction.name
        for t, form in zip(instruction.outputs, step.row.post, strict=True):
            if t >= 0:
                there[t] = {form}
    for result in (program.loss, *program.outputs, *program.gradients, *program.buffers):
        assert result is not None
        assert any(available(have, result.form) for have in there[result.tensor])


@pytest.mark.parametrize(("model", "style"), CASES)
def test_computations_keep_the_order_of_the_graph(model: str, style: str) -> None:
    theory, program = theory_of(model), found(model, style)[1].program
    computed = [s.instruction for s in program.steps if isinstance(s, Compute)]
    assert computed == [i.id for i in theory.graph.instructions]


@pytest.mark.parametrize(("model", "style"), CASES)
def test_collectives_start_early_but_those_of_parameters_and_for_backward_late(
    model: str, style: str
) -> None:
    theory, program = theory_of(model), found(model, style)[1].program
    graph = theory.graph
    late = early = 0
    for position, step in enumerate(program.steps):
        if not isinstance(step, Communicate):
            continue
        producer = graph.producer(step.tensor)
        reading = readers(theory, program, step.tensor, step.source)
        first = program.steps[reading[0]] if reading else None
        assert first is None or isinstance(first, Compute)
        if first and (producer.is_source or graph.instructions[first.instruction].phase != producer.phase):
            between = program.steps[position + 1 : reading[0]]
            late += 1
        else:
            made = next(
                i
                for i, s in enumerate(program.steps)
                if isinstance(s, Compute) and s.instruction == producer.id
            )
            between = program.steps[made + 1 : position]
            early += 1
        assert all(isinstance(s, Communicate) for s in between), "only collectives stand between"
    assert early > 0
    assert late > 0 or style in ("data-parallel", "tensor-parallel", "free")


@pytest.mark.parametrize(("model", "style"), CASES)
def test_at_most_one_collective_per_tensor_and_none_unneeded(model: str, style: str) -> None:
    theory, program = theory_of(model), found(model, style)[1].program
    moved = [s.tensor for s in program.steps if isinstance(s, Communicate)]
    assert len(moved) == len(set(moved))
    wanted = {(r.tensor, r.form) for r in (*program.outputs, *program.gradients, *program.buffers)}
    if program.loss is not None:
        wanted.add((program.loss.tensor, program.loss.form))
    for step in program.steps:
        if isinstance(step, Communicate):
            reading = readers(theory, program, step.tensor, step.source)
            assert reading or any(t == step.tensor for t, _ in wanted), step


def test_gradients_are_left_as_their_parameters_are_stored() -> None:
    for model, style in CASES:
        theory, program = theory_of(model), found(model, style)[1].program
        stored = {
            theory.graph.instructions[s.instruction].outputs[0]: s.row.post[0]
            for s in program.steps
            if isinstance(s, Compute) and theory.graph.instructions[s.instruction].op == PARAMETER
        }
        trained = [p for p in theory.graph.parameters if p.gradient is not None]
        assert [(r.tensor, r.form) for r in program.gradients] == [
            (p.gradient, stored[p.tensor]) for p in trained
        ]


def test_a_collective_that_nobody_needs_is_left_out() -> None:
    space, best = found("mlp", "data-parallel")
    theory = space.theory
    needed = {s.tensor for s in best.program.steps if isinstance(s, Communicate)}
    gathered = list(best.moves)
    for instruction in theory.graph.instructions:
        row = theory.rows[instruction.id][best.rows[instruction.id]]
        for t, form in zip(instruction.outputs, row.post, strict=True):
            if t >= 0 and form == shard(0) and gathered[t] is None:
                gathered[t] = (form, REPLICATE, "all_gather")
    assert sum(m is not None for m in gathered) > len(needed) + 5
    assert assemble_program(space, best.rows, gathered) == best.program
