"""Seconds and bytes that the accelerators of machines add to a step in micro-batches, in closed form."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from hetspmd.cluster.cluster import Cluster
from hetspmd.cluster.devices import Device, Network, virtual_device
from hetspmd.cost.level_costs import inside_seconds_in_turns
from hetspmd.cost.machine_turn_memory import inside_bytes_in_turns
from hetspmd.cost.model import CostModel
from hetspmd.optimize.compiler import plan_for
from hetspmd.optimize.zero_levels import repeated_in
from hetspmd.program.lengths import lengths_for
from hetspmd.program.levels import Across, Both, between
from hetspmd.program.machine_turn_layout import MachineTurnLayout
from hetspmd.program.micro_batches import micro_batches
from hetspmd.program.nested_turns import nest_turns
from hetspmd.program.turn_steps import TurnSteps
from hetspmd.rules.theory import Theory, derive
from hetspmd.search import constraints as known
from hetspmd.trace.trace import trace

LATENCY, BANDWIDTH, LAUNCH = 1e-6, 1e9, 1e-9
COUNT = 3


class Linear(nn.Module):
    """One weight of 512 bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(16, 8, bias=False)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(self.a(x), y, reduction="sum")


def case(rows: int, level: int = 0) -> tuple[Theory, TurnSteps, MachineTurnLayout, CostModel]:
    """Two machines of four at a level of ZeRO, in micro-batches of a third of the rows."""
    theory = derive(trace(Linear(), (torch.randn(rows, 16), torch.randn(rows, 8)), {}))
    machine = virtual_device(Device("d", {"default": 1e12}, launch=LAUNCH), 4, Network(BANDWIDTH, LATENCY))
    cluster = Cluster((machine,) * 2, Network(1e8, 1e-5))
    batches = micro_batches(theory, COUNT)
    batches = replace(batches, repeated=repeated_in(theory, batches, level))
    plan = plan_for(theory, cluster, known.zero(theory, level), (0.5, 0.5), batches=batches)
    assert plan.inside is not None
    steps = nest_turns(theory, (plan.program, plan.schedule), batches, plan.inside.program)
    layout = MachineTurnLayout(theory, batches, lengths_for(theory.axes, (0.5, 0.5)), (4, 4))
    return theory, steps, layout, CostModel(theory, cluster, batches)


def seconds(rows: int, level: int = 0) -> float:
    _, steps, layout, costs = case(rows, level)
    return inside_seconds_in_turns(costs, layout.lengths, steps, layout)


def test_gradients_are_summed_once() -> None:
    """Down to the first accelerator and up again: two latencies for the loss and for the gradient, whose bytes
    count as computation."""
    _, steps, _, _ = case(48)
    assert not any(between(step) for step in (*steps.before, *steps.turn))
    assert len([step for step in steps.after if isinstance(step, Across)]) == 2
    assert seconds(48) == pytest.approx(2 * 2 * LATENCY + 2 * 4 / BANDWIDTH, rel=1e-6)


def test_what_is_in_the_loop_is_sent_in_each_micro_batch() -> None:
    """At ZeRO-3 the weight, half of which a machine has, is handed out whole in each; its gradient is summed in
    each, of which once counts as computation, and is handed out as the machine's half."""
    _, steps, _, _ = case(48, 3)
    gathered, reduced = (step for step in steps.turn if isinstance(step, Across))
    assert (gathered.kind, reduced.source) == ("all_gather", 1)
    weight = COUNT * (LATENCY + 512 / BANDWIDTH)
    gradient = COUNT * 2 * LATENCY + (COUNT - 1) * (512 + 256) / BANDWIDTH
    loss = 2 * LATENCY + 2 * 4 / BANDWIDTH
    assert seconds(48, 3) == pytest.approx(weight + gradient + loss, rel=1e-6)


def test_two_samples_of_four_accelerators() -> None:
    """A machine has two samples of each micro-batch, so that two of its accelerators have none: it computes what is
    divided half as fast as four."""
    theory, steps, layout, costs = case(12)
    divided = [s for s in steps.turn if isinstance(s, Both) and s.inner.factor is not None]
    work = 0.0
    for step in divided:
        row = costs.row_index(step.instruction, step.outer)
        own = max(costs.row_seconds(step.instruction, row, layout.lengths))
        work += 0.0 if theory.rules[step.instruction].alias else own - COUNT * LAUNCH
    assert work > 0
    assert seconds(12) - seconds(48) == pytest.approx(work, rel=1e-6)


def test_memory_of_a_turn() -> None:
    """The weight, its gradient and the optimizer's state, the batch, and no more than what a turn's two samples of
    an accelerator, its summand and the sum take; without the optimizer less by the state."""
    _, steps, layout, _ = case(48)
    held = inside_bytes_in_turns(layout, steps)
    assert held[0] == held[1]
    lasting = 512 * (1 + 1) + 128 * 8 + 48 * (16 + 8) * 4
    assert lasting <= held[0] <= lasting + 3 * 512 + 12 * 2 * 8 * 4
    assert inside_bytes_in_turns(layout, steps, optimizer_bytes=0)[0] <= held[0] - 128 * 8
