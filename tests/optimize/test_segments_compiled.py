"""How many segments a plan has is decided by cost, and such plans do all that others do."""

from __future__ import annotations

import copy
import dataclasses
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import hetspmd
import hetspmd.optimize.synthesize as synthesize
from hetspmd.cluster.cluster import Cluster
from hetspmd.dist.simulated_world import run_ranks
from hetspmd.errors import ConstraintError, PlanError
from hetspmd.optimize.compile_options import CompileOptions
from hetspmd.optimize.compiler import compile_plan
from hetspmd.placement import is_sharded
from hetspmd.plan.plan import Plan
from hetspmd.program.program import Communicate
from hetspmd.report import plan_json, program_text
from hetspmd.run.module import HAP
from workbench import traced


class Contrast(nn.Module):
    """Layers that are bound by FLOPs, then layers that are bound by memory."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.dense = nn.ModuleList(nn.Linear(48, 48) for _ in range(2))
        self.light = nn.ModuleList(nn.Sequential(nn.Tanh(), nn.Sigmoid(), nn.SiLU()) for _ in range(2))
        self.head = nn.Linear(48, 5)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        for layer in self.dense:
            x = layer(x)
        for block in self.light:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x), labels)


def batch(rows: int = 80) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(1)
    return {
        "x": torch.randn(rows, 48, generator=g, dtype=torch.float64),
        "labels": torch.randint(5, (rows,), generator=g),
    }


def unlike(bandwidth: str = "10TB/s") -> Cluster:
    """A device that computes quickly, one that reads memory quickly, and one that does neither. The optimizer,
    which reads memory wherever it runs, is free."""
    devices = [
        {"name": "computes", "flops": 8e9, "memory_bandwidth": 1e9, "launch": 1e-9, "optimizer": 1e18},
        {"name": "reads", "flops": 1e9, "memory_bandwidth": 8e9, "launch": 1e-9, "optimizer": 1e18},
        {"name": "weak", "flops": 1e9, "memory_bandwidth": 1e9, "launch": 1e-9, "optimizer": 1e18},
    ]
    return Cluster.load({"devices": devices, "network": {"bandwidth": bandwidth, "latency": "1ns"}})


@cache
def compiled(segments: Any = "auto", bandwidth: str = "10TB/s") -> Plan:
    return hetspmd.compile(Contrast().double(), batch(), unlike(bandwidth), segments=segments)


def moved(plan: Plan) -> list[Communicate]:
    return [
        s for s in plan.program.steps
        if isinstance(s, Communicate) and s.kind == "rebalance"
        and plan.costs.move_seconds(s.tensor, s.source, s.target, s.kind, plan.lengths) > 0
    ]  # fmt: skip


def test_segments_where_they_gain() -> None:
    plan, one = compiled(), compiled(1)
    assert len(one.ratios) == 1
    assert len(plan.ratios) > 1
    assert moved(plan)
    assert plan.cost.step_seconds < 0.97 * one.cost.step_seconds
    assert plan.baselines["one_segment"] == pytest.approx(one.cost.step_seconds, rel=1e-12)
    first, last = plan.ratios[0], plan.ratios[-1]
    assert first[0] > last[0]
    assert first[1] < last[1]


def machines(network: str = "10TB/s") -> Cluster:
    """The same with several accelerators each, but the last."""
    entries = unlike(network).to_dict()["devices"]
    for entry, count in zip(entries, (2, 3), strict=False):
        entry |= {"accelerators": count, "inside": {"bandwidth": "10TB/s", "latency": "1ns"}}
    return Cluster.load({"devices": entries, "network": {"bandwidth": network, "latency": "1ns"}})


def test_segments_across_machines_where_they_gain() -> None:
    def made(segments: Any, network: str = "10TB/s") -> Plan:
        options: Any = {"segments": segments, "machines": "virtual"}
        return hetspmd.compile(Contrast().double(), batch(), machines(network), **options)

    plan, one = made("auto"), made(1)
    assert plan.inside is not None
    assert len(plan.ratios) > 1 == len(one.ratios)
    assert moved(plan)
    assert plan.cost.step_seconds < 0.97 * one.cost.step_seconds
    assert plan.baselines["one_segment"] == pytest.approx(one.cost.step_seconds, rel=1e-12)
    assert Plan.from_json(plan.to_json()) == plan
    hetspmd.verify(Contrast().double(), batch(), machines(), plan=plan).require()
    assert made("auto", "1MB/s").to_json() == made(1, "1MB/s").to_json()
    hetspmd.verify(Contrast().double(), batch(), machines(), plan=made(3)).require()
    small = compile_plan(Contrast().double(), (), batch(40), machines(), CompileOptions(), like=plan)
    assert small.inside is not None
    hetspmd.verify(Contrast().double(), batch(40), machines(), plan=small).require()


def test_one_segment_where_a_cut_costs_more_than_it_gains() -> None:
    plan, one = compiled("auto", "1MB/s"), compiled(1, "1MB/s")
    assert len(plan.ratios) == 1
    assert plan.to_json() == one.to_json()


def test_rounds_that_gain_nothing_end_the_tries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cuts that are dear, though free ones would gain, are searched in rounds alone; where these gain, or a number
    is asked for, all else is tried with them, too."""
    tried: dict[str, set[int]] = {"alternate": set(), "overlap_variants": set()}

    def watch(name: str) -> None:
        usual = getattr(synthesize, name)

        def watched(ctx: Any, *rest: Any, **options: Any) -> Any:
            tried[name].add(ctx.theory.axes.segments)
            return usual(ctx, *rest, **options)

        monkeypatch.setattr(synthesize, name, watched)

    for name in tried:
        watch(name)
    for bandwidth, segments, rounds, all_else in (
        ("50MB/s", "auto", {1, 2}, {1}),
        ("50MB/s", 2, {1, 2}, {1, 2}),
        ("1GB/s", "auto", {1, 2, 4}, {1, 2, 4}),
    ):
        for seen in tried.values():
            seen.clear()
        plan = compiled.__wrapped__(segments, bandwidth)
        assert len(plan.active) == 3
        assert (tried["alternate"], tried["overlap_variants"]) == (rounds, all_else), (bandwidth, segments)


