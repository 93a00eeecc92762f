"""Step plans: what a plan file holds of them, which orders fit, what the update reads, and what is lowered."""

from __future__ import annotations

import gzip
import itertools
import json
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from plan_files import compiled, plans, resealed
from small_models import case
from small_plans import cluster

import hetspmd
from hetspmd.codec.records import encode
from hetspmd.cost.timeline import Event
from hetspmd.errors import PlanError
from hetspmd.lower import lower_plan
from hetspmd.lower.input_rows import input_rows
from hetspmd.optimize.compiler import compile_plan
from hetspmd.placement import is_sharded
from hetspmd.plan.plan import Plan
from hetspmd.plan.run_order import FragmentRun, RunPhase, check_runs, plain_runs
from hetspmd.plan.step_plan import Fragment, StepPlan, TimeSplit
from hetspmd.plan.text import VERSION, content, value_of
from hetspmd.program.program import Program

CPU = torch.device("cpu")
OLD = Path(__file__).parents[1] / "fixtures" / "version_10"
"""Plan files as the version before step plans wrote them."""


@cache
def in_three() -> Plan:
    c = case("embedding")
    return hetspmd.compile(c.model, c.batch, cluster(4, 2, 1), micro_batches=3, loss_only=True)


def in_own_turns(plan: Plan, *turns: int) -> Plan:
    """The plan with turns of their own, whether or not its program lets devices have them."""
    return plan.with_step(own_turns=turns, micro_batches=max(turns))


def forward(turn: int, fragment: int = 0) -> FragmentRun:
    return FragmentRun(turn, fragment, "forward")


def backward(turn: int, fragment: int = 0) -> FragmentRun:
    return FragmentRun(turn, fragment, "backward")


def again(turn: int, fragment: int = 0) -> FragmentRun:
    return FragmentRun(turn, fragment, "recompute")


def in_a_pipeline(count: int = 2, **parts: Any) -> StepPlan:
    """Two fragments, the first of the ranks 0 and 1, the second of 2 and 3, in so many micro-batches."""
    whole = compiled().step_plan.only
    ratios, units = ((0.5, 0.5),), tuple((sum(row), 0) for row in whole.lengths.units)
    of_two = replace(
        whole, ratios=ratios, lengths=replace(whole.lengths, world=2, units=units), active=(0, 1)
    )
    fragments = (of_two, replace(of_two, active=(2, 3)))
    return StepPlan(fragments=fragments, split=TimeSplit(count), **parts)


ONE_F_ONE_B = (
    (forward(0), forward(1), backward(0), backward(1)),
    (forward(0), forward(1), backward(0), backward(1)),
    (forward(0, 1), backward(0, 1), forward(1, 1), backward(1, 1)),
    (forward(0, 1), backward(0, 1), forward(1, 1), backward(1, 1)),
)
"""Of :func:`in_a_pipeline`."""


# what files hold --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("file", sorted(OLD.iterdir()), ids=lambda file: file.name.partition(".")[0])
def test_the_text_of_a_plan_is_that_of_version_10_but_for_the_version(file: Path) -> None:
    """One micro-batch, segments, machines; and several micro-batches, whose text is the same as well."""
    text = gzip.decompress(file.read_bytes()).decode()
    document = json.loads(text)
    assert document["version"] == 10 < VERSION
    plan = value_of(document["plan"], Plan)
    assert content(encode(plan)) == content(document["plan"])
    assert plan.to_json() == text.replace('"version":10}', f'"version":{VERSION}}}')


def test_plans_of_today_have_the_fields_of_version_10() -> None:
    document = json.loads(gzip.decompress((OLD / "compiled.json.gz").read_bytes()))
    assert encode(compiled()).keys() == document["plan"].keys()


def test_no_two_fields_that_stand_side_by_side_in_a_file_have_one_name() -> None:
    names = [f.name for record in (Plan, StepPlan, Fragment, TimeSplit) for f in fields(record)]
    assert len(names) == len(set(names))


