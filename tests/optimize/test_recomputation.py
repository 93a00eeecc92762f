"""``recompute="auto"``: as few blocks as a program needs to fit, beside micro-batches."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import hetspmd
from hetspmd.cluster.cluster import Cluster
from hetspmd.errors import MemoryLimitError, MicroBatchError
from hetspmd.optimize import recomputation
from hetspmd.plan.plan import Plan
from hetspmd.trace.recompute_savings import saved_bytes
from workbench import cluster

DEVICES = cluster(4, 2, 1)


class Layers(nn.Module):
    """Layers that are alike, whose activations are most of the memory."""

    def __init__(self, count: int = 6, *, statistics: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(_Block(statistics=statistics) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


class _Block(nn.Module):
    def __init__(self, *, statistics: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)
        self.norm = nn.BatchNorm1d(16) if statistics else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.sin(F.gelu(torch.tanh(self.norm(self.layer(x)))))


def limited(memory: list[int]) -> Cluster:
    devices = zip(DEVICES.devices, memory, strict=True)
    return replace(DEVICES, devices=tuple(replace(d, memory=float(m)) for d, m in devices))


def between(part: float, model: nn.Module, x: torch.Tensor) -> tuple[Cluster, Plan, Plan]:
    """A cluster whose memory is so far between what a step needs that computes all blocks again, and one that
    computes none."""
    none, every = (hetspmd.compile(model, (x,), DEVICES, recompute=how) for how in ("none", "all"))
    pairs = zip(every.cost.memory_bytes, none.cost.memory_bytes, strict=True)
    return limited([int(a + part * (b - a)) for a, b in pairs]), none, every


def asked(model: nn.Module, x: torch.Tensor, devices: Cluster, **options: Any) -> Plan:
    return hetspmd.compile(model, (x,), devices, **options)


def names(plan: Plan) -> list[str]:
    return [block.block for block in plan.graph.recomputed]


def fits(plan: Plan, devices: Cluster) -> bool:
    return all(b <= d.memory for b, d in zip(plan.cost.memory_bytes, devices.devices, strict=True))


def test_nothing_is_computed_again_where_it_fits() -> None:
    plan = asked(Layers(), torch.randn(512, 16), DEVICES, recompute="auto")
    assert not plan.graph.recomputed
    assert plan.cost == asked(Layers(), torch.randn(512, 16), DEVICES, recompute="none").cost


def test_as_few_blocks_as_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = Layers(), torch.randn(4096, 16)
    devices, none, every = between(0.5, model, x)
    assert max(every.cost.memory_bytes) < 0.7 * max(none.cost.memory_bytes)
    assert every.cost.compute_seconds > none.cost.compute_seconds
    with pytest.raises(MemoryLimitError, match=r"ompute activations again \(recompute='auto'\)"):
        asked(model, x, devices, recompute="none")
    tried: list[int] = []
    plan_of = recomputation._Fitting._plan

    def counted(self: Any, blocks: int, number: int) -> Plan:
        tried.append(blocks)
        return plan_of(self, blocks, number)

    monkeypatch.setattr(recomputation._Fitting, "_plan", counted)
    plan = asked(model, x, devices, recompute="auto")
    assert fits(plan, devices)
    assert 0 < len(plan.graph.recomputed) <= 6
    numbers = [int(name.removeprefix("blocks.")[0]) for name in names(plan)]
    assert numbers == list(range(len(numbers))), "the first of those that are alike"
    assert plan.cost.compute_seconds < every.cost.compute_seconds
    assert tried[:2] == [0, 12]
    assert len(tried) <= 6, "by bisection"
    hetspmd.verify(model, (x,), devices, plan=plan).require()


def test_more_blocks_than_the_fewest_where_that_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the edge of the memory the fewest blocks may leave a program that waits for its collectives."""
    seconds = {8: 1.8, 6: 1.9, 5: 2.0}

    def plan(self: Any, blocks: int, number: int) -> Any:
        if blocks not in seconds:
            raise MemoryLimitError({0: (2, 1)}, ["device"])
        return SimpleNamespace(blocks=blocks, cost=SimpleNamespace(step_seconds=seconds[blocks]))

    monkeypatch.setattr(recomputation._Fitting, "_plan", plan)
    step: Any = SimpleNamespace(graph=SimpleNamespace(instructions=()))
    blocks: Any = ["block"] * 8
    fitting = recomputation._Fitting(step, blocks, MagicMock(), MagicMock())
    found: Any = fitting._fewest(1)
    assert found.blocks == 8
    seconds.update({6: 1.8, 5: 1.8})
    found = fitting._fewest(1)
    assert found.blocks == 5, "of equals the fewest"


def test_a_long_step_is_compiled_once_for_the_blocks_that_zero_3_needs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, x = Layers(), torch.randn(4096, 16)
    devices, _, every = between(0.5, model, x)
    monkeypatch.setattr(recomputation, "THRESHOLDS", replace(recomputation.THRESHOLDS, many_instructions=1))
    tried: list[int] = []
    plan_of = recomputation._Fitting._plan

    def counted(self: Any, blocks: int, number: int) -> Plan:
        tried.append(blocks)
        return plan_of(self, blocks, number)

    monkeypatch.setattr(recomputation._Fitting, "_plan", counted)
    plan = asked(model, x, devices, recompute="auto")
    assert fits(plan, devices)
    assert 0 < len(plan.graph.recomputed) <= 6
    assert plan.cost.compute_seconds < every.cost.compute_seconds
    assert len(tried) == 2, "without blocks, and with as many as are enough"
    hetspmd.verify(model, (x,), devices, plan=plan).require()


