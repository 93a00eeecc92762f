"""The check of schedules: by what it accepts a program computes what the single device computes, and what cannot
run is refused by name."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest
from program_builder import cheap_random_program, data_parallel, random_program, uneven
from small_models import case

import workbench  # isort: split

from hetspmd.errors import PlanError
from hetspmd.placement import PARTIAL, REPLICATE, is_sharded
from hetspmd.program.program import Communicate, Compute, Program
from hetspmd.program.saved_tensors import SavedTensor
from hetspmd.program.schedule import Places, Schedule, make_schedule
from hetspmd.program.schedule_check import check_schedule
from hetspmd.rules.theory import Theory
from scheduled import lower
from test_random_programs import subject, with_final_outputs

NAMES = ("mlp", "conv", "attention")
BUCKETS = (0, 2_000, 10**9)


def cases(count: int) -> list[tuple[Theory, Program, Schedule]]:
    """Random programs of small models, with gathers ahead and buckets of several sizes."""
    found = []
    for name in NAMES:
        theory = case(name).theory
        for seed in range(count):
            program = (random_program if seed % 2 else cheap_random_program)(theory, seed)
            size = BUCKETS[seed % 3]
            found.append(
                (theory, program, make_schedule(theory, program, size, prefetch_distance=1 + seed % 4))
            )
    return found


def test_every_schedule_that_is_made_passes() -> None:
    seen = Counter[str]()
    for theory, program, schedule in cases(20):
        check_schedule(theory.graph, program, schedule)
        seen.update(saved.how for saved in schedule.saved)
        seen["buckets"] += sum(len(places) > 1 for places in (*schedule.forward, *schedule.backward))
    assert min(seen[how] for how in ("value", "slice", "mask", "buckets")) > 5


# mutations -----------------------------------------------------------------------------------------------------

Mutation = Callable[[Schedule, random.Random], Schedule]


def side_of(schedule: Schedule, dice: random.Random) -> str:
    return dice.choice([side for side in ("forward", "backward") if len(getattr(schedule, side)) > 1])


def with_side(schedule: Schedule, side: str, entries: list[Places]) -> Schedule:
    return replace(schedule, **{side: tuple(entries)})  # type: ignore[arg-type]


def swapped(schedule: Schedule, dice: random.Random) -> Schedule:
    side = side_of(schedule, dice)
    entries = list(getattr(schedule, side))
    at = dice.randrange(len(entries) - 1)
    entries[at : at + 2] = entries[at + 1], entries[at]
    return with_side(schedule, side, entries)


def moved(schedule: Schedule, dice: random.Random) -> Schedule:
    side = side_of(schedule, dice)
    entries = list(getattr(schedule, side))
    entry = entries.pop(dice.randrange(len(entries)))
    entries.insert(dice.randrange(len(entries) + 1), entry)
    return with_side(schedule, side, entries)


def dropped(schedule: Schedule, dice: random.Random) -> Schedule:
    side = side_of(schedule, dice)
    entries = list(getattr(schedule, side))
    entries.pop(dice.randrange(len(entries)))
    return with_side(schedule, side, entries)


def across(schedule: Schedule, dice: random.Random) -> Schedule:
    """An entry of one graph goes to the other one."""
    forward, backward = list(schedule.forward), list(schedule.backward)
    source, target = dice.choice([(forward, backward), (backward, forward)])
    if source:
        target.insert(dice.randrange(len(target) + 1), source.pop(dice.randrange(len(source))))
    return replace(schedule, forward=tuple(forward), backward=tuple(backward))


def merged(schedule: Schedule, dice: random.Random) -> Schedule:
    """Two entries become a bucket."""
    side = side_of(schedule, dice)
    entries = list(getattr(schedule, side))
    one, other = sorted(dice.sample(range(len(entries)), 2))
    entries[other] = (*entries[one], *entries[other])
    del entries[one]
    return with_side(schedule, side, entries)


def unsaved(schedule: Schedule, dice: random.Random) -> Schedule:
    saved = list(schedule.saved)
    if saved:
        saved.pop(dice.randrange(len(saved)))
    return replace(schedule, saved=tuple(saved))


def saved_otherwise(schedule: Schedule, dice: random.Random) -> Schedule:
    saved = list(schedule.saved)
    if saved:
        at = dice.randrange(len(saved))
        saved[at] = replace(saved[at], how=dice.choice(("value", "mask", "slice")))
    return replace(schedule, saved=tuple(saved))


MUTATIONS: tuple[Mutation, ...] = (swapped, moved, dropped, across, merged, unsaved, saved_otherwise)


def refusal(theory: Theory, program: Program, schedule: Schedule) -> str:
    """Why a schedule is refused; empty where it is not."""
    try:
        check_schedule(theory.graph, program, schedule)
    except PlanError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("mutate", MUTATIONS, ids=lambda m: m.__name__)
def test_what_is_accepted_computes_the_same(mutate: Mutation) -> None:
    """Of random mutations those that pass are run; those that do not are named."""
    seen = Counter[str]()
    for index in range(60):
        name = NAMES[index % len(NAMES)]
        of = subject(name)
        theory, dice = of.theory, random.Random(index)
        program = with_final_outputs((random_program if index % 2 else cheap_random_program)(theory, index))
        made = make_schedule(theory, program, BUCKETS[index % 3], prefetch_distance=1 + index % 4)
        schedule = mutate(made, dice)
        if schedule == made:
            continue
        lengths = uneven(theory, 2 + index % 2, index)
        problem = refusal(theory, program, schedule)
        if problem:
            assert "the program cannot run by its schedule" in problem
            seen["refused"] += 1
            continue
        error = workbench.simulated_error(
            theory, program, lengths, of.model, of.inputs, of.want, schedule=schedule
        )
        assert error <= 1e-9, f"{mutate.__name__} of program {index} of {name}: {error}"
        seen["run"] += 1
    assert seen["refused"] > 5
    if mutate in (swapped, moved):
        assert seen["run"] > 2


def test_what_lowering_cannot_write_is_refused() -> None:
    """Every mutation that ends in an error of lowering is one that the check finds before."""
    failed = 0
    for index, (theory, program, made) in enumerate(cases(12)):
        schedule = MUTATIONS[index % len(MUTATIONS)](made, random.Random(index))
        try:
            lower(theory, program, uneven(theory, 2, index), 1, workbench.CPU, schedule=schedule)
        except (PlanError, AttributeError, KeyError):
            failed += 1
            with pytest.raises(PlanError):
                check_schedule(theory.graph, program, schedule)
    assert failed > 3


# by name -------------------------------------------------------------------------------------------------------


def divided() -> tuple[Theory, Program, Schedule]:
    """Data parallelism of the attention model, with buckets."""
    theory = case("attention").theory
    program = data_parallel(theory, theory.graph.inputs[0].tensor, sharded_parameters=True)
    return theory, program, make_schedule(theory, program, 10**9)


def refused(theory: Theory, program: Program, schedule: Schedule, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        check_schedule(theory.graph, program, schedule)


def test_places_are_those_of_steps() -> None:
    theory, program, made = divided()
    refused(theory, program, replace(made, forward=(*made.forward, (10**6,))), "there is no step 1000000")
    refused(theory, program, replace(made, forward=(*made.forward, (-1,))), "there is no step -1")
    refused(theory, program, replace(made, backward=(*made.backward, made.forward[0])), "stands twice")
    refused(theory, program, replace(made, backward=(*made.backward, ())), "an entry has no step")
    refused(theory, program, replace(made, forward=made.forward[1:]), "is not in the forward")


def test_buckets_are_of_one_kind() -> None:
    theory, program, made = divided()
    computed = [p for p in made.backward if isinstance(program.steps[p[0]], Compute)]
    rest = tuple(p for p in made.backward if p not in computed[:2])
    refused(
        theory, program, replace(made, backward=((*computed[0], *computed[1]), *rest)), "has a computation"
    )
    (bucket,) = [p for p in made.backward if len(p) > 1][:1]
    small = replace(made, bucket_bytes=1)
    refused(theory, program, small, "more than the 1 of a bucket")
    step = program.steps[bucket[0]]
    assert isinstance(step, Communicate)
    kinds = [
        p for p in made.forward if isinstance(s := program.steps[p[0]], Communicate) and s.kind != step.kind
    ]
    without = tuple(p for p in made.forward if p != kinds[0])
    mixed = tuple((*p, *kinds[0]) if p == bucket else p for p in made.backward)
    refused(theory, program, replace(made, forward=without, backward=mixed), "several kinds or dtypes")


def test_saved_tensors_are_there_and_read() -> None:
    theory, program, made = divided()
    refused(theory, program, replace(made, saved=made.saved[1:]), "which is not there")
    refused(theory, program, replace(made, saved=(*made.saved, made.saved[0])), "twice")
    foreign = SavedTensor(10**6, REPLICATE, "value")
    refused(
        theory, program, replace(made, saved=(*made.saved, foreign)), "tensor 1000000, which there is not"
    )
    gradient = program.gradients[0]
    late = SavedTensor(gradient.tensor, gradient.form, "value")
    refused(theory, program, replace(made, saved=(*made.saved, late)), "the forward does not have")
    saved = {s.key for s in made.saved}
    unread = next(
        (t, f)
        for p in program.steps
        if isinstance(p, Compute) and not theory.graph.instructions[p.instruction].is_source
        for t, f in zip(theory.graph.instructions[p.instruction].outputs, p.row.post, strict=True)
        if (t, f) not in saved and theory.graph.instructions[p.instruction].phase == "forward"
    )
    more = SavedTensor(*unread, "value")
    refused(theory, program, replace(made, saved=(*made.saved, more)), "the backward does not read it")
    value = next(s for s in made.saved if is_sharded(s.form))
    rest = tuple(s for s in made.saved if s is not value)
    masked = replace(value, how="mask")
    refused(theory, program, replace(made, saved=(*rest, masked)), "for masks, which are of replicated")
    whole = SavedTensor(value.tensor, PARTIAL, "slice")
    refused(theory, program, replace(made, saved=(*rest, whole)), "as a slice, which it is not")


def test_what_is_there_only_later_is_not_there() -> None:
    theory, program, made = divided()
    refused(
        theory, program, replace(made, backward=made.backward[::-1]), "of the backward reads .* is not there"
    )
    last = made.forward[:-1]
    refused(theory, program, replace(made, forward=last), "which is not there|does not have")
