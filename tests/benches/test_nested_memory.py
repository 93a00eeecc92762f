"""Regions of torch.utils.checkpoint inside of others hold less, as predicted, as counted, and as on one device."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import test_counted_memory
import torch
from test_counted_memory import CLOSE, KINDS, SPARED, counted, prompt_peaks
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from emulated.memory import LiveBytes
from hetspmd.optimize.compiler import plan_for
from hetspmd.optimize.in_micro_batches import in_micro_batches
from hetspmd.plan.plan import Plan
from hetspmd.rules.theory import derive
from hetspmd.trace.trace import trace
from workbench import cluster

ROWS, WIDTH, GROUPS, LAYERS = 16384, 32, 3, 4
SPEEDS = (3, 2)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(torch.sin(x))))


class Stack(nn.Module):
    """Groups of layers, each under a region. ``depth`` 2 has one around each layer as well, and 3 between them one
    around each half of a group."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer() for _ in range(GROUPS * LAYERS))
        self.depth = depth

    def group(self, first: int, count: int, depth: int, x: torch.Tensor) -> torch.Tensor:
        parts = {1: 1, 2: count, 3: 2}[depth]
        for part in range(parts):
            at, many = first + part * count // parts, count // parts
            if depth == 1:
                for layer in self.layers[at : at + many]:
                    x = layer(x)
            else:
                x = checkpoint(partial(self.group, at, many, depth - 1), x, use_reentrant=False)
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for first in range(0, len(self.layers), LAYERS):
            x = checkpoint(partial(self.group, first, LAYERS, self.depth), x, use_reentrant=False)
        return x.square().mean()


def rows() -> dict[str, torch.Tensor]:
    return {"x": torch.randn(ROWS, WIDTH, requires_grad=True)}


def on_one_device(depth: int) -> int:
    """The most bytes that eager PyTorch holds in the second of two steps."""
    model = copy.deepcopy(Stack(depth))
    with LiveBytes() as counter:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        for _ in range(2):
            counter.reset_peak()
            optimizer.zero_grad()
            torch.autograd.backward(model(**rows()))
            optimizer.step()
    return counter.peak


def planned(
    depth: int, kind: str, count: int, monkeypatch: pytest.MonkeyPatch, speeds: tuple[int, ...] = SPEEDS
) -> Plan:
    model, batch = Stack(depth), {k: v.detach() for k, v in rows().items()}
    monkeypatch.setattr(test_counted_memory, "built", lambda _name: (model, batch))
    theory, batches = in_micro_batches(derive(trace(model, (), batch)), count)
    shares = tuple(s / sum(speeds) for s in speeds)
    return plan_for(theory, cluster(*speeds), KINDS[kind](theory), shares, batches=batches)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "count"),
    [("data parallel", 1), ("data parallel", 2), ("ZeRO", 1), ("ZeRO", 2), ("tensor parallel", 1)],
)
def test_nested_regions_as_counted(kind: str, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each depth holds less than the one before, on every rank."""
    speeds = (2, 1) if kind == "tensor parallel" else SPEEDS
    most: list[list[int]] = []
    for depth in (1, 2, 3):
        plan = planned(depth, kind, count, monkeypatch, speeds)
        held = counted("", plan)
        for rank, predicted in enumerate(prompt_peaks(plan)):
            assert predicted * (1 - SPARED) <= held[rank] <= predicted * (1 + CLOSE), (depth, rank)
        most.append(held)
    for outer, inner, innermost in zip(*most, strict=True):
        assert innermost < inner < (0.5 if count == 1 else 0.7) * outer


@pytest.mark.parametrize("depth", [2, *(pytest.param(d, marks=pytest.mark.slow) for d in (1, 3))])
def test_what_one_device_holds(depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan of one device is predicted to hold what eager PyTorch holds with the same regions."""
    (predicted,) = planned(depth, "data parallel", 1, monkeypatch, (1,)).cost.memory_bytes
    assert abs(on_one_device(depth) / predicted - 1) < 0.001
