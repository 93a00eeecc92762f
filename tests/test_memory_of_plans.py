"""A plan is found again in the memory that it holds, and more memory is never too little."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Literal

import pytest
import torch
from torch import nn

import hetspmd
from hetspmd.cluster.cluster import Cluster


class Norms(nn.Module):
    """Linear layers with norms between them, and outputs beside the loss."""

    def __init__(self, width: int, layers: int, norm: bool) -> None:
        super().__init__()
        parts: list[nn.Module] = [nn.Linear(16, width)]
        for _ in range(layers):
            parts += [*([nn.LayerNorm(width)] if norm else []), nn.GELU(), nn.Linear(width, width)]
        self.body, self.head = nn.Sequential(*parts), nn.Linear(width, 8)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        z = self.head(self.body(x))
        one, other = nn.functional.cross_entropy(z, y), z.pow(2).mean()
        return one + 0.1 * other, one, other, z


def unlike(speeds: Sequence[float], memory: Sequence[float | None], bandwidth: str, latency: str) -> Cluster:
    """Devices of so many GFLOP/s and GB/s; no memory says no limit."""
    devices = [
        {
            "flops": f"{s} GFLOP/s",
            "memory_bandwidth": f"{s} GB/s",
            "launch": "1ns",
            **({"memory": m} if m else {}),
        }
        for s, m in zip(speeds, memory, strict=True)
    ]
    return Cluster.load({"devices": devices, "network": {"bandwidth": bandwidth, "latency": latency}})


@pytest.mark.filterwarnings("ignore::hetspmd.errors.DroppedOutputWarning")
@pytest.mark.parametrize("count", [1, "auto"])
@pytest.mark.parametrize("part", [1.0, 1.0001, 1.02, 1.1])
def test_a_plan_fits_in_the_memory_that_it_holds(part: float, count: int | Literal["auto"]) -> None:
    """What stands before its rounds and its storage holds a little more than the plan."""
    torch.manual_seed(0)
    model, batch = Norms(200, 4, norm=False), (torch.randn(16, 16), torch.randint(0, 8, (16,)))
    speeds = (1, 4, 4, 3, 3, 1)
    free = hetspmd.compile(model, batch, unlike(speeds, [None] * 6, "0.2GB/s", "1us"), micro_batches=count)
    memory = [part * n for n in free.cost.memory_bytes]
    plan = hetspmd.compile(model, batch, unlike(speeds, memory, "0.2GB/s", "1us"), micro_batches=count)
    assert all(n <= m for n, m in zip(plan.cost.memory_bytes, memory, strict=True))
    assert plan.cost.step_seconds <= 1.05 * free.cost.step_seconds


def test_more_memory_is_never_too_little() -> None:
    """A program that does not fit at the first ratios may fit at others."""
    torch.manual_seed(0)
    model, batch = Norms(128, 4, norm=True), (torch.randn(32, 16), torch.randint(0, 8, (32,)))
    seconds = []
    for memory in (353983, 350443, 346903, 343363, 336284, 329204):
        plan = hetspmd.compile(model, batch, unlike((3, 1, 2, 1), [memory] * 4, "1GB/s", "1ns"))
        assert max(plan.cost.memory_bytes) <= memory
        seconds.append(plan.cost.step_seconds)
    assert all(more <= 1.01 * less for more, less in pairwise(seconds))