def test_a_file_of_a_pipeline_is_read_and_refused_by_name() -> None:
    """The types have room for fragments; what would run them has not."""
    plan = replace(compiled(), step_plan=in_a_pipeline(1), cluster=cluster(4, 3, 2, 1))
    tree = encode(plan)
    assert [f["active"] for f in tree["fragments"]] == [[0, 1], [2, 3]]
    assert "program" not in tree
    assert value_of(tree, Plan) == plan
    with pytest.raises(PlanError, match="a step of 2 fragments, and this release runs steps of one"):
        Plan.from_json(plan.to_json())
    with pytest.raises(PlanError, match="a step of 2 fragments"):
        lower_plan(plan, 0, CPU)
    with pytest.raises(PlanError, match="a step of 2 fragments"):
        _ = plan.program
    assert plan.active == (0, 1, 2, 3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tree: tree.update(fragments=[]), "has the unknown 'active'"),
        (lambda tree: tree.pop("lengths"), "is a Plan that lacks lengths"),
        (lambda tree: tree.update(order=[]), "order is written where it is left out"),
        (lambda tree: tree.update(fragment=0), "has the unknown 'fragment'"),
        (lambda tree: tree.update(split=encode(TimeSplit())), "has the unknown 'split'"),
        (lambda tree: tree.update(micro_batches=0), "0 micro-batches; there is at least one"),
        (lambda tree: tree.update(own_turns=[1, 1]), "turns of their own"),
        (lambda tree: tree.update(active=[2, 1, 0]), "active devices [2, 1, 0] are no ranks in ascending order"),
    ],
)  # fmt: skip
def test_damage_is_named(change: Any, message: str) -> None:
    tree = encode(compiled())
    change(tree)
    with pytest.raises(PlanError) as caught:
        Plan.from_json(resealed(tree))
    assert message in str(caught.value)


def test_a_single_fragment_has_one_way_to_be_written() -> None:
    tree = encode(compiled())
    own = {f: tree.pop(f) for f in ("program", "schedule", "ratios", "lengths", "active", "inside")}
    with pytest.raises(PlanError, match="fragments is written where it is left out"):
        Plan.from_json(resealed({**tree, "fragments": [{"$": "Fragment", **own}]}))
    with pytest.raises(PlanError, match="a step has no fragment"):
        Plan.from_json(resealed({**tree, "fragments": []}))


@pytest.mark.parametrize(
    ("order", "message"),
    [
        ([[forward(0), backward(0)]] * 3, "is the plain one"),
        ([[forward(0), backward(0)]] * 2, "of the runs of 2 devices, of 3 active ones"),
        ([[backward(0), forward(0)]] * 3, "does not stand after the forward and before the backward"),
        ([[forward(0)]] * 3, "the backward of fragment 0 for micro-batch 0 is missing"),
        ([[forward(0), forward(0), backward(0)]] * 3, "a run stands twice"),
        ([[forward(0), forward(1), backward(0), backward(1)]] * 3, "there is no forward of fragment 0 for micro-"),
        ([[forward(0), forward(0, 1), backward(0)]] * 3, "there is no forward of fragment 1"),
        ([[forward(0), again(0), backward(0)]] * 3, "does not run one micro-batch after the other"),
        ([[forward(0), backward(0), again(0)]] * 3, "does not stand after the forward and before the backward"),
    ],
)  # fmt: skip
def test_an_order_of_runs_that_does_not_fit_is_refused(order: list[Any], message: str) -> None:
    with pytest.raises(PlanError) as caught:
        Plan.from_json(resealed({**encode(compiled()), "order": encode(order)}))
    assert message in str(caught.value)
    assert "again" in str(caught.value), "how to mend it"


# orders -----------------------------------------------------------------------------------------------------------


