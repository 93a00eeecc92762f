"""Machines of several accelerators in micro-batches: what plans of three levels compute equals one device."""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from machine_plans import busy_machines as machines
from ranks import CLOSE, loss_of, on_ranks
from record_cases import STEPS, recorded, train
from small_models import Case, case

import hetspmd
from hetspmd.cluster.cluster import Cluster
from hetspmd.cluster.machines import flat
from hetspmd.dist.machine_levels import MachineRuntime
from hetspmd.dist.simulated_world import run_ranks
from hetspmd.errors import MemoryLimitError, MicroBatchError, OptionError, PlanError
from hetspmd.lower.lowering import turns_of
from hetspmd.optimize.compiler import plan_for
from hetspmd.optimize.in_micro_batches import in_micro_batches
from hetspmd.optimize.zero_levels import repeated_in
from hetspmd.placement import is_sharded
from hetspmd.plan.plan import Plan
from hetspmd.program.levels import Both, Transfer, between, within
from hetspmd.program.program import Communicate
from hetspmd.record.timestamps import transfer_name
from hetspmd.rules.theory import derive
from hetspmd.run.module import HAP
from hetspmd.search import constraints as known
from hetspmd.trace.blocks import chooser
from hetspmd.trace.trace import trace
from hetspmd.verify.comparison import VerifyReport, verify
from workbench import Traced, traced

pytestmark = pytest.mark.filterwarnings("ignore::hetspmd.errors.DroppedOutputWarning")

KINDS = {
    "data parallel": (known.data_parallel, 0),
    "ZeRO-1": (lambda theory: known.zero(theory, 1), 1),
    "ZeRO-2": (lambda theory: known.zero(theory, 2), 2),
    "ZeRO-3": (lambda theory: known.zero(theory, 3), 3),
    "tensor parallel": (known.tensor_parallel, 0),
}
"""Programs of the machines, and the level of ZeRO of which collectives are in the loop."""


def compiled(of: Traced | Case, devices: Cluster, count: int | str, **options: Any) -> Plan:
    example = of.example if isinstance(of, Traced) else of.batch
    given = {"machines": "virtual", "micro_batches": count, "loss": getattr(of, "loss", None)} | options
    return hetspmd.compile(of.model, example, devices, **given)


def forced(of: Traced, devices: Cluster, count: int, kind: str) -> Plan:
    """A known program of the machines, of uneven shares."""
    theory, batches = in_micro_batches(of.theory, count)
    assert batches is not None
    constraints, level = KINDS[kind]
    batches = replace(batches, repeated=repeated_in(theory, batches, level))
    ratios = tuple(share / (len(devices.devices) + 0.2) for share in (0.9, 1.3, 1.0)[: devices.world])
    ratios = tuple(share / sum(ratios) for share in ratios)
    return plan_for(theory, devices, constraints(theory), ratios, batches=batches)


def proved(of: Traced, plan: Plan) -> VerifyReport:
    """Two steps of SGD and of AdamW in float64, as one device's; with the plan as its file has it."""
    assert plan.inside is not None
    assert plan.active == tuple(range(plan.world))
    plan = Plan.from_json(plan.to_json())
    report = verify(of.model, of.example, plan.cluster, plan=plan, loss=of.loss, tolerance=1e-9)
    report.require()
    return report


COMPILED = [
    ("bert", (2, 3), 2),
    ("gpt2", (1, 2), 3),
    ("llama", (4, 2), 4),
    ("lstm", (2, 1, 3), 3),
    ("vit", (3, 2), 2),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "accelerators", "count"), COMPILED)
def test_compiled_plans_equal_one_device(name: str, accelerators: tuple[int, ...], count: int) -> None:
    of, devices = traced(name), machines(*accelerators)
    plan = compiled(of, devices, count)
    assert plan.micro_batches == count
    proved(of, plan)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("name", "accelerators", "count"),
    [("gpt2", (2, 3), 2), ("bert", (1, 2), 3), ("llama", (2, 1, 3), 4), ("bert-moe", (4, 2), 3)],
)
def test_known_programs_equal_one_device(
    name: str, accelerators: tuple[int, ...], count: int, kind: str
) -> None:
    """Samples, features or parameters divided between the machines, samples inside, of micro-batches that are not
    all as large; collectives before the loop, in it and after it."""
    of = traced(name)
    plan = forced(of, machines(*accelerators), count, kind)
    proved(of, plan)
    assert plan.batches is not None
    steps, _ = turns_of(plan, plan.batches)
    across = {phase for phase, step in steps.together(("before", "in", "after")) if between(step)}
    wanted = {"data parallel": {"after"}, "ZeRO-1": {"before", "after"}, "ZeRO-2": {"before", "in"}}
    assert across >= wanted.get(kind, {"in"})
    assert ("in" in across) == (kind not in ("data parallel", "ZeRO-1"))
    inner = [s.inner for s in steps.turn if isinstance(s, Both)]
    assert sum(row.factor is not None for row in inner) > len(inner) // 3
    gradients = {p.gradient for p in plan.graph.parameters}
    inside = [(phase, m.tensor) for phase, s in steps.together(("before", "in", "after")) for m in within(s)]
    assert all(phase == "after" for phase, tensor in inside if tensor in gradients)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["data parallel", "ZeRO-3"])
