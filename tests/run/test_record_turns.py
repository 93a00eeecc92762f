"""Recorded steps in micro-batches: all turns' instructions and collectives are in them, and they change nothing."""

from __future__ import annotations

import json
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from program_builder import divided_in_the_loop
from ranks import on_ranks
from record_cases import STEPS, recorded, train
from small_models import Case, case
from small_plans import cluster

import hetspmd
from hetspmd.optimize.compiler import plan_for
from hetspmd.optimize.in_micro_batches import in_micro_batches
from hetspmd.placement import sharded_dim
from hetspmd.plan.plan import Plan
from hetspmd.program.levels import Both, within
from hetspmd.program.loop_steps import step_phases
from hetspmd.program.micro_batches import in_own_turns
from hetspmd.program.program import Compute
from hetspmd.program.turn_steps import turn_steps
from hetspmd.record.measured import MeasuredSteps

DEVICES = cluster(4, 2, 1)

pytestmark = pytest.mark.filterwarnings("ignore::hetspmd.errors.DroppedOutputWarning")


def instructions(plan: Plan, turns: int) -> Counter[str]:
    """What a device computes in a step of so many turns."""
    assert plan.batches is not None
    phases = step_phases(plan.graph, plan.batches, plan.program)
    counts: Counter[str] = Counter()
    for step, phase in zip(plan.program.steps, phases, strict=True):
        if isinstance(step, Compute) and not plan.graph.instructions[step.instruction].is_source:
            counts[plan.graph.instructions[step.instruction].name] += turns if phase == "in" else 1
    return counts


def gathered(plan: Plan) -> set[str]:
    """What is gathered for the loop, since devices have other rows of a micro-batch than of the batch. It is no
    step of the program."""
    assert plan.batches is not None
    steps = turn_steps(plan.theory, plan.program, plan.schedule, plan.batches)
    return {
        f"All-Gather({plan.graph.tensors[m.tensor].name}, {sharded_dim(m.source)})"
        for step in steps.before
        for m in (within(step) if not isinstance(step, Both) else ())
        if m.kind == "all_gather"
    }


def check(c: Case, plan: Plan, turns: tuple[int, ...], path: Path) -> MeasuredSteps:
    plain = on_ranks(c, plan, lambda hap: train(hap, c.batch))
    found = on_ranks(c, plan, lambda hap: recorded(hap, c.batch, path))
    for (numbers, measured), want in zip(found, plain, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(numbers, want, strict=True)), "recording changes results"
        assert measured == found[0][1], "every rank holds the same recording"
    measured = found[0][1]
    for rank, own in enumerate(turns):
        mine = [s for s in measured.spans if s.device == rank]
        got = Counter(s.name for s in mine if s.what == "instruction")
        assert got == {name: STEPS * count for name, count in instructions(plan, own).items()}
        assert [r.graph for r in measured.runs if r.device == rank] == ["forward", "backward"] * STEPS
        for run in (r for r in measured.runs if r.device == rank):
            inside = sum(s.end - s.start for s in mine if s.run == run.run)
            assert inside == pytest.approx(run.end - run.start, abs=1e-9), "every nanosecond is some call's"
        events = sorted(
            (e.start, e.end) for e in measured.events if e.device == rank and e.stream == "communication"
        )
        assert events
        assert all(before[1] <= after[0] for before, after in pairwise(events))
    for one in measured.carried:
        assert sorted(one.issued) == sorted(one.completed) == list(range(len(turns)))
        assert " inside(" not in one.name, "a turn is no machine"
    simulated = json.loads(plan.timeline().to_chrome_trace())["traceEvents"]
    names = {e["name"] for e in simulated if e["ph"] == "X" and e["cat"] == "communication"}
    others = {one.name for one in measured.carried} - names
    assert others <= gathered(plan), "collectives are called as in the simulated trace"
    assert json.loads(path.read_text())["traceEvents"]
    assert f"Measured (mean of {STEPS} steps)" in measured.text()
    return measured


@pytest.mark.parametrize(("level", "count"), [(1, 5), (3, 3)])
def test_levels_of_zero(level: int, count: int, tmp_path: Path) -> None:
    """With collectives after the loop, and in it: those are recorded once for each turn. Of five turns three share
    a graph."""
    c = case("mlp", torch.float32)
    plan = hetspmd.compile(c.model, c.batch, DEVICES, micro_batches=count, zero=level, recompute="all")
    measured = check(c, plan, (count,) * 3, tmp_path / "steps.json")
    times = Counter(one.name for one in measured.carried)
    assert (count * STEPS in times.values()) is (level == 3)
    assert STEPS in times.values()


def test_turns_of_their_own(tmp_path: Path) -> None:
    c = case("mlp", torch.float32)
    theory, batches = in_micro_batches(c.theory, 2)
    assert batches is not None
    own = in_own_turns(theory, batches, (1, 3, 2))
    plan = plan_for(theory, DEVICES, divided_in_the_loop(theory, 3), (0.5, 0.3, 0.2), batches=own)
    check(c, plan, (1, 3, 2), tmp_path / "steps.json")
