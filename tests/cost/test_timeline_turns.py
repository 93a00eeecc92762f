"""The simulation of a step in micro-batches against the graphs of its turns, and its timeline."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from program_builder import divided_in_the_loop

from hetspmd.cost.model import CostModel
from hetspmd.cost.simulated_run import BOUNDARY, START, WAIT, WAIT_FIRST
from hetspmd.cost.simulator import TwoStreams
from hetspmd.cost.step import StepModel
from hetspmd.cost.timeline import timeline
from hetspmd.lower import calls, passes
from hetspmd.lower.turns import lower_turns
from hetspmd.optimize.compiler import plan_for
from hetspmd.plan.plan import Plan
from hetspmd.program.loop_steps import repeatable
from hetspmd.program.micro_batches import MicroBatches, in_own_turns, micro_batches
from hetspmd.program.program import Communicate
from hetspmd.program.turn_layout import TurnLayout
from hetspmd.program.turn_steps import turn_steps
from hetspmd.search import constraints as known
from test_random_programs import subject
from workbench import cluster, traced

CLUSTER = cluster(3, 2, 1)
RATIOS = (0.5, 0.3, 0.2)
CPU = torch.device("cpu")


def plans(name: str) -> Iterator[tuple[Plan, MicroBatches]]:
    """Programs with collectives before the loop, in it and after it, in equal turns and in turns of their own."""
    theory = subject(name).theory
    alike = micro_batches(theory, 4)
    zero = plan_for(theory, CLUSTER, known.zero_like(theory), RATIOS)
    yield plan_for(theory, CLUSTER, known.data_parallel(theory), RATIOS), alike
    yield zero, alike
    yield zero, replace(alike, repeated=repeatable(theory, alike))
    yield plan_for(theory, CLUSTER, known.tensor_parallel(theory), RATIOS), micro_batches(theory, 2)
    yield (
        plan_for(theory, CLUSTER, divided_in_the_loop(theory, 1), RATIOS),
        in_own_turns(theory, alike, (4, 4, 4)),
    )


def simulated(streams: TwoStreams) -> list[Any]:
    """What happens in order on rank 0: instructions, and starts and waits of collectives by what they carry."""
    found: list[Any] = []
    sources = streams.model.theory.graph.sources
    done = 0
    for at, what, collective in [*streams.events, (len(streams.instructions), BOUNDARY, -1)]:
        found += [i for i in streams.instructions[done:at] if i not in sources]
        done = at
        if what in (START, WAIT, WAIT_FIRST):
            found.append(("start" if what == START else "wait", carried(streams.collectives[collective])))
    return found


def carried(step: Any) -> tuple[Any, ...]:
    members = getattr(step, "members", (step,))
    return tuple((m.tensor, m.kind, m.source, m.target) for m in members)


def in_order(events: list[Any], plan: Plan) -> list[Any]:
    """The events without gathers that the program does not have (of what the loop reads in other rows), and with
    waits one after the other, whose order tells nothing, sorted; a bucket is waited for once."""
    known = {
        member for step in plan.program.steps if isinstance(step, Communicate) for member in carried(step)
    }
    found: list[Any] = []
    waited: set[Any] = set()
    for event in events:
        if not isinstance(event, tuple):
            found.append(event)
            continue
        what, members = event
        if not known.issuperset(members) or (what == "wait" and members in waited):
            continue
        if what == "start":
            waited.discard(members)
            found.append(event)
            continue
        waited.add(members)
        place = len(found)
        while (
            place
            and isinstance(found[place - 1], tuple)
            and found[place - 1][0] == "wait"
            and found[place - 1] > event
        ):
            place -= 1
        found.insert(place, event)
    return found


def lowered(plan: Plan, batches: MicroBatches, rank: int) -> list[Any]:
    steps = turn_steps(plan.theory, plan.program, plan.schedule, batches)
    found: list[Any] = []
    layout, count = TurnLayout(plan.theory, batches, plan.lengths), batches.turns_of(3)[rank]
    for turn in lower_turns(steps, layout, rank, CPU, range(count)).turns:
        for node in turn.graph.nodes:
            if "transfer" in node.meta:
                found.append(("start", carried(node.meta["transfer"])))
            elif node.target in (calls.wait, calls.take):
                found.append(("wait", carried(node.args[0].meta["transfer"])))
            elif "instruction" in node.meta:
                found.append(node.meta["instruction"])
    return found


@pytest.mark.parametrize("name", ["mlp", "attention", "experts"])
def test_what_is_simulated_is_what_runs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every turn, in the order of the graphs."""
    monkeypatch.setattr(passes, "PASSES", ())
    checked = 0
    for plan, batches in plans(name):
        model = CostModel(plan.theory, CLUSTER, batches)
        streams = TwoStreams(model, plan.program, plan.schedule, each_turn=True)
        want, got = (in_order(events, plan) for events in (simulated(streams), lowered(plan, batches, 0)))
        assert want == got
        checked += sum(isinstance(event, tuple) and event[0] == "start" for event in want)
    assert checked > 20