@pytest.mark.parametrize("seed", [pytest.param(s, marks=pytest.mark.slow if s else ()) for s in range(4)])
def test_never_worse_than_one_segment(seed: int) -> None:
    dice = np.random.default_rng(seed)
    name = ("bert", "vgg19", "dlrm", "gpt2")[seed]
    devices = [
        {"name": f"d{j}", "flops": float(10 ** dice.uniform(8, 9.5)), "launch": 1e-8,
         "memory_bandwidth": float(10 ** dice.uniform(8, 9.5)), "memory": "16GiB"}
        for j in range(3)
    ]  # fmt: skip
    cluster = Cluster.load({"devices": devices, "network": {"bandwidth": "100GB/s", "latency": "1us"}})
    entry = traced(name)
    best = hetspmd.compile(entry.model, entry.example, cluster, loss=entry.loss)
    one = hetspmd.compile(entry.model, entry.example, cluster, loss=entry.loss, segments=1)
    assert best.cost.step_seconds <= one.cost.step_seconds
    assert hetspmd.compile(entry.model, entry.example, cluster, loss=entry.loss).to_json() == best.to_json()


@pytest.mark.parametrize("segments", [2, 3])
def test_a_number_of_segments_is_kept_to(segments: int) -> None:
    plan = compiled(segments)
    assert len(plan.ratios) == segments == plan.graph.segment_count
    report = hetspmd.verify(Contrast().double(), batch(), unlike(), plan=plan)
    report.require()


def test_segments_within_the_memory() -> None:
    """The first device has a little less memory than the free plan takes: the shares of all segments together keep
    it."""
    free = compiled(2)
    tight = tuple(
        dataclasses.replace(d, memory=1e9 if rank else 0.97 * free.cost.memory_bytes[0])
        for rank, d in enumerate(free.cluster.devices)
    )
    cluster = dataclasses.replace(free.cluster, devices=tight)
    plan = hetspmd.compile(Contrast().double(), batch(), cluster, segments=2)
    assert len(plan.ratios) == 2
    assert all(n <= d.memory for n, d in zip(plan.cost.memory_bytes, cluster.devices, strict=True))
    hetspmd.verify(Contrast().double(), batch(), cluster, plan=plan).require()
    assert str(plan)


def test_segments_beside_idle_devices() -> None:
    from hetspmd.optimize.compiler import plan_for
    from hetspmd.search.constraints import data_parallel

    theory = compiled(2).theory
    ratios = ((0.75, 0.25), (0.0, 1.0))
    plan = plan_for(theory, unlike(), data_parallel(theory), ratios, active=(0, 2))
    assert plan.idle == (1,)
    assert plan.segment_shares == ((0.75, 0.0, 0.25), (0.0, 0.0, 1.0))
    assert moved(plan)
    hetspmd.verify(Contrast().double(), batch(), unlike(), plan=plan).require()


def test_verify_with_segments() -> None:
    hetspmd.verify(Contrast().double(), batch(), unlike(), segments=2).require()


@pytest.mark.parametrize("segments", [0, -1, True, "many", 1.5])
def test_no_number_of_segments(segments: Any) -> None:
    with pytest.raises(ConstraintError, match="give 'auto' or a number from 1 on"):
        hetspmd.compile(Contrast().double(), batch(), unlike(), segments=segments)


