"""Across machines, candidates are compared with what the accelerators inside add to each."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from hetspmd.cluster.cluster import Cluster
from hetspmd.optimize.compile_options import CompileOptions
from hetspmd.optimize.compiler import compile_plan
from hetspmd.optimize.hierarchy import counting_inside, inside_of, step_across
from hetspmd.optimize.synthesis import Synthesis
from hetspmd.optimize.synthesize import synthesize
from hetspmd.report.candidates import candidates_text
from hetspmd.search.constraints import resolve
from hetspmd.search.search import Limits
from hetspmd.trace.trace import split_example
from workbench import traced


def machines(inside: float, between: float) -> Cluster:
    """Three machines of unlike sizes with links of ``inside`` and ``between`` bytes/s."""
    kind = {"memory": 1e12, "memory_bandwidth": 1e8, "launch": 1e-6}
    return Cluster.load(
        {
            "devices": [
                {"name": f"m{i}", "flops": flops, "accelerators": count, **kind,
                 "inside": {"bandwidth": inside, "latency": 1e-6}}
                for i, (flops, count) in enumerate(((1e8, 8), (1e8, 4), (5e7, 4)))
            ],
            "network": {"bandwidth": between, "latency": 1e-5},
        }
    )  # fmt: skip


@pytest.fixture(scope="module")
def ctx() -> Synthesis:
    theory = traced("dlrm").theory
    return Synthesis(theory, machines(1e6, 1e8), resolve(theory, {}), Limits(seconds=600.0))


def test_what_is_added_inside_counts_in_the_comparison(ctx: Synthesis) -> None:
    outcome = synthesize(ctx)
    inside = inside_of(ctx, outcome.best)
    better, less = step_across(ctx)
    assert better.best.seconds > outcome.best.seconds, "without what is added it is not the fastest"
    assert better.best.seconds + less.seconds < 0.92 * (outcome.best.seconds + inside.seconds)
    assert less == inside_of(ctx, better.best)
    first, *others = better.considered
    assert (first.verdict, first.reason, first.seconds) == ("taken", better.best.reason, better.best.seconds)
    assert len(better.considered) == len(outcome.considered)
    assert all(c.verdict in ("slower", "bound") for c in others)
    none_left = replace(ctx, thresholds=replace(ctx.thresholds, inside_gain=1.0))
    assert counting_inside(none_left, (outcome, inside)) == (outcome, inside)


def test_the_plan_has_the_better_candidate(ctx: Synthesis) -> None:
    entry = traced("dlrm")
    args, kwargs = split_example(entry.example)
    options = CompileOptions(machines="virtual", segments=1)
    plan = compile_plan(entry.model, args, kwargs, ctx.cluster, options, traced=ctx.theory.graph)
    better, inside = step_across(ctx)
    assert plan.cost.step_seconds == pytest.approx(better.best.seconds + inside.seconds)
    assert plan.program == better.best.program
    assert "slower, but for what goes on inside machines" in candidates_text(plan)


class Blocks(nn.Module):
    """Residual convolutions, whose accelerators hold other things than their machines."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1))
            for _ in range(5)
        )
        self.head = nn.Linear(8, 10)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = F.avg_pool2d(F.relu(self.stem(x)), 3, 2, 1, count_include_pad=False)
        for block in self.blocks:
            h = F.relu(h + block(h))
        return F.cross_entropy(self.head(h.mean((2, 3))), y)


class Hot(nn.Module):
    """An output for which all samples are looked at."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(3, 13), nn.Linear(13, 13), nn.Linear(13, 3)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        h = self.a(x).relu()
        hot = self.b(h) > 0
        return {"loss": F.cross_entropy(self.c(h), y), "bytes": hot.to(torch.uint8), "all": hot.all(0)}


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("part", [1.0, 1.1, 1.5])
def test_a_plan_is_found_again_in_the_memory_that_it_holds(count: int, part: float) -> None:
    """What machines are counted to hold as devices must not keep it from being seen."""
    torch.manual_seed(0)
    model, x, y = Blocks(), torch.randn(12, 3, 9, 9), torch.randint(0, 10, (12,))
    entries: list[dict[str, Any]] = [
        {"name": "m0", "flops": "0.5 GFLOP/s", "memory_bandwidth": "0.5 GB/s", "launch": "1ns", "accelerators": 2,
         "inside": {"bandwidth": "10GB/s", "latency": "1us"}},
        {"name": "m1", "flops": "1 GFLOP/s", "memory_bandwidth": "1 GB/s", "launch": "1ns", "accelerators": 4,
         "inside": {"bandwidth": "1GB/s", "latency": "1ns"}},
    ]  # fmt: skip
    description = {"devices": entries, "network": {"bandwidth": "1GB/s", "latency": "1ns"}}
    options = CompileOptions(machines="virtual", micro_batches=count)
    free = compile_plan(model, (x, y), {}, Cluster.load(description), options)
    assert free.inside is not None
    for entry, held in zip(entries, free.inside.memory_bytes, strict=True):
        entry["memory"] = max(int(held * part), 1)
    plan = compile_plan(model, (x, y), {}, Cluster.load(description), options)
    assert plan.inside is not None
    assert all(n <= e["memory"] for n, e in zip(plan.inside.memory_bytes, entries, strict=True))
    assert plan.cost.step_seconds <= free.cost.step_seconds * (1 + 1e-9)


@pytest.mark.parametrize("segments", [2, "auto"])
def test_one_segment_where_accelerators_have_no_program_of_several(segments: int | Literal["auto"]) -> None:
    device = {"memory_bandwidth": "1MB/s", "launch": "1ns"}
    inside = {"bandwidth": "100GB/s", "latency": "1ns"}
    cluster = Cluster.load({
        "devices": [
            {**device, "name": "d0", "flops": "2 MFLOP/s"},
            {**device, "name": "d1", "flops": "1 MFLOP/s", "accelerators": 2, "inside": inside},
        ],
        "network": {"bandwidth": "10GB/s", "latency": "1ns"},
    })  # fmt: skip
    torch.manual_seed(0)
    batch = {"x": torch.randn(2, 3), "y": torch.randint(0, 3, (2,))}
    plan = compile_plan(Hot(), (), batch, cluster, CompileOptions(machines="virtual", segments=segments))
    assert plan.inside is not None
    assert plan.theory.axes.segments == 1