def test_the_plain_order_of_one_fragment() -> None:
    plan = in_three()
    turns = tuple(run for turn in range(3) for run in (forward(turn), backward(turn)))
    assert plan.step_plan.runs == dict.fromkeys(plan.active, turns)
    own = in_own_turns(plan, 1, 3, 2).step_plan
    assert own.runs == {rank: turns[: 2 * count] for rank, count in zip(plan.active, (1, 3, 2), strict=True)}
    assert [own.turns(rank) for rank in plan.active] == [(0,), (0, 1, 2), (0, 1)]


def test_a_forward_alone_has_no_backward() -> None:
    c = case("mlp")
    plan = compile_plan(c.model, (), c.batch, hetspmd.Cluster.load(cluster(2, 1)), training=False)
    assert plan.step_plan.runs == {rank: (forward(0),) for rank in plan.active}
    assert all(p.reads is None and p.leaves is None for p in plan.update.parameters)


def test_orders_of_pipelines() -> None:
    """One forward, one backward; with the forward again before a backward; and what no device can run."""
    plain = in_a_pipeline()
    assert plain.runs[0] == (forward(0), backward(0), forward(1), backward(1))
    assert plain.runs[3] == (forward(0, 1), backward(0, 1), forward(1, 1), backward(1, 1))
    assert dict(in_a_pipeline(order=ONE_F_ONE_B).runs) == dict(enumerate(ONE_F_ONE_B))
    first = (forward(0), forward(1), again(0), backward(0), again(1), backward(1))
    assert in_a_pipeline(order=(first, first, *ONE_F_ONE_B[2:])).runs[1] == first
    with pytest.raises(PlanError, match="device 1 runs fragment 0 in another order than others do"):
        in_a_pipeline(order=(first, *ONE_F_ONE_B[1:]))
    with pytest.raises(PlanError, match="device 3 does not fit its fragments"):
        in_a_pipeline(order=(*ONE_F_ONE_B[:3], ONE_F_ONE_B[0]))
    with pytest.raises(PlanError, match="a step of 2 fragments"):
        in_a_pipeline(order=ONE_F_ONE_B).turns(0)


@pytest.mark.parametrize("recomputed", [(), (0,), (0, 1)])
def test_of_all_orders_of_two_micro_batches_those_fit_that_can_run(recomputed: tuple[int, ...]) -> None:
    """Said once more: each micro-batch goes forward, then perhaps forward again, then backward."""
    phases: tuple[RunPhase, ...] = ("forward", "backward")
    plain = {0: plain_runs({0: phases}, 2)}
    accepted = 0
    for order in itertools.permutations((*plain[0], *map(again, recomputed))):
        of = [[run.phase for run in order if run.micro_batch == turn] for turn in range(2)]
        ways = [["forward", "recompute", "backward"] if t in recomputed else [*phases] for t in range(2)]
        try:
            check_runs(plain, (order,), alike=True)
        except PlanError:
            assert of != ways or order == plain[0]
        else:
            assert of == ways
            accepted += 1
    assert accepted == {0: 6 - 1, 1: 10, 2: 20}[len(recomputed)]


def test_a_device_of_two_fragments_goes_through_both_and_back() -> None:
    both: tuple[RunPhase, ...] = ("forward", "backward")
    runs = plain_runs({0: both, 2: both}, 1)
    assert runs == (forward(0), forward(0, 2), backward(0, 2), backward(0))


# parts and the update ---------------------------------------------------------------------------------------------


def test_parts_are_changed_by_name() -> None:
    plan = in_three()
    other = plan.with_step(micro_batches=2, schedule=replace(plan.schedule, prefetch_distance=4))
    assert (other.micro_batches, other.schedule.prefetch_distance) == (2, 4)
    assert other.program is plan.program
    assert other.step_plan.only == replace(plan.step_plan.only, schedule=other.schedule)
    assert other.batches is not plan.batches
    with pytest.raises(TypeError, match="a step has no part 'colour'"):
        plan.with_step(colour="red")
    with pytest.raises(PlanError, match="a step of 2 fragments"):
        in_a_pipeline().with_parts(active=(1, 2))