@pytest.mark.parametrize("turns_of", [(1, 3, 2), (2, 1, 4)])
@pytest.mark.parametrize("name", ["mlp", "attention", "bert-moe"])
def test_all_ranks_begin_collectives_in_one_order(name: str, turns_of: tuple[int, ...]) -> None:
    """A device with one turn begins what is after the loop when others have not ended their first turn. The mixture
    of experts gathers what its backward reads before the loop."""
    theory = traced(name).theory if name == "bert-moe" else subject(name).theory
    batches = in_own_turns(theory, micro_batches(theory, 2), turns_of)
    for seed in range(2):
        plan = plan_for(theory, CLUSTER, divided_in_the_loop(theory, seed), RATIOS)
        begun = [[e for e in lowered(plan, batches, rank) if isinstance(e, tuple)] for rank in range(3)]
        first, *others = ([members for what, members in events if what == "start"] for events in begun)
        assert first
        assert all(first == other for other in others)


@pytest.mark.parametrize("name", ["mlp", "attention"])
def test_three_passes_take_as_long_as_every_turn(name: str) -> None:
    """Where no collective is in the loop; else the turns between overlap as one."""
    for plan, batches in plans(name):
        step = StepModel(CostModel(plan.theory, CLUSTER, batches), plan.program, schedule=plan.schedule)
        shares = step.model.shares(plan.lengths)
        seconds, each = step.streams.seconds(shares), step.turn_by_turn.seconds(shares)
        inside = {c for c in range(len(step.streams.collectives)) if c in step.streams._parts}
        assert seconds == pytest.approx(each, rel=0.2 if inside else 1e-9)
        computed = step.streams.run(shares).seconds.sum(axis=0)
        assert computed == pytest.approx(step.turn_by_turn.run(shares).seconds.sum(axis=0))
        stages = step.stages.computation(shares).sum(axis=0) + step.stages.loop_seconds(shares)
        assert (computed <= stages * (1 + 1e-9)).all()


def test_a_timeline_has_the_turns() -> None:
    for plan, batches in plans("mlp"):
        step = StepModel(CostModel(plan.theory, CLUSTER, batches), plan.program, schedule=plan.schedule)
        line = timeline(step, plan.lengths)
        for rank, count in enumerate(batches.turns_of(3)):
            seen = [e.turn for e in line.events if e.device == rank and e.stream == "compute"]
            assert set(seen) - {None} == set(range(count))
        ends = [max(e.end for e in line.events if e.device == rank) for rank in range(3)]
        assert max(ends) == pytest.approx(line.step_seconds)
        assert line.end_seconds == pytest.approx(
            [c + w for c, w in zip(line.compute_seconds, line.waiting_seconds, strict=True)]
        )