def test_recomputed_steps_equal_one_device(kind: str) -> None:
    """Blocks that are computed again in each micro-batch, of parameters that are gathered again for it."""
    of = traced("gpt2")
    again = trace(of.model, (), of.example, loss=of.loss, recompute=chooser("all"))
    of = replace(of, theory=derive(again))
    plan = forced(of, machines(2, 3), 3, kind)
    assert plan.graph.recomputed
    proved(of, plan)


def test_a_small_step_equals_one_device() -> None:
    """Of nine samples in two micro-batches on (2, 3); the plan, its file, its text and its timeline."""
    c = case("mlp")
    plan = compiled(c, machines(2, 3), 2)
    assert plan.inside is not None
    assert [len(rows) for rows in plan.lengths.units if sum(rows) == 9]
    assert plan == Plan.from_json(plan.to_json())
    verify(c.model, c.batch, plan.cluster, plan=plan, tolerance=1e-9).require()
    text = str(plan)
    assert "Micro-batches: 2, of 5, 4 samples" in text
    assert "collectives run in each micro-batch" in text
    assert "peak memory of each" in text
    seconds = plan.timeline().step_seconds
    assert seconds == pytest.approx(plan.cost.step_seconds - plan.inside.seconds)


def test_both_ways_are_compared() -> None:
    """The cheaper one is kept, with the other one's seconds; in any number of micro-batches that is asked for."""
    c, devices = case("mlp"), machines(2, 3)
    for count in (2, "auto"):
        plans = {way: compiled(c, devices, count, machines=way) for way in ("virtual", "flat", "auto")}
        assert plans["virtual"].inside is not None
        assert plans["flat"].cluster == flat(devices)
        seconds = {way: plan.cost.step_seconds for way, plan in plans.items()}
        assert seconds["auto"] == min(seconds.values())
        other = "single_accelerators" if plans["auto"].inside else "virtual_devices"
        assert other in plans["auto"].baselines


def test_hap_trains_takes_other_batches_and_evaluates() -> None:
    """Batches of fewer samples have as many micro-batches as they have samples at most; an evaluation has none."""
    c, devices = case("mlp"), machines(2, 1)
    sizes = (9, 4, 2, 9)
    batches = [{key: value[:size] for key, value in c.batch.items()} for size in sizes]

    def trained(run: Any) -> list[float]:
        optimizer, losses = torch.optim.AdamW(run.parameters(), lr=1e-2), []
        for batch in batches:
            optimizer.zero_grad()
            loss = loss_of(run(**batch))
            (3 * loss).backward()
            clip = hetspmd.clip_grad_norm_ if isinstance(run, HAP) else torch.nn.utils.clip_grad_norm_
            losses += [loss.item(), float(clip(run.parameters(), 0.5))]
            optimizer.step()
        run.eval()
        with torch.no_grad():
            losses.append(loss_of(run(**c.batch)).item())
        run.train()
        return losses

    single = copy.deepcopy(c.model)
    want = trained(single)
    models = [copy.deepcopy(c.model) for _ in range(devices.ranks)]

    def rank(communicator: Any) -> tuple[list[float], dict[str, torch.Tensor], list[int]]:
        options: Any = {"machines": "virtual", "micro_batches": 3}
        hap = HAP(models[communicator.rank], devices, example=c.batch, process_group=communicator, **options)
        assert isinstance(hap._runtime, MachineRuntime)
        losses = trained(hap)
        plans = [plan for plan in hap._plans.plans() if plan.program.gradients]
        return losses, hap.full_state_dict(), [plan.micro_batches for plan in plans]

    for losses, state, counts in run_ranks(devices.ranks, rank):
        assert losses == pytest.approx(want, rel=1e-9)
        assert counts == [3, 3, 2]
        for key, value in single.state_dict().items():
            torch.testing.assert_close(state[key], value, **CLOSE)