@pytest.mark.parametrize("number", range(len(plans())))
def test_the_update_is_what_the_program_says(number: int) -> None:
    """The proof demands that the gradient is where the parameter is, and so is what the update leaves."""
    plan = plans()[number]
    assert [p.name for p in plan.update.parameters] == [p.name for p in plan.graph.parameters]
    for own, parameter in zip(plan.update.parameters, plan.graph.parameters, strict=True):
        assert own.fragment == 0
        assert own.reads == own.leaves == (None if parameter.gradient is None else own.stored)
        extent = plan.graph.tensors[own.tensor].shape[own.stored - 2] if is_sharded(own.stored) else 0
        assert sum(own.extents) == extent
        assert plan.parameter_layout()[own.name] == (own.stored, own.extents)
    if plan.inside is None:
        local = lower_plan(plan, plan.active[0], CPU).parameters
        assert [(p.form, p.extents) for p in local] == [(p.stored, p.extents) for p in plan.update.parameters]


def test_a_parameter_that_is_stored_nowhere_is_named() -> None:
    plan = compiled()
    nothing = Program((), None, (), (), ())
    with pytest.raises(PlanError, match="is stored nowhere"):
        _ = plan.with_step(program=nothing).update


def test_the_part_of_the_graph_is_what_the_program_computes() -> None:
    plan = compiled()
    computed = plan.step_plan.only.instructions
    assert computed <= {i.id for i in plan.graph.instructions}
    assert {plan.graph.producers[p.tensor] for p in plan.graph.parameters} <= computed


def test_fragments_name_what_does_not_fit() -> None:
    whole = compiled().step_plan.only
    for active, message in (
        ((), "no device is active"),
        ((0, 1), "for 2 active ones"),
        ((0, 0, 1), "no ranks"),
    ):
        with pytest.raises(PlanError, match=message):
            replace(whole, active=active)
    with pytest.raises(PlanError, match="a step has no fragment"):
        StepPlan(fragments=())
    assert isinstance(whole, Fragment)


# what is lowered, and simulated -----------------------------------------------------------------------------------


def test_what_is_lowered_is_what_runs_say() -> None:
    """A forward and a backward of one micro-batch; a graph for each turn of several."""
    for plan in plans()[:5]:
        for rank, runs in plan.step_plan.runs.items():
            local = lower_plan(plan, rank, CPU)
            assert [run.phase for run in runs] == ["forward", *["backward"] * (local.backward is not None)]
    plan = in_three()
    for rank in plan.active:
        names = [
            str(n.target) for n in lower_plan(plan, rank, CPU).forward.graph.nodes if n.op == "call_module"
        ]
        assert names == [f"turn{turn}" for turn in plan.step_plan.turns(rank)] == ["turn0", "turn1", "turn2"]
        assert input_rows(plan, rank).rows


def test_a_timeline_has_the_turns_of_each_device(tmp_path: Path) -> None:
    plan = in_three()
    for found in (plan, in_own_turns(plan, 1, 3, 2)):
        line = found.timeline()
        for rank, runs in found.step_plan.runs.items():
            own = [
                e for e in line.events if e.device == rank and e.stream == "compute" and e.turn is not None
            ]
            assert {e.turn for e in own} == {run.micro_batch for run in runs}
            starts = sorted(own, key=lambda event: event.start)
            assert [e.turn for e in starts] == sorted(e.turn for e in own if e.turn is not None)
        shown = json.loads(line.to_chrome_trace())["traceEvents"]
        assert any(entry["name"].endswith("(turn 2)") for entry in shown)
    assert Event(0, "compute", "mm", 0.0, 1.0).turn is None