def test_too_little_for_all_blocks() -> None:
    model, x = Layers(), torch.randn(512, 16)
    _, _, every = between(0.5, model, x)
    short = limited([int(0.7 * b) for b in every.cost.memory_bytes])
    with pytest.raises(MemoryLimitError):
        asked(model, x, short, recompute="auto")


def test_of_micro_batches_and_recomputation_the_faster() -> None:
    model, x = Layers(), torch.randn(4096, 16)
    devices, _, _ = between(0.5, model, x)
    again = asked(model, x, devices, recompute="auto")
    divided = asked(model, x, devices, micro_batches="auto")
    best = asked(model, x, devices, recompute="auto", micro_batches="auto")
    assert again.micro_batches == 1
    assert divided.micro_batches > 1
    assert not divided.graph.recomputed
    assert best.cost.step_seconds == min(again.cost.step_seconds, divided.cost.step_seconds)
    assert fits(best, devices)
    both = asked(model, x, devices, recompute="all", micro_batches=2)
    assert both.micro_batches == 2
    assert len(both.graph.recomputed) == 6


def test_both_where_neither_is_enough() -> None:
    """Fixed micro-batches with as few blocks as then fit."""
    model, x = Layers(), torch.randn(4096, 16)
    plain, every = (asked(model, x, DEVICES, recompute=how, micro_batches=2) for how in ("none", "all"))
    pairs = zip(plain.cost.memory_bytes, every.cost.memory_bytes, strict=True)
    devices = limited([(a + b) // 2 for a, b in pairs])
    plan = asked(model, x, devices, recompute="auto", micro_batches=2)
    assert plan.micro_batches == 2
    assert plan.graph.recomputed
    assert fits(plan, devices)


def test_a_step_that_cannot_be_split_in_time() -> None:
    model, x = Layers(statistics=True), torch.randn(4096, 16)
    devices, _, _ = between(0.5, model, x)
    with pytest.raises(MicroBatchError):
        asked(model, x, devices, micro_batches="auto", recompute="none")
    plan = asked(model, x, devices, micro_batches="auto", recompute="auto")
    assert plan.micro_batches == 1
    assert plan.graph.recomputed
    assert fits(plan, devices)


def test_a_model_without_blocks() -> None:
    model, x = nn.Linear(16, 16), torch.randn(4096, 16)

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(model(x)).square().mean()

    short = limited([1000] * 3)
    with pytest.raises(MemoryLimitError):
        hetspmd.compile(model, (x,), short, loss=loss, recompute="auto")
    assert not hetspmd.compile(model, (x,), DEVICES, loss=loss, recompute="all").graph.recomputed


@pytest.mark.parametrize(("how", "count"), [("all", 2), ("selective", 1)])
def test_bytes_that_are_saved(how: str, count: int) -> None:
    """Of a block the two activations that only its own backward reads, of tanh and of gelu; where what is cheap is
    computed again, the product that these come of is held."""
    x = torch.randn(64, 16)
    plan = asked(Layers(), x, DEVICES, recompute=how)
    saved = {name.removesuffix(" (selective)"): nbytes for name, nbytes in saved_bytes(plan.graph).items()}
    assert all(saved.get(f"blocks.{i}") == count * x.nbytes for i in range(6))


def test_what_is_cheap_first() -> None:
    """A gated block has a long chain of cheap ops on one product: holding that alone saves most of it."""

    class Long(_Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.layer(x)
            for _ in range(6):
                h = torch.sin(F.gelu(torch.tanh(h)))
            return x + h

    model, x = Layers(), torch.randn(4096, 16)
    model.blocks = nn.ModuleList(Long(statistics=False) for _ in range(4))
    devices, _, every = between(0.4, model, x)
    plan = asked(model, x, devices, recompute="auto")
    assert names(plan)
    assert all(name.endswith(" (selective)") for name in names(plan))
    assert plan.cost.step_seconds < every.cost.step_seconds
    again = hetspmd.verify(model, (x,), devices, plan=plan)
    again.require()


class InRegions(Layers):
    """The layers in a region, of which each has one of its own if asked for."""

    def __init__(self, *, each: bool = True) -> None:
        super().__init__()
        self.each = each

    def layers(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.each else block(x)
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.layers, x, use_reentrant=False).square().mean()


def test_regions_inside_of_others_come_last() -> None:
    """Where less has to be held than the outer region alone does."""
    model, x = InRegions(), torch.randn(4096, 16)
    alone, nested = (hetspmd.compile(each, (x,), DEVICES) for each in (InRegions(each=False), model))
    assert max(nested.cost.memory_bytes) < 0.6 * max(alone.cost.memory_bytes)
    pairs = zip(nested.cost.memory_bytes, alone.cost.memory_bytes, strict=True)
    devices = limited([(a + b) // 2 for a, b in pairs])
    plan = asked(model, x, devices, recompute="auto")
    assert fits(plan, devices)
    assert len(plan.graph.recomputed) > 1
    hetspmd.verify(model, (x,), devices, plan=plan).require()
    wide = limited([2 * b for b in alone.cost.memory_bytes])
    assert "checkpoint 1" not in names(asked(model, x, wide, recompute="auto"))
