"""Recorded steps: what is in them, that they change nothing, and the file."""

from __future__ import annotations

import copy
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from machine_plans import machine_plan
from ranks import lone, loss_of, on_ranks
from record_cases import STEPS, check_measured, data_parallel, recorded, train, worker
from small_models import case
from small_plans import random_plan, segmented_plan

from hetspmd.cluster.machines import machine_of
from hetspmd.errors import OutputError
from hetspmd.lower.lowering import nested_of
from hetspmd.optimize.compiler import plan_for
from hetspmd.program.levels import Both, between, within
from hetspmd.record.measured import MeasuredCollective, MeasuredSteps
from hetspmd.record.timestamps import offsets, transfer_name
from hetspmd.run.module import HAP
from hetspmd.search.constraints import Constraints
from processes import spawn

WORLD = 4


@pytest.mark.parametrize(("name", "seed"), [("mlp", 1), ("conv", 2), ("attention", 2), ("conv", -1)])
def test_four_ranks(name: str, seed: int, tmp_path: Path) -> None:
    c = case(name, torch.float32)
    plan = segmented_plan(c, WORLD) if seed < 0 else random_plan(c, WORLD, seed)
    plain = on_ranks(c, plan, lambda hap: train(hap, c.batch))
    path = tmp_path / "steps.json"
    found = on_ranks(c, plan, lambda hap: recorded(hap, c.batch, path))
    for (numbers, measured), want in zip(found, plain, strict=True):
        assert len(numbers) == len(want)
        assert all(torch.equal(a, b) for a, b in zip(numbers, want, strict=True)), "recording changes results"
        assert measured == found[0][1], "every rank holds the same recording"
    check_measured(found[0][1], plan)
    check_file(path, found[0][1])


def check_file(path: Path, measured: MeasuredSteps) -> None:
    document = json.loads(path.read_text())
    assert path.read_text() == measured.to_chrome_trace()
    assert [p.name for p in path.parent.iterdir()] == [path.name], "nothing is left beside it"
    named = [e for e in document["traceEvents"] if e["ph"] == "M"]
    simulated = json.loads(measured.plans[0].timeline().to_chrome_trace())["traceEvents"]
    assert named == [e for e in simulated if e["ph"] == "M"], "the same processes and threads"
    timed = [e for e in document["traceEvents"] if e["ph"] == "X"]
    assert len(timed) == len(measured.events)
    assert {(e["cat"], e["tid"]) for e in timed} <= {("compute", 0), ("waiting", 0), ("communication", 1)}
    assert min(e["ts"] for e in timed) >= 0
    assert min(e["dur"] for e in timed) >= 0
    names = {e["name"] for e in simulated if e["ph"] == "X" and e["cat"] == "communication"}
    carried = {e["name"] for e in timed if e["cat"] == "communication"}
    assert carried <= names, "collectives are called as in the simulated trace"


@pytest.mark.slow
def test_processes(tmp_path: Path) -> None:
    """gloo: the ranks' clocks agree, so that no rank sees a sum complete before another has issued it."""
    spawn(worker, (3, str(tmp_path)), nprocs=3)
    _, plan = data_parallel(3)
    results: list[dict[str, Any]] = [torch.load(tmp_path / f"{r}.pt", weights_only=False) for r in range(3)]
    for r in results:
        assert all(torch.equal(a, b) for a, b in zip(r["plain"], r["recorded"], strict=True))
        assert "missing/steps.json cannot be written" in r["error"]
    measured: MeasuredSteps = results[0]["measured"]
    check_measured(measured, plan)
    assert measured.clock_error == 0, "one machine, one clock"
    sums = [one for one in measured.carried if one.name.startswith("All-Reduce(")]
    assert len(sums) >= STEPS
    for one in sums:
        begun = [s.start for s in measured.spans if s.run == one.run and s.name == f"issue {one.name}"]
        assert len(begun) == 3
        assert max(begun) <= min(one.completed.values()), one.name
    assert json.loads((tmp_path / "steps.json").read_text())["traceEvents"]
    assert "Measured (mean of 2 steps)" in results[0]["text"]
    assert "aten.convolution_backward" in results[0]["text"]


def test_parts_add_up_to_the_step() -> None:
    """Every nanosecond of a local graph is some call's."""
    c = case("conv")
    _, measured = recorded(lone(c), c.batch, None)
    for run in measured.runs:
        inside = [s for s in measured.spans if s.run == run.run]
        assert sum(s.end - s.start for s in inside) == pytest.approx(run.end - run.start, abs=1e-9)
    assert Counter(s.what for s in measured.spans)["optimizer"] == STEPS


def test_waits_are_split() -> None:
    streams = [(1.0, 2.0), (2.0, 3.0), (5.0, 6.0)]
    carried = tuple(MeasuredCollective("x", 0, 0, {0: 0.0}, {0: 1.0}, {0: pair}) for pair in streams)
    exposed = MeasuredSteps(("a",), (), (), (), carried, 0.0, (0,)).exposed(0)
    assert exposed(0.0, 1.0) == 0
    assert exposed(0.5, 1.5) == 0.5
    assert exposed(1.5, 5.5) == 2.0
    assert exposed(3.5, 4.5) == 0
    assert exposed(0.0, 9.0) == 3.0


def test_off_is_off() -> None:
    c = case("mlp")
    hap = lone(c)
    before = hap._plans.entries[0].runner.program

    def fails() -> None:
        with hap.record():
            assert hap._plans.entries[0].runner.program is not before
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    assert hap._plans.entries[0].runner.program is before
    assert "stamp" not in str(before)
    with hap.record() as recording:
        with pytest.raises(RuntimeError, match="recorded already"), hap.record():
            pass
        with pytest.raises(RuntimeError, match="has ended"):
            _ = recording.measured
    assert hap._plans.entries[0].runner.program is before
    assert str(recording) == "No step was recorded"