def test_a_plan_file_keeps_segments() -> None:
    plan = compiled(2)
    again = Plan.from_json(plan.to_json())
    assert again == plan
    assert again.to_json() == plan.to_json()
    with pytest.raises(PlanError, match="ratios of 1 segments, the graph has 2"):
        plan.with_step(ratios=plan.ratios[:1])


def test_reports() -> None:
    plan = compiled(2)
    text = str(plan)
    assert "segment 0  " in text
    assert "segment 1: " in text
    document = plan_json(plan)
    assert len(document["segments"]) == 2
    assert np.allclose([sum(s["ratios"]) for s in document["segments"]], 1.0)
    assert document["segments"][0]["modules"][0].startswith("dense.0")
    assert sum(document["ratios"]) == pytest.approx(1.0)
    assert len(document["program"]) == len(plan.program.steps)
    assert document["sensitivity"]
    assert sum(abs(s["elasticity"]) for s in document["sensitivity"]) == pytest.approx(1.0, abs=1e-6)
    assert "Rebalance(e" in program_text(plan)
    timeline = plan.timeline()
    assert timeline.step_seconds == pytest.approx(plan.cost.step_seconds, rel=1e-12)
    assert "Rebalance(" in str(timeline) or any("Rebalance" in t.name for t in timeline.transfers)
    explained = plan.explain("head.weight")
    assert any(a.seconds is not None for a in explained.alternatives)
    one = plan_json(compiled(1))
    assert one["segments"] == [{"ratios": one["ratios"], "modules": one["segments"][0]["modules"]}]


def test_timeline_without_waits_where_lengths_agree() -> None:
    """At equal ratios no device waits at a cut: the step of the same program is as long as without cuts."""
    from hetspmd.optimize.compiler import plan_for
    from hetspmd.search.constraints import data_parallel

    plan = compiled(2)
    ratios = (0.5, 0.3, 0.2)
    same = plan_for(plan.theory, plan.cluster, data_parallel(plan.theory), ratios)
    one = compiled(1)
    whole = plan_for(one.theory, one.cluster, data_parallel(one.theory), ratios)
    assert not moved(same)
    assert same.cost.step_seconds == pytest.approx(whole.cost.step_seconds, rel=1e-9)
    found = same.timeline()
    assert found.step_seconds == pytest.approx(same.cost.step_seconds, rel=1e-12)
    assert all(t.waited == 0 for t in found.transfers if "Rebalance" in t.name)


def test_other_batches_and_evaluation_keep_the_segments() -> None:
    """A segmented plan's module plans for another batch and for evaluation, with the same shards."""
    plan = compiled(2)
    small = batch(16)

    def losses_of(model: torch.nn.Module) -> list[float]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        for example in (batch(), small, batch()):
            optimizer.zero_grad()
            loss = model(**example)
            loss.backward()
            losses.append(loss.item())
            optimizer.step()
        model.eval()
        with torch.no_grad():
            return [*losses, model(**small).item()]

    def train(rank: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
        hap = HAP(copy.deepcopy(reference), plan.cluster, plan=plan, process_group=rank)
        return losses_of(hap), hap.full_state_dict()

    reference = Contrast().double()
    found = run_ranks(3, train)
    losses = losses_of(reference)
    for got, state in found:
        assert got == pytest.approx(losses, rel=1e-10)
        for key, value in reference.state_dict().items():
            torch.testing.assert_close(state[key], value, rtol=1e-9, atol=1e-12)


def test_parameters_in_shards_of_their_segments() -> None:
    """Stored forms of two segments at unlike ratios: shards of their own lengths, and evaluation keeps them."""
    from hetspmd.optimize.compiler import plan_for
    from hetspmd.search.constraints import zero_like

    theory = compiled(2).theory
    plan = plan_for(theory, unlike(), zero_like(theory), ((0.5, 0.0, 0.5), (0.25, 0.75, 0.0)))
    layout = plan.parameter_layout()
    assert is_sharded(layout["dense.0.weight"][0])
    assert layout["dense.0.weight"][1] == (24, 0, 24)
    assert layout["head.weight"][1] in ((1, 4, 0), (2, 3, 0))

    def body(rank: Any) -> float:
        hap = HAP(copy.deepcopy(model), plan.cluster, plan=plan, process_group=rank)
        hap.eval()
        with torch.no_grad():
            return float(hap(**example))

    model, example = Contrast().double().eval(), batch(16)
    with torch.no_grad():
        want = float(model(**example))
    assert run_ranks(3, body) == pytest.approx([want] * 3, rel=1e-12)
