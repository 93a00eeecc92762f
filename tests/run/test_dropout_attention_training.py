"""HAP trains a model whose fused attention has dropout: a gradient has the masks of its loss."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from machine_plans import machines

from fused_dropout import batch, efficient, kernel_backward, kernel_forward, model
from hetspmd.cluster.cluster import Cluster
from hetspmd.dist.communicator import Communicator
from hetspmd.dist.simulated_world import run_ranks
from hetspmd.lower import attention as lowering
from hetspmd.run.module import HAP
from hetspmd.trace.dropout_attention import BACKWARD, FORWARD
from workbench import cluster

Direction = Mapping[str, torch.Tensor]
CASES: dict[str, tuple[Cluster, dict[str, Any]]] = {
    "devices": (cluster(3, 2, 1), {}),
    "micro-batches": (cluster(3, 2, 1), {"micro_batches": 2}),
    "micro-batches and shards": (cluster(3, 2, 1), {"micro_batches": 3, "zero": 3}),
    "computed again": (cluster(3, 2, 1), {"recompute": "all"}),
    "machines": (machines(1, 2, inside="1TB/s"), {"machines": "virtual"}),
    "accelerators": (machines(1, 2, inside="1TB/s"), {"machines": "flat"}),
}


def step(
    devices: Cluster, options: dict[str, Any], direction: Direction, length: float, *, gradients: bool
) -> tuple[float, dict[str, torch.Tensor]]:
    """The loss of a first step from parameters that are moved, and the whole gradients."""
    nets = [model(efficient) for _ in range(devices.ranks)]
    x = batch()
    for net in nets:
        with torch.no_grad():
            for name, along in direction.items():
                net.get_parameter(name).add_(along, alpha=length)
    torch.manual_seed(0)  # the ranks' seed is what comes next

    def body(communicator: Communicator) -> tuple[float, dict[str, torch.Tensor]]:
        net = nets[communicator.rank]
        hap = HAP(net, devices, example=(x,), process_group=communicator, check_plan=False, **options)
        loss = hap(x)
        if not gradients:
            return loss.item(), {}
        loss.backward()
        return loss.item(), hap.full_gradients()

    return run_ranks(devices.ranks, body)[0]


@pytest.mark.parametrize("name", CASES)
def test_a_gradient_has_the_masks_of_its_loss(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    devices, options = CASES[name]
    calls: list[str] = []

    def forward(*args: Any) -> Any:
        calls.append("forward")
        return kernel_forward(*args)

    def backward(*args: Any) -> Any:
        calls.append("backward")
        return kernel_backward(*args)

    monkeypatch.setitem(lowering.KERNELS, "cpu", {FORWARD: forward, BACKWARD: backward})
    torch.manual_seed(9)
    direction = {n: torch.randn_like(p) for n, p in model(efficient).named_parameters()}
    _, gradients = step(devices, options, direction, 0.0, gradients=True)
    assert calls.count("forward") == calls.count("backward") >= 2 * 2  # blocks, devices that have samples
    slope = sum(float((gradients[n] * along).sum()) for n, along in direction.items())
    higher, lower = (step(devices, options, direction, x, gradients=False)[0] for x in (1e-5, -1e-5))
    assert slope == pytest.approx((higher - lower) / 2e-5, rel=1e-6, abs=1e-9)