def test_plans_made_on_the_way_are_recorded() -> None:
    c = case("mlp")
    hap = lone(c)
    half = {k: v[:5] for k, v in c.batch.items()}
    with hap.record() as recording:
        loss_of(hap(**c.batch)).backward()
        loss_of(hap(**half)).backward()
        with torch.no_grad():
            hap(**half)
    runs = [(r.plan, r.graph) for r in recording.measured.runs]
    assert runs == [(0, "forward"), (0, "backward"), (1, "forward"), (1, "backward"), (1, "forward")]
    assert recording.measured.text().count("Ops, summed over devices") == 2


def test_idle_devices_get_results() -> None:
    c = case("conv")
    plan = random_plan(c, WORLD, 2)
    plan = plan_for(c.theory, plan.cluster, Constraints({}), (0.5, 0.5), active=(0, 3))
    found = on_ranks(c, plan, lambda hap: recorded(hap, c.batch, None)[1])
    shares = [one for one in found[0].carried if one.plan < 0]
    assert len(shares) == STEPS
    for one in shares:
        assert one.name == "Broadcast(results to idle devices)"
        assert sorted(one.completed) == list(range(WORLD))
    idle = {s.what for s in found[0].spans if s.device in (1, 2)}
    assert idle == {"local", "wait", "optimizer"}
    assert "idle" in found[0].text()


@pytest.mark.parametrize(
    ("name", "accelerators", "active"),
    [
        ("mlp", (2, 1, 3), None),
        ("attention", (2, 2), None),
        ("conv", (1, 3), None),
        ("mlp", (2, 3, 1), (0, 1)),
    ],
)
def test_machines(
    name: str, accelerators: tuple[int, ...], active: tuple[int, ...] | None, tmp_path: Path
) -> None:
    """Every accelerator has its own line; collectives are those of a machine, or of all that take part."""
    c = case(name)
    plan = machine_plan(c, accelerators, 1, active)
    path = tmp_path / "steps.json"
    plain = on_ranks(c, plan, lambda hap: train(hap, c.batch))
    found = on_ranks(c, plan, lambda hap: recorded(hap, c.batch, path))
    for (numbers, measured), want in zip(found, plain, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(numbers, want, strict=True)), "recording changes results"
        assert measured == found[0][1]
    measured = found[0][1]
    machines = machine_of(plan.cluster)
    assert measured.machines == machines
    assert list(measured.devices) == [f"n{machine}" for machine in machines]
    assert plan.inside is not None
    nested = nested_of(plan)
    instructions = plan.graph.instructions
    computed = Counter(
        instructions[step.instruction].name
        for step in (*nested.forward, *nested.backward)
        if isinstance(step, Both)
    )
    working = [rank for rank, machine in enumerate(machines) if machine in plan.active]
    for rank in working:
        got = Counter(s.name for s in measured.spans if s.device == rank and s.what == "instruction")
        assert got == {n: STEPS * count for n, count in computed.items()}
    inside = [one for one in measured.carried if " inside(" in one.name]
    others = [one for one in measured.carried if " inside(" not in one.name and one.plan >= 0]
    assert others
    assert bool(inside) == any(within(s) for s in (*nested.forward, *nested.backward))
    for one in inside:
        (machine,) = {machines[rank] for rank in one.issued}
        assert sorted(one.completed) == [r for r in working if machines[r] == machine]
    firsts = {machines.index(machine) for machine in plan.active}
    for one in others:
        assert set(one.completed) <= set(working)
        assert firsts <= set(one.completed) or not firsts & set(one.completed), "elided, or not"
    assert {one.name for one in others} <= {
        transfer_name(s, plan.graph) for s in (*nested.forward, *nested.backward) if between(s)
    }
    document = json.loads(path.read_text())
    lines = [e["args"]["name"] for e in document["traceEvents"] if e["name"] == "process_name"]
    assert len(lines) == len(machines)
    assert sum("idle" in line for line in lines) == len(machines) - len(working)
    text = measured.text()
    assert text.count("predicted") > len(working)
    assert "aten." in text


@pytest.mark.parametrize("where", ["missing/steps.json", "."])
def test_a_path_that_cannot_be_written(where: str, tmp_path: Path) -> None:
    c = case("mlp")
    plan = random_plan(c, 2, 2)
    ran = []

    def body(hap: HAP) -> str:
        before = copy.copy(hap._plans.entries[0].runner.program)
        with pytest.raises(OutputError, match="cannot be written") as caught, hap.record(tmp_path / where):
            ran.append(hap.rank)
        assert hap._plans.entries[0].runner.program == before
        return str(caught.value)

    assert len(set(on_ranks(c, plan, body))) == 1
    assert not ran


def test_offsets_of_clocks() -> None:
    """Rank 1's clock is 1000 behind; the rounds take about 10, and it begins them 2 and 3 later."""
    rank0 = {"machine": "a", "began": [100, 200], "ended": [110, 210]}
    rank1 = {"machine": "b", "began": [102 - 1000, 203 - 1000], "ended": [112 - 1000, 211 - 1000]}
    assert list(offsets([rank0, rank0, rank1])) == [(0, 0), (0, 0), ((989 + 1007) // 2, 9)]
    assert list(offsets([rank0, {**rank1, "machine": "a"}])) == [(0, 0), (998, 9)], "of a machine, yet apart"
