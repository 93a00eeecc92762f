"""float16 in micro-batches: gradients are computed of the scaled loss, before the loss is scaled."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from small_plans import cluster
from torch import nn
from torch.nn import functional as F

import hetspmd
from hetspmd.dist.simulated_world import run_ranks
from hetspmd.errors import GradientError
from hetspmd.plan.plan import Plan
from hetspmd.run.module import HAP

DEVICES = cluster(4, 2, 1)
SMALL = 2e-7
"""By which the loss is multiplied: its gradients are below float16's least number, and scaled ones are not."""


@pytest.fixture(autouse=True)
def _no_scalers_of_other_tests() -> None:
    gc.collect()


class Model(nn.Module):
    """Two layers; ``size`` is what the loss is multiplied by."""

    def __init__(self, size: float = SMALL) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.size = nn.Linear(8, 16), nn.Linear(16, 5), size

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.last(F.gelu(self.first(x))), labels).float() * self.size


def batch() -> dict[str, torch.Tensor]:
    made = torch.Generator().manual_seed(1)
    return {"x": torch.randn(12, 8, generator=made), "labels": torch.randint(5, (12,), generator=made)}


def plan_of(model: nn.Module, **options: Any) -> Plan:
    with torch.autocast("cpu", torch.float16):
        return hetspmd.compile(model, batch(), DEVICES, micro_batches=3, **options)


def on_ranks(body: Callable[[HAP], Any], model: nn.Module, **options: Any) -> list[Any]:
    plan = plan_of(model, **options)
    assert len(plan.active) > 1
    _ = plan.theory, plan.digest

    def rank(communicator: Any) -> Any:
        return body(HAP(copy.deepcopy(model), DEVICES, plan=plan, process_group=communicator))

    return run_ranks(DEVICES.ranks, rank)


def loss_of(module: nn.Module) -> torch.Tensor:
    with torch.autocast("cpu", torch.float16):
        loss: torch.Tensor = module(**batch())
    return loss


def exact(model: nn.Module) -> dict[str, torch.Tensor]:
    """Gradients in float64."""
    double = copy.deepcopy(model).double()
    double(x=batch()["x"].double(), labels=batch()["labels"]).backward()
    return {n: p.grad for n, p in double.named_parameters() if p.grad is not None}


def largest(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> float:
    """The largest error of a gradient, relative to its largest element."""
    return max(float((got[n].double() - g).abs().max() / g.abs().max()) for n, g in want.items())


@pytest.mark.parametrize("scaler", [torch.amp.GradScaler, hetspmd.GradScaler])
@pytest.mark.parametrize("zero", [0, 3])
def test_small_gradients_are_kept(scaler: type[torch.amp.GradScaler], zero: int) -> None:
    model = Model()
    want = exact(model)
    eager = copy.deepcopy(model)
    loss_of(eager).backward()
    unscaled = {n: p.grad for n, p in eager.named_parameters() if p.grad is not None}
    assert largest(unscaled, want) > 0.3, "without a scale they vanish"

    def body(hap: HAP) -> dict[str, torch.Tensor]:
        scale = scaler("cpu", init_scale=2.0**16)
        optimizer = torch.optim.SGD(hap.parameters(), lr=0.0)
        for _ in range(2):
            optimizer.zero_grad()
            scale.scale(loss_of(hap) / 2).backward()  # a part of the loss, as in accumulation
            scale.unscale_(optimizer)
            scale.step(optimizer)
            scale.update()
        return {n: 2 * g for n, g in hap.full_gradients().items()}

    for got in on_ranks(body, model, zero=zero):
        assert largest(got, want) < 0.01


def test_the_same_steps_are_skipped_as_on_one_device() -> None:
    def train(module: nn.Module) -> tuple[list[float], list[torch.Tensor]]:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**46, growth_interval=3)
        optimizer, scales = torch.optim.SGD(module.parameters(), lr=1e4), []
        for _ in range(30):
            optimizer.zero_grad()
            scaler.scale(loss_of(module)).backward()
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        return scales, [p.detach() for p in module.parameters()]

    model = Model()
    want, final = train(copy.deepcopy(model))
    assert want[0] < 2.0**46
    assert max(want[-6:]) > min(want[-6:])

    def body(hap: HAP) -> tuple[list[float], dict[str, torch.Tensor]]:
        return train(hap)[0], hap.full_tensors()

    for scales, tensors in on_ranks(body, model):
        assert scales == want
        for got, parameter in zip(tensors.values(), final, strict=True):
            torch.testing.assert_close(got, parameter, rtol=0.02, atol=2e-3)


def test_a_scaled_loss_without_a_scaler_is_an_error() -> None:
    def body(hap: HAP) -> str:
        with pytest.raises(GradientError, match=r"multiplied by 1024, .*make|before the first step") as error:
            (loss_of(hap) * 1024).backward()
        return str(error.value)

    assert all("bfloat16" in text for text in on_ranks(body, Model()))


def test_without_a_scaler_the_loss_is_as_it_is() -> None:
    model = Model(size=1.0)
    want = exact(model)

    def body(hap: HAP) -> dict[str, torch.Tensor]:
        loss_of(hap).backward()
        return hap.full_gradients()

    for got in on_ranks(body, model):
        assert largest(got, want) < 0.02
