"""Seconds of a step in micro-batches: each turn is a step of its rows, and adds to the sums."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from hetspmd.cluster.cluster import Cluster
from hetspmd.cost.model import CostModel
from hetspmd.program.micro_batches import micro_batches
from hetspmd.rules.theory import Theory, derive
from hetspmd.trace.graph import PARAMETER
from hetspmd.trace.trace import split_example, trace

LAUNCH = 1e-5
BANDWIDTH = 1e9
ROWS = 12


class Net(nn.Module):
    """Products, a bias, an embedding, a norm, a parameter that is used as it is, and a gradient through a view."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(50, 16)
        self.one, self.two = nn.Linear(16, 24), nn.Linear(24, 16, bias=False)
        self.norm = nn.LayerNorm(16)
        self.scale = nn.Parameter(torch.ones(16))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.two(torch.relu(self.one(self.words(x)))) * self.scale)
        return nn.functional.mse_loss(hidden, y, reduction="sum")


def theory_of(rows: int) -> Theory:
    batch = {"x": torch.randint(50, (rows, 3)), "y": torch.randn(rows, 3, 16)}
    return derive(trace(Net(), *split_example(batch)))


def devices(*flops: float) -> Cluster:
    kind = {"memory_bandwidth": BANDWIDTH, "memory": 1e12, "launch": LAUNCH}
    of: dict[str, Any] = {"devices": [{"name": f"d{i}", "flops": f, **kind} for i, f in enumerate(flops)]}
    if len(flops) > 1:
        of["network"] = {"bandwidth": 1e9, "latency": 1e-6}
    return Cluster.load(of)


@pytest.mark.parametrize("flops", [1e6, 1e15], ids=["by FLOPs", "by bytes"])
@pytest.mark.parametrize("count", [2, 3, 12])
def test_turns_are_steps_of_their_rows(flops: float, count: int) -> None:
    """On one device: an instruction of the loop takes as long as in so many steps of a part of the batch, and what
    it adds to the sums; one outside of the loop as long as without one."""
    whole, part = theory_of(ROWS), theory_of(ROWS // count)
    batches = micro_batches(whole, count)
    in_turns = CostModel(whole, devices(flops), batches).whole()
    once = CostModel(whole, devices(flops)).whole()
    small = CostModel(part, devices(flops)).whole()
    summed = 0
    for instruction, phase in zip(whole.graph.instructions, batches.loop.phases, strict=True):
        i = instruction.id
        assert instruction.op == part.graph.instructions[i].op
        added = [t for t in instruction.outputs if t in batches.summed]
        if phase != "in":
            assert not added or phase == "after"
            assert in_turns[i] == pytest.approx(once[i])
            continue
        if added:  # where FLOPs bind, the sum is hidden behind them
            summed += len(added)
            assert in_turns[i, 0] > count * small[i, 0]
            moved = sum(whole.graph.tensors[t].nbytes for t in added) * (2 + 3 * (count - 1))
            assert in_turns[i, 0] <= count * (small[i, 0] + LAUNCH * len(added)) + moved / BANDWIDTH + 1e-12
        else:
            assert in_turns[i] == pytest.approx(count * small[i])
    assert summed == len(batches.summed) == 8


def test_devices_read_their_parts_of_weights_in_each_turn() -> None:
    """A product whose weight the devices divide: the activations are read once in all, the weights in each turn."""
    theory = theory_of(ROWS)
    count = 4
    batches = micro_batches(theory, count)
    names = {t.id: t.name for t in theory.graph.tensors}
    product = next(
        i
        for i in theory.graph.instructions
        if "mm" in i.op and {"two.weight"} & {names[theory.graph.parameter_of.get(t, t)] for t in i.inputs}
    )
    once, turns = (CostModel(theory, devices(1e15, 1e15), b) for b in (None, batches))
    nbytes = {t: theory.graph.tensors[t].nbytes for t in (*product.inputs, *product.outputs)}
    (weight,) = (t for t in product.inputs if t in theory.graph.parameter_of)
    for row, axis in enumerate(theory.row_axes[product.id]):
        signature = np.array([once.signature(product.id, row)]), np.array([turns.signature(product.id, row)])
        before, after = once.terms(signature[0]), turns.terms(signature[1])
        cut, whole = (float((a - b)[0, 0]) * BANDWIDTH for a, b in zip(after[1:3], before[1:3], strict=True))
        assert float(after[3][0, 0]) == pytest.approx(count * LAUNCH)
        divided = axis is not None and theory.axes.axes[axis].units in (16, 24)
        # Of rows that divide the weight its bytes are among those that are cut; of others it is whole.
        again = (count - 1) * nbytes[weight]
        assert (cut, whole) == pytest.approx((again, 0.0) if divided else (0.0, again), abs=1e-3)


def test_a_parameter_is_updated_once() -> None:
    theory = theory_of(ROWS)
    once, turns = (CostModel(theory, devices(1e9), b).whole() for b in (None, micro_batches(theory, 6)))
    sources = [i.id for i in theory.graph.instructions if i.op == PARAMETER]
    assert (once[sources] == turns[sources]).all()
    assert (once[sources] > 0).any()
