"""The checker proves right programs and rejects every mutant of them.

Mutants are generated systematically from programs of four styles on three models. Mutants that are still
right are no fault of the checker; each such class is excluded by a condition that says why it is right, and
where a class mixes right and wrong mutants, the accepted ones are run and must equal the single device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import get_args

import pytest
from small_models import Case, case

from hetspmd.cluster.collective_kinds import Kind, kinds_between
from hetspmd.errors import ProofError
from hetspmd.optimize.compiler import plan_for
from hetspmd.placement import PARTIAL, REPLICATE, Placement, available, is_sharded, shard
from hetspmd.plan.plan import Plan
from hetspmd.program.checker import check
from hetspmd.program.program import Communicate, Compute, Program, Result, Step
from hetspmd.rules.rule import Triple
from hetspmd.rules.theory import Theory
from hetspmd.search import constraints as known
from hetspmd.search.constraints import Constraints
from hetspmd.trace.graph import PARAMETER
from workbench import cluster, simulated_error, single_device

MODELS = ("mlp", "conv", "attention")
STYLES: dict[str, Callable[[Theory], Constraints]] = {
    "data-parallel": known.data_parallel,
    "zero": known.zero_like,
    "tensor-parallel": known.tensor_parallel,
    "free": lambda _: Constraints(),
}
PROGRAMS = [(model, style) for model in MODELS for style in STYLES]


@cache
def made(model: str) -> Case:
    return case(model)


@cache
def plan(model: str, style: str) -> Plan:
    theory = made(model).theory
    return plan_for(theory, cluster(4, 2, 1), STYLES[style](theory), (0.6, 0.25, 0.15))


@dataclass(frozen=True)
class Mutant:
    """A changed program, and what was changed."""

    text: str
    program: Program


def with_steps(program: Program, steps: list[Step]) -> Program:
    return replace(program, steps=tuple(steps))


def changed(program: Program, index: int, *steps: Step) -> Program:
    """The program with other steps in the place of one."""
    return replace(program, steps=(*program.steps[:index], *steps, *program.steps[index + 1 :]))


def rejected(theory: Theory, mutants: Iterator[Mutant], least: int) -> None:
    """All mutants are ProofErrors with a message, and there are at least ``least`` of them."""
    count = 0
    for mutant in mutants:
        try:
            check(theory, mutant.program)
        except ProofError as error:
            count += bool(str(error))
            continue
        pytest.fail(f"proved a wrong program: {mutant.text}")
    assert count >= least, f"only {count} mutants"


@pytest.mark.parametrize(("model", "style"), PROGRAMS)
def test_right_programs_are_proved(model: str, style: str) -> None:
    found = plan(model, style)
    assert check(found.theory, found.program) >= len(found.program.steps)


@pytest.mark.parametrize(("model", "style"), PROGRAMS)
def test_no_collective_can_be_dropped(model: str, style: str) -> None:
    """The assembled programs hold no collective that nobody needs."""
    found = plan(model, style)
    program = found.program

    def mutants() -> Iterator[Mutant]:
        for i, step in enumerate(program.steps):
            if isinstance(step, Communicate):
                yield Mutant(f"without {step}", changed(program, i))

    rejected(found.theory, mutants(), least=1)


@pytest.mark.parametrize(("model", "style"), PROGRAMS)
def test_no_computation_can_be_dropped_or_repeated(model: str, style: str) -> None:
    """Right all the same: a source that is no parameter and that nobody reads."""
    found = plan(model, style)
    program, graph = found.program, found.graph

    def mutants() -> Iterator[Mutant]:
        for i, step in enumerate(program.steps):
            if isinstance(step, Compute):
                instruction = graph.instructions[step.instruction]
                unread = not any(graph.consumers.get(t) for t in instruction.outputs)
                if not (instruction.is_source and instruction.op != PARAMETER and unread):
                    yield Mutant(f"without {instruction.name}", changed(program, i))
                yield Mutant(f"{instruction.name} twice", changed(program, i, step, step))

    rejected(found.theory, mutants(), least=len(program.steps))


@pytest.mark.parametrize(("model", "style"), PROGRAMS)
def test_forms_of_collectives_cannot_change(model: str, style: str) -> None:
    """Another source, another target, another kind of another meaning. Right all the same: another
    implementation of the same triple, and a target of replicated for any kind that reaches it."""
    found = plan(model, style)
    theory, program = found.theory, found.program
    alike = [set(kinds_between("partial", "shard")), set(kinds_between("shard", "replicated"))]
    kinds = [kind for kind in get_args(Kind) if kind != "rebalance"]

    def mutants() -> Iterator[Mutant]:
        for i, step in enumerate(program.steps):
            if not isinstance(step, Communicate):
                continue
            dims = len(theory.graph.tensors[step.tensor].shape)
            for form in (-1, *range(2 + dims + 1), 97):
                if form != step.source:
                    yield Mutant(f"{step} from {form}", changed(program, i, replace(step, source=form)))
                if form != step.target:
                    yield Mutant(f"{step} to {form}", changed(program, i, replace(step, target=form)))
            for kind in kinds:
                if kind != step.kind and not any({kind, step.kind} <= same for same in alike):
                    yield Mutant(f"{step} as {kind}", changed(program, i, replace(step, kind=kind)))
            for tensor in (-1, len(theory.graph.tensors), *near(step.tensor, theory)):
                yield Mutant(f"{step} of {tensor}", changed(program, i, replace(step, tensor=tensor)))

    rejected(theory, mutants(), least=10)


def near(tensor: int, theory: Theory) -> list[int]:
    """The tensors before and after."""
    return [t for t in (tensor - 1, tensor + 1) if 0 <= t < len(theory.graph.tensors)]


@pytest.mark.parametrize(("model", "style"), PROGRAMS)
def test_the_grouped_spelling_of_a_collective_is_as_right(model: str, style: str) -> None:
    found = plan(model, style)
    other: dict[Kind, Kind] = {
        "all_gather": "grouped_broadcast", "grouped_broadcast": "ring_gather", "ring_gather": "all_gather",
        "reduce_scatter": "grouped_reduce", "grouped_reduce": "ring_reduce", "ring_reduce": "exchange_reduce",
        "exchange_reduce": "reduce_scatter",
    }  # fmt: skip
    steps = list(found.program.steps)
    for _ in range(3):
        steps = [
            replace(s, kind=other.get(s.kind, s.kind)) if isinstance(s, Communicate) else s for s in steps
        ]
        check(found.theory, with_steps(found.program, steps))


@pytest.mark.parametrize(("model", "style"), PROGRAMS)
def test_triples_cannot_change(model: str, style: str) -> None:
    """A precondition, a postcondition, a dim or the factor: the triple is then none of the theory, unless it
    equals another triple of the instruction (those are in the next test)."""
    found = plan(model, style)
    theory, program = found.theory, found.program

    def rows(step: Compute) -> Iterator[Triple]:
        row = step.row
        for side in ("pre", "post"):
            forms: tuple[Placement, ...] = getattr(row, side)
            for k, form in enumerate(forms):
                for other in (REPLICATE, PARTIAL, shard(0), shard(1), shard(2)):
                    if other != form:
                        yield replace(row, **{side: (*forms[:k], other, *forms[k + 1 :])})
            yield replace(row, **{side: (*forms, REPLICATE)})
        yield replace(row, factor=0 if row.factor is None else row.factor + 1)
        yield replace(row, name="invented")

    def mutants() -> Iterator[Mutant]:
        for i, step in enumerate(program.steps):
            if isinstance(step, Compute):
                for row in rows(step):
                    if row not in theory.rows[step.instruction]:
                        yield Mutant(f"{step} with {row}", changed(program, i, replace(step, row=row)))
                for number in (-1, len(theory.graph.instructions)):
                    yield Mutant(
                        f"{step} as {number}", changed(program, i, replace(step, instruction=number))
                    )

    rejected(theory, mutants(), least=200)


@pytest.mark.parametrize(("model", "style"), PROGRAMS)
def test_another_triple_is_rejected_or_right(model: str, style: str) -> None:
    """Another triple of the same instruction may fit its surroundings. Whatever the checker accepts is run."""
    subject, found = made(model), plan(model, style)
    theory, program = found.theory, found.program
    inputs = [subject.batch[i.path] for i in theory.graph.inputs]
    want = single_device(theory, subject.model, inputs)
    count, accepted = 0, []
    for i, step in enumerate(program.steps):
        if isinstance(step, Compute):
            for row in theory.rows[step.instruction]:
                if row == step.row:
                    continue
                count += 1
                mutant = changed(program, i, replace(step, row=row))
                try:
                    check(theory, mutant)
                except ProofError:
                    continue
                accepted.append((theory.graph.instructions[step.instruction].name, row, mutant))
    assert count >= 30
    assert len(accepted) < count / 2
    for name, row, mutant in accepted[:: max(1, len(accepted) // 8)]:
        error = simulated_error(theory, mutant, found.lengths, subject.model, inputs, want)
        assert error <= 1e-9, f"{name} by {row}"


@pytest.mark.parametrize(("model", "style"), PROGRAMS)
def test_steps_can_only_be_swapped_where_neither_needs_the_other(model: str, style: str) -> None:
    found = plan(model, style)
    theory, program = found.theory, found.program
    wrong = right = 0
    for i, (first, second) in enumerate(zip(program.steps, program.steps[1:], strict=False)):
        steps = [*program.steps[:i], second, first, *program.steps[i + 2 :]]
        if needs(theory, program.steps[:i], first, second):
            wrong += 1
            with pytest.raises(ProofError):
                check(theory, with_steps(program, steps))
        else:
            right += 1
            check(theory, with_steps(program, steps))
    assert wrong >= 10
    assert right >= 10


def needs(theory: Theory, before: tuple[Step, ...], first: Step, second: Step) -> bool:
    """Whether ``second`` reads what only ``first`` provides."""
    made_by_first = set(provided(theory, first))
    if isinstance(second, Communicate):
        return (second.tensor, second.source) in made_by_first
    there = {p for step in before for p in provided(theory, step)}
    inputs = theory.graph.instructions[second.instruction].inputs
    return any(
        any(t == tensor and available(f, form) for tensor, f in made_by_first)
        and not any(t == tensor and available(f, form) for tensor, f in there)
        for t, form in zip(inputs, second.row.pre, strict=True)
    )


def provided(theory: Theory, step: Step) -> list[tuple[int, Placement]]:
    if isinstance(step, Communicate):
        return [(step.tensor, step.target)]
    outputs = theory.graph.instructions[step.instruction].outputs
    return [(t, f) for t, f in zip(outputs, step.row.post, strict=True) if t >= 0]


@pytest.mark.parametrize(("model", "style"), PROGRAMS)
def test_results_cannot_be_forgotten_or_claimed_in_another_form(model: str, style: str) -> None:
    """Right all the same: an output that is held whole, claimed as a slice along a dim that has lengths."""
    found = plan(model, style)
    theory, program = found.theory, found.program
    assert program.loss is not None
    whole = {t for step in program.steps for t, f in provided(theory, step) if f == REPLICATE}
    there = {p for step in program.steps for p in provided(theory, step)}

    def claims(results: tuple[Result, ...], *, free: bool) -> Iterator[tuple[Result, ...]]:
        for k, result in enumerate(results):
            yield (*results[:k], *results[k + 1 :])
            yield (*results[:k], replace(result, tensor=result.tensor + 1), *results[k + 1 :])
            for form in (-1, REPLICATE, PARTIAL, shard(0), shard(1), shard(5)):
                if form == result.form or (free and (result.tensor, form) in there and form != PARTIAL):
                    continue
                axis = is_sharded(form) and theory.axes.axis(result.tensor, form - 2) is not None
                if free and result.tensor in whole and axis:
                    continue
                yield (*results[:k], replace(result, form=form), *results[k + 1 :])
        yield (*results, *results[-1:]) if results else (Result(0, REPLICATE),)

    def mutants() -> Iterator[Mutant]:
        for form in (PARTIAL, shard(0), -1):
            yield Mutant(f"loss as {form}", replace(program, loss=replace(program.loss, form=form)))
        yield Mutant("no loss", replace(program, loss=None))
        yield Mutant("another loss", replace(program, loss=program.gradients[0]))
        for gradients in claims(program.gradients, free=False):
            yield Mutant("gradients", replace(program, gradients=gradients))
        for buffers in claims(program.buffers, free=False):
            yield Mutant("buffers", replace(program, buffers=buffers))
        for outputs in claims(program.outputs, free=True):
            yield Mutant(f"outputs {outputs} of {program.outputs}", replace(program, outputs=outputs))
        if len(program.gradients) > 1:
            yield Mutant("order", replace(program, gradients=program.gradients[::-1]))

    rejected(theory, mutants(), least=20)


@pytest.mark.parametrize(("model", "style"), PROGRAMS)
def test_a_trained_parameter_cannot_be_stored_otherwise_than_its_gradient(model: str, style: str) -> None:
    """A claim of another stored form alone. Right all the same: parameters without a gradient."""
    found = plan(model, style)
    theory, program = found.theory, found.program
    trained = {theory.graph.producers[p.tensor] for p in theory.graph.parameters if p.gradient is not None}

    def mutants() -> Iterator[Mutant]:
        for i, step in enumerate(program.steps):
            if isinstance(step, Compute) and step.instruction in trained:
                for row in theory.rows[step.instruction]:
                    if row != step.row:
                        yield Mutant(f"{step} as {row}", changed(program, i, replace(step, row=row)))

    rejected(theory, mutants(), least=3)


@pytest.mark.parametrize("model", MODELS)
def test_a_program_of_another_model_is_rejected(model: str) -> None:
    other = MODELS[MODELS.index(model) - 1]
    with pytest.raises(ProofError):
        check(made(model).theory, plan(other, "free").program)


def test_messages_name_the_step_the_tensor_and_the_form() -> None:
    found = plan("mlp", "data-parallel")
    position, step = next((i, s) for i, s in enumerate(found.program.steps) if isinstance(s, Communicate))
    name = found.graph.tensors[step.tensor].name
    with pytest.raises(
        ProofError, match=rf"(at the end {name} \| replicated|needs {name} \| replicated).* is not proved"
    ):
        check(found.theory, changed(found.program, position))
    broken = changed(found.program, position, replace(step, kind="all_to_all"))
    with pytest.raises(ProofError, match=rf"step {position} \(all_to_all of {name}\): it cannot turn"):
        check(found.theory, broken)
    broken = changed(found.program, position, replace(step, kind="all_to_all", target=shard(1)))
    with pytest.raises(ProofError, match=r"it cannot turn partial into shard\(1\)"):
        check(found.theory, broken)