def test_random_numbers_are_the_same_where_tensors_are() -> None:
    """With dropout, accelerators of a machine keep the same parameters, and verification draws as one device."""
    c = case("attention", dropout=0.5)
    plan = compiled(c, machines(2, 3), 2)
    verify(c.model, c.batch, plan.cluster, plan=plan, tolerance=1e-9).require()
    layout = plan.parameter_layout()

    def body(hap: HAP) -> dict[str, torch.Tensor]:
        optimizer = torch.optim.SGD(hap.parameters(), lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            loss_of(hap(**c.batch)).backward()
            optimizer.step()
        return {n: p.detach().clone() for n, p in hap.module.named_parameters()}

    results = on_ranks(c, plan, body)
    for rank, found in enumerate(results):
        for name, value in found.items():
            torch.testing.assert_close(value, results[0 if rank < 2 else 2][name], **CLOSE)
            if not is_sharded(layout[name][0]):
                torch.testing.assert_close(value, results[0][name], **CLOSE)


def test_recorded(tmp_path: Path) -> None:
    """Every turn, with what goes on inside of machines and between them."""
    c = case("mlp", torch.float32)
    plan = compiled(c, machines(2, 3), 3)
    assert plan.batches is not None
    plain = on_ranks(c, plan, lambda hap: train(hap, c.batch))
    found = on_ranks(c, plan, lambda hap: recorded(hap, c.batch, tmp_path / "steps.json"))
    for (numbers, measured), want in zip(found, plain, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(numbers, want, strict=True)), "recording changes results"
        assert measured == found[0][1]
    measured = found[0][1]
    steps, _ = turns_of(plan, plan.batches)
    count: Counter[str] = Counter()
    for phase, step in steps.together(("before", "in", "after")):
        if isinstance(step, Both):
            name = plan.graph.instructions[step.instruction].name
            count[name] += plan.micro_batches if phase == "in" else 1
    for rank in range(5):
        got = Counter(s.name for s in measured.spans if s.device == rank and s.what == "instruction")
        assert got == {name: STEPS * times for name, times in count.items()}
    inside = [one for one in measured.carried if " inside(" in one.name]
    assert {tuple(sorted(one.issued)) for one in inside} <= {(0, 1), (2, 3, 4)}
    every = [step for _, step in steps.together(("before", "in", "after"))]
    assert bool(inside) == any(within(step) for step in every)
    others = {one.name for one in measured.carried} - {one.name for one in inside}
    assert others == {transfer_name(cast(Transfer, step), plan.graph) for step in every if between(step)}


@pytest.mark.parametrize("active", [(0, 2), (1,)])
def test_idle_machines(active: tuple[int, ...]) -> None:
    """They get the results of a step; a machine alone has its accelerators."""
    c = case("mlp")
    theory, batches = in_micro_batches(c.theory, 2)
    shares = {(0, 2): (0.4, 0.6), (1,): (1.0,)}[active]
    asked = known.data_parallel(theory)
    plan = plan_for(theory, machines(2, 3, 1), asked, shares, active=active, batches=batches)
    assert plan.active == active
    verify(c.model, c.batch, plan.cluster, plan=plan, tolerance=1e-9).require()


@pytest.mark.slow
def test_compiled_ops() -> None:
    c = case("mlp")
    plan = compiled(c, machines(2, 3), 3)
    plain = on_ranks(c, plan, lambda hap: train(hap, c.batch))
    found = on_ranks(c, plan, lambda hap: train(hap, c.batch), compile=True)
    for numbers, want in zip(found, plain, strict=True):
        for a, b in zip(numbers, want, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


def test_segments() -> None:
    """Shares of their own for each segment, where a number is asked for."""
    c = case("mlp")
    plan = compiled(c, machines(2, 1), 2, segments=2)
    assert plan.graph.segment_count == 2
    verify(c.model, c.batch, plan.cluster, plan=plan, tolerance=1e-9).require()


@pytest.mark.slow
def test_memory_that_one_batch_does_not_fit() -> None:
    """Where activations are too large, more micro-batches are taken, across machines, too."""
    c = case("attention", dropout=0.0)
    limit = machines(2, 2, memory="20000B")
    with pytest.raises(MemoryLimitError):
        compiled(c, limit, 1)
    plan = compiled(c, limit, "auto")
    assert plan.micro_batches > 1
    assert plan.inside is not None
    assert max(plan.inside.memory_bytes) <= limit.devices[0].memory / 2
    verify(c.model, c.batch, limit, plan=plan, tolerance=1e-9).require()


def test_refused() -> None:
    c, devices = case("mlp"), machines(2, 3)
    with pytest.raises(OptionError, match="zero=1 needs machines='flat'"):
        compiled(c, devices, 2, zero=1)
    plan = compiled(c, machines(2, 3), 2)
    with pytest.raises(PlanError, match="turns of their own"):
        plan.with_step(own_turns=(1, 2))
    with pytest.raises(MicroBatchError):
        compiled(case("conv"), devices, 2)


def test_a_damaged_loop_is_refused() -> None:
    """What is in the loop of a plan file, and is not proved to be the same in each micro-batch."""
    plan = compiled(case("mlp"), machines(2, 3), 2)
    assert plan.batches is not None
    phases, summed = plan.batches.loop.phases, plan.batches.summed
    inside = [
        t for i, phase in enumerate(phases) if phase == "in" for t in plan.graph.instructions[i].outputs
    ]
    tensor = next(t for t in inside if t >= 0 and t not in summed)
    with pytest.raises(PlanError, match=r"does not run in 2 micro-batches .* is said to run in the loop"):
        Plan.from_json(plan.with_step(repeated=(tensor,)).to_json())
    assert plan.inside is not None
    steps = list(plan.inside.program.steps)
    moved = next(n for n, step in enumerate(steps) if isinstance(step, Communicate))
    broken = replace(plan.inside, program=replace(plan.inside.program, steps=tuple(steps[:moved])))
    with pytest.raises(PlanError, match="the program inside its machines cannot be proved"):
        Plan.from_json(plan.with_step(inside=broken).to_json())
