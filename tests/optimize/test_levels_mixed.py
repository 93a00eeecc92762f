"""Steps with collectives in their loop and outside of it, on small models: order, bounds, seconds, numbers."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
from test_zero_levels import Net, batch, devices

import hetspmd
from hetspmd.cluster.cluster import Cluster
from hetspmd.cost.model import CostModel
from hetspmd.cost.step import Stages
from hetspmd.errors import MemoryLimitError, ProofError
from hetspmd.optimize.compiler import compile_plan, plan_for
from hetspmd.optimize.in_micro_batches import best_number
from hetspmd.optimize.synthesis import Synthesis
from hetspmd.optimize.zero_levels import repeated_in
from hetspmd.placement import is_sharded
from hetspmd.plan.plan import Plan
from hetspmd.program.loop_steps import loop_steps
from hetspmd.program.micro_batches import MicroBatches, micro_batches, samples
from hetspmd.program.program import Communicate, Compute
from hetspmd.report.zero_text import zero_levels
from hetspmd.rules.theory import Theory, derive
from hetspmd.search import constraints as known
from hetspmd.search.constraints import Constraints
from hetspmd.search.pricing import Pricing
from hetspmd.search.search import Limits
from hetspmd.search.space import search_space
from hetspmd.trace.trace import trace
from workbench import cluster

ROWS = 600
LARGE = [f"layers.{n}.weight" for n in range(4)]
SHARES = (0.5, 0.25, 0.125, 0.125)


@cache
def mixed() -> Plan:
    """Some of the large weights are gathered once, others in each of two micro-batches."""
    least, most = (
        max(hetspmd.compile(Net(), batch(ROWS), devices(), zero=n, micro_batches=2).cost.memory_bytes)
        for n in (3, 2)
    )
    return hetspmd.compile(Net(), batch(ROWS), devices((least + most) / 2), micro_batches=2)


def gathered_again(plan: Plan) -> set[str]:
    """The large weights that the backward gathers again."""
    names = {p.tensor: p.name for p in plan.graph.parameters}
    reads = [s for s in plan.program.steps if isinstance(s, Compute)]
    again = plan.graph.second_reads
    found = {names[again[s.instruction]] for s in reads if s.instruction in again if is_sharded(s.row.pre[0])}
    return found & set(LARGE)


def test_parameters_are_taken_out_of_the_loop_before_gradients() -> None:
    plan = mixed()
    levels = {name: zero_levels(plan)[name] for name in LARGE}
    assert set(levels.values()) == {2, 3}
    (taken,) = (c.reason for c in plan.considered if c.verdict == "taken")
    count = sum(level == 2 for level in levels.values())
    assert f"{count} tensor" in taken
    assert gathered_again(plan) == {name for name, level in levels.items() if level == 3}


def test_the_bound_is_of_programs_with_collectives_outside_of_the_loop_too() -> None:
    plan = mixed()
    assert plan.search.lower_bound < plan.search.cost
    theory, batches = divided(2)
    outside = plan_for(theory, plan.cluster, known.zero(theory, 1), plan.ratios, batches=batches)
    assert plan.search.lower_bound <= outside.search.cost * (1 + 1e-9)


def test_costs_with_other_collectives_in_the_loop_are_those_of_a_model_of_their_own() -> None:
    """The context keeps the costs of each set of collectives; they are as if each had been told alone, also of
    collectives that were asked for before."""
    theory, batches = divided(3)
    assert batches is not None
    where = Cluster.load(devices())
    ctx = Synthesis(theory, where, Constraints(), Limits(), batches=batches)
    sets = [repeated_in(theory, batches, level) for level in (1, 2, 3)]
    assert len(set(sets)) == 3
    moves = [
        step
        for repeated in sets
        for step in plan_for(
            theory, where, known.zero(theory, 3), SHARES, batches=replace(batches, repeated=repeated)
        ).program.steps
        if isinstance(step, Communicate)
    ]
    seen = set()
    for repeated in (*sets, *reversed(sets)):
        shared = ctx.with_repeated(repeated).costs(ctx.everyone)
        own = CostModel(theory, where, replace(batches, repeated=repeated))
        assert [shared.step_form(m) for m in moves] == [own.step_form(m) for m in moves]
        assert [shared.times(m) for m in moves] == [own.times(m) for m in moves]
        seen.add(tuple(shared.step_form(m) for m in moves))
        assert ctx.with_repeated(repeated).costs(ctx.everyone) is shared
    assert len(seen) == 3, "what is in the loop costs more"


def test_another_batch_has_the_same_collectives_in_its_loop() -> None:
    plan = mixed()
    other = compile_plan(Net(), (), batch(ROWS // 2), plan.cluster, like=plan)
    assert zero_levels(other) == zero_levels(plan)
    assert gathered_again(other) == gathered_again(plan)


@cache
def divided(count: int) -> tuple[Theory, MicroBatches]:
    theory = derive(trace(Net(), (), batch(ROWS)), quiet=True)
    return theory, micro_batches(theory, count)


def test_small_tensors_stay_outside_of_the_loop() -> None:
    theory, batches = divided(3)
    repeated = repeated_in(theory, batches, 3)
    biases = {p.tensor for p in theory.graph.parameters if p.name.endswith("bias")}
    assert repeated
    assert repeated.isdisjoint(biases)


@pytest.mark.parametrize("level", [1, 2, 3])
def test_the_search_charges_collectives_in_the_loop_as_often_as_they_run(level: int) -> None:
    theory, batches = divided(3)
    batches = replace(batches, repeated=repeated_in(theory, batches, level))
    plan = plan_for(theory, cluster(4, 2, 1, 1), known.zero(theory, level), SHARES, batches=batches)
    stages = Stages(plan.costs, plan.program)
    shares = plan.costs.shares(plan.lengths)
    assert plan.search.cost == pytest.approx(stages.seconds(shares), rel=1e-6)


def test_each_micro_batch_has_the_latencies_of_its_collectives() -> None:
    theory, batches = divided(3)
    plan = plan_for(theory, cluster(4, 2, 1, 1), known.tensor_parallel(theory), SHARES, batches=batches)
    places = loop_steps(theory.graph, batches, plan.program).places
    sent = [s for n, s in enumerate(plan.program.steps) if n in places and isinstance(s, Communicate)]
    latencies = sum(plan.costs.step_form(s).latency for s in sent if plan.costs.times(s) == 1)
    assert latencies > 0
    shares = plan.costs.shares(plan.lengths)
    alone = Stages(plan.costs, plan.program)
    more = alone.loop_seconds(shares)
    alone._latency = 0.0
    assert more - alone.loop_seconds(shares) == pytest.approx(2 * latencies)


def test_moves_in_the_loop_are_priced_for_each_micro_batch() -> None:
    theory, batches = divided(3)
    repeated = repeated_in(theory, batches, 3)
    pricing = Pricing(search_space(theory, known.zero(theory, 3)))
    plans = [
        plan_for(theory, cluster(4, 2, 1, 1), known.zero(theory, 3), SHARES, batches=loop)
        for loop in (batches, replace(batches, repeated=repeated))
    ]
    outside, inside = (pricing.at(plan.costs, plan.lengths).seconds[1] for plan in plans)
    for n, tensor in enumerate(pricing.tensors):
        pairs = pricing.space.pairs[tensor]
        for place, (source, *_) in enumerate(pairs, start=int(pricing.move_start[n])):
            often = tensor in repeated and (tensor in batches.summed or is_sharded(source))
            assert inside[place] == pytest.approx((3 if often else 1) * outside[place], abs=3)


def test_what_devices_compute_in_slices_is_not_reduced_in_the_loop() -> None:
    theory, batches = divided(3)
    plan = plan_for(theory, cluster(4, 2, 1, 1), known.tensor_parallel(theory), SHARES, batches=batches)
    levels = {name: zero_levels(plan)[name] for name in LARGE}
    sharded = {name for name in LARGE if is_sharded(plan.parameter_layout()[name][0])}
    assert sharded
    assert {levels[name] for name in sharded} == {1}


def test_a_plan_whose_loop_has_other_collectives_is_not_made() -> None:
    theory, batches = divided(3)
    rows = next(t for t, placement in batches.placements.items() if is_sharded(placement))
    wrong = replace(batches, repeated=frozenset({rows}))
    with pytest.raises(ProofError, match="said to run in the loop"):
        plan_for(theory, cluster(2, 1), known.data_parallel(theory), (0.7, 0.3), batches=wrong)


def test_more_micro_batches_are_tried_while_memory_is_short_and_steps_get_faster() -> None:
    theory, _ = divided(2)
    seconds = {2: 5.0, 4: 3.0, 8: 4.0, 16: 1.0}
    tried = []

    def planned(_: Theory, batches: MicroBatches | None) -> Any:
        tried.append(count := 1 if batches is None else batches.count)
        if count == 1:
            raise MemoryLimitError({0: (1, 1)}, ["d0"])
        faster = SimpleNamespace(verdict="memory", seconds=seconds[count] / 2)
        return SimpleNamespace(
            cost=SimpleNamespace(step_seconds=seconds[count]), considered=(faster,), repeated=()
        )

    assert best_number(theory, "auto", planned).cost.step_seconds == 3.0
    assert tried == [1, 2, 4, 8]


@pytest.mark.parametrize(
    ("communicates", "computed", "seconds", "numbers"),
    [(True, 1.0, 11.0, [1, 2, 4, 8, 16, 12, 10, 11]), (True, 16.0, 16.0, [1, 2, 4, 8, 16]),
     (False, 1.0, 16.0, [1, 2, 4, 8, 16])],
)  # fmt: skip
def test_numbers_between_powers_of_two_are_tried_where_each_micro_batch_waits(
    communicates: bool, computed: float, seconds: float, numbers: list[int]
) -> None:
    theory, _ = divided(2)
    tried = []

    def planned(_: Theory, batches: MicroBatches | None) -> Any:
        tried.append(count := 1 if batches is None else batches.count)
        if count < 11:
            raise MemoryLimitError({0: (1, 1)}, ["d0"])
        cost = SimpleNamespace(step_seconds=float(count), per_device_compute=(computed, 0.5))
        return SimpleNamespace(cost=cost, considered=(), repeated=(1,) if communicates else ())

    assert best_number(theory, "auto", planned).cost.step_seconds == seconds
    assert tried == numbers


@pytest.mark.parametrize("fits_from", [8, 10**6])
def test_numbers_are_tried_quickly_and_the_most_thoroughly_where_none_fits(fits_from: int) -> None:
    """Quick plans decide; where they say of every number that nothing fits, the last one is asked thoroughly."""
    theory, _ = divided(2)
    most = max(samples(theory, theory.batch_axes), 1)
    thorough: list[int] = []

    def count_of(batches: MicroBatches | None) -> int:
        return 1 if batches is None else batches.count

    def made(count: int) -> Any:
        cost = SimpleNamespace(step_seconds=float(count), per_device_compute=(float(count),))
        return SimpleNamespace(cost=cost, considered=(), repeated=())

    def quickly(_: Theory, batches: MicroBatches | None) -> Any:
        if count_of(batches) < fits_from:
            raise MemoryLimitError({0: (1, 1)}, ["d0"])
        return made(count_of(batches))

    def planned(_: Theory, batches: MicroBatches | None) -> Any:
        thorough.append(count_of(batches))
        return made(count_of(batches))

    plan = best_number(theory, "auto", planned, quickly)
    assert thorough == ([most] if fits_from > most else [])
    assert plan.cost.step_seconds == min(fits_from, most)
