"""The schedule is a part of the plan: its text, and that everything that orders steps takes it from there."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from machine_plans import machine_plan
from small_models import case
from small_plans import ahead_plan, cluster

from hetspmd.errors import PlanError
from hetspmd.lower import lower_plan
from hetspmd.optimize.compiler import plan_for
from hetspmd.plan.plan import Plan
from hetspmd.plan.plan_facts import transfers
from hetspmd.program.program import Communicate
from hetspmd.program.schedule import Places, make_schedule
from hetspmd.report import plan_json, schedule_text
from hetspmd.search import constraints as known

GOLDENS = Path(__file__).parent.parent / "fixtures" / "schedules"
PACKAGE = Path(__file__).parent.parent.parent / "python" / "hetspmd"
CPU = torch.device("cpu")


@cache
def data_parallel() -> Plan:
    """The attention model, data parallel on three unlike devices: sums of gradients share buckets."""
    theory = case("attention").theory
    return plan_for(theory, cluster(1, 2, 4), known.data_parallel(theory), (0.2, 0.3, 0.5))


def gathered_ahead() -> Plan:
    """Parameters in shards, gathered two groups ahead, in no buckets."""
    plan = ahead_plan(case("mlp"), 3, 2)
    return plan.with_step(schedule=make_schedule(plan.theory, plan.program, prefetch_distance=2))


PLANS = {
    "mlp_gathered_ahead": gathered_ahead,
    "attention_data_parallel": data_parallel,
    "mlp_machines": lambda: machine_plan(case("mlp"), (1, 2), 2),
}


@pytest.mark.parametrize("name", PLANS)
def test_text(name: str) -> None:
    """The goldens are what ``hetspmd compile --schedule`` prints. Delete one to have it written anew."""
    text = schedule_text(PLANS[name]()) + "\n"
    golden = GOLDENS / f"{name}.txt"
    if not golden.exists():
        golden.parent.mkdir(exist_ok=True)
        golden.write_text(text)
        pytest.fail(f"{golden.name} was written; read it, and run the test again")
    assert text == golden.read_text()


def test_text_has_every_entry_once_and_right_readers() -> None:
    plan = data_parallel()
    lines = schedule_text(plan).splitlines()
    entries = (*plan.schedule.forward, *plan.schedule.backward)
    numbers = [int(line.split()[0]) for line in lines if re.match(r" +\d+ ", line)]
    assert numbers == list(range(len(entries)))
    starts = [line for line in lines if " start " in line]
    sent = [p for p in entries if isinstance(plan.program.steps[p[0]], Communicate)]
    assert len(starts) == len(sent) == transfers(plan)
    for line in starts:
        read = re.search(r"first read by (\d+)", line)
        assert read is None or int(read[1]) > int(line.split()[0])
    assert sum(" | " in line for line in lines) == len(plan.schedule.saved)


def test_document() -> None:
    plan = data_parallel()
    document = plan_json(plan)["schedule"]
    assert [tuple(p) for p in document["forward"]] == list(plan.schedule.forward)
    assert [tuple(p) for p in document["backward"]] == list(plan.schedule.backward)
    assert document["prefetch_distance"] == 1
    assert document["bucket_bytes"] == plan.costs.bucket_bytes
    assert [s["how"] for s in document["saved"]] == [s.how for s in plan.schedule.saved]


def test_a_plan_file_has_it() -> None:
    plan = ahead_plan(case("mlp"), 3, 2)
    again = Plan.from_json(plan.to_json())
    assert again.schedule == plan.schedule
    assert again.schedule.prefetch_distance == 2


def single(entries: tuple[Places, ...]) -> tuple[Places, ...]:
    """Buckets taken apart."""
    return tuple((place,) for places in entries for place in places)


def starts(plan: Plan) -> Iterator[str]:
    local = lower_plan(plan, 0, CPU)
    for graph in (local.forward, local.backward):
        assert graph is not None
        yield from (str(n.target) for n in graph.graph.nodes if "start" in str(n.target))


def test_all_take_the_schedule_of_the_plan() -> None:
    """With the buckets of its schedule taken apart a plan sends more often wherever one looks: in the facts, the
    simulation, the memory count, the local graphs and the text."""
    plan = data_parallel()
    forward, backward = single(plan.schedule.forward), single(plan.schedule.backward)
    apart = plan.with_step(schedule=replace(plan.schedule, forward=forward, backward=backward))
    more = sum(len(p) - 1 for p in plan.schedule.backward)
    assert more >= 3
    assert transfers(apart) == transfers(plan) + more
    assert len(apart.timeline().transfers) == len(plan.timeline().transfers) + more
    assert len(list(starts(apart))) == len(list(starts(plan))) + more
    assert schedule_text(apart).count(" start ") == schedule_text(plan).count(" start ") + more
    assert apart.timeline().communication_seconds > plan.timeline().communication_seconds
    moments = [len(of.step.held(of.lengths).instruction) for of in (plan, apart)]
    assert moments[1] == moments[0] + more, "what is held is counted at each entry"
    assert Plan.from_json(apart.to_json()).schedule == apart.schedule


def test_an_order_that_is_asked_for_is_the_order_that_runs() -> None:
    """Two computations that do not need each other change places in the plan, and so in the local graphs."""
    plan = data_parallel()
    graph, program = plan.graph, plan.program

    def names(of: Plan) -> list[str]:
        return [n.name for n in lower_plan(of, 0, CPU).forward.graph.nodes]

    entries = list(plan.schedule.forward)
    swapped = 0
    for at in range(len(entries) - 1):
        changed = [*entries]
        changed[at : at + 2] = entries[at + 1], entries[at]
        other = plan.with_step(schedule=replace(plan.schedule, forward=tuple(changed)))
        one, two = (program.steps[entries[i][0]] for i in (at, at + 1))
        if isinstance(one, Communicate) or isinstance(two, Communicate):
            continue
        first, second = graph.instructions[one.instruction], graph.instructions[two.instruction]
        if first.is_source or second.is_source or set(first.outputs) & set(second.inputs):
            continue
        before, after = names(plan), names(other)
        if before != after:
            swapped += 1
            assert sorted(before) == sorted(after)
            assert Plan.from_json(other.to_json()).schedule == other.schedule
    assert swapped > 0


def test_it_is_made_in_two_places() -> None:
    """By the cost model of a step, whose schedule the plan gets, and by the search's memory count of a program that
    has none yet."""
    makers = {
        path.relative_to(PACKAGE).as_posix()
        for path in PACKAGE.rglob("*.py")
        if re.search(r"\bmake_schedule\(", path.read_text())
    }
    assert makers == {"program/schedule.py", "cost/step.py", "cost/memory.py"}


def test_a_program_that_was_exchanged_without_its_schedule_does_not_run() -> None:
    plan = data_parallel()
    other = plan.with_step(program=ahead_plan(case("attention"), 3, 1).program)
    with pytest.raises(PlanError, match="the program cannot run by its schedule"):
        lower_plan(other, 0, CPU)
