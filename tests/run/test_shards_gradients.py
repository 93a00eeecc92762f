"""What is computed by hand from gradients of shards is element by element, or refused with the line to write."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from divided import X, net, on_four
from torch import nn

import hetspmd
from hetspmd.errors import ShardError
from hetspmd.run.module import HAP

LOOKS: dict[str, Callable[[Any], Any]] = {
    "a norm": lambda p: p.grad.norm(),
    "a norm of data": lambda p: p.grad.data.norm(2).item() ** 2,
    "detached": lambda p: p.grad.detach().norm(),
    "a sum of squares": lambda p: p.grad.pow(2).sum(),
    "torch's norm": lambda p: torch.norm(p.grad),
    "torch.linalg": lambda p: torch.linalg.vector_norm(p.grad),
    "a mean": lambda p: p.grad.abs().mean(),
    "the largest": lambda p: p.grad.max(),
    "not a number": lambda p: torch.isnan(p.grad).any(),
    "finite": lambda p: torch.isfinite(p.grad).all(),
    "a product with the weights": lambda p: (p.grad * p).sum(),
    "flat": lambda p: torch.cat([p.grad.view(-1)]),
    "a row": lambda p: p.grad[0],
    "numpy": lambda p: p.grad.cpu().numpy(),
    "many": lambda p: torch._foreach_norm([p.grad]),
    "centralized": lambda p: p.grad.add_(-p.grad.mean(dim=0, keepdim=True)),
    "noise": lambda p: p.grad.add_(torch.randn_like(p.grad)),
    "noise in place": lambda p: p.grad.normal_(),
    "a row that is frozen": lambda p: p.grad.__setitem__(0, 0.0),
    "a file": lambda p: torch.save(p.grad, io.BytesIO()),
}


@pytest.mark.parametrize("name", LOOKS)
def test_what_mixes_elements_is_refused(name: str) -> None:
    def body(hap: HAP) -> str:
        hap(X).backward()
        with pytest.raises(ShardError) as caught:
            LOOKS[name](hap.module.a.weight)
        return str(caught.value)

    for text in on_four(body):
        assert text.startswith(
            "the gradient of a.weight of [24, 12] lies in shards, of which this rank holds ["
        )
        assert "hap.full_gradients()" in text or "hetspmd.on_full_gradient(hap," in text


def by_hand(model: nn.Module) -> list[Any]:
    """Three steps of a loop that handles gradients element by element."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    found: list[Any] = []
    kept: dict[str, Any] = {}
    for step in range(3):
        loss = model(X)
        loss.backward()
        for name, p in model.named_parameters():
            if p.grad is None:
                continue
            p.grad *= 0.5
            p.grad = p.grad * 3.0
            p.grad.data.mul_(0.9)
            p.grad.clamp_(-0.05, 0.05).nan_to_num_()
            p.grad.add_(p.detach(), alpha=0.01)
            kept[name] = 0.9 * kept.get(name, 0.0) + p.grad.clone()
            p.grad = torch.where(p.grad > 0, p.grad, 2 * p.grad) + kept[name].sign() * 1e-3
        scale = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.2)
        optimizer.step()
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        found += [loss.item(), scale.item()]
    return found


def test_what_is_element_by_element_is_that_of_one_device() -> None:
    want = by_hand(net())
    for found in on_four(by_hand):
        assert found == pytest.approx(want, rel=1e-9)


def test_norms_of_all_gradients_know_them() -> None:
    def norms(model: nn.Module) -> list[float]:
        model(X).backward()
        parameters = list(model.parameters())
        gradients = [p.grad for p in parameters if p.grad is not None]
        found = torch.nn.utils.get_total_norm(gradients)
        torch.nn.utils.clip_grad_value_(parameters, 0.01)
        return [found.item(), torch.nn.utils.get_total_norm([p.grad for p in parameters]).item()]  # type: ignore[misc]  # every parameter has one

    want = norms(net())
    assert all(found == pytest.approx(want, rel=1e-9) for found in on_four(norms))


def test_torchs_own_code_meets_plain_gradients() -> None:
    """Gradient scalers, optimizers, copies of models, and parameters whose gradient is taken away."""

    def body(hap: HAP) -> None:
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        optimizer = torch.optim.AdamW(hap.parameters(), lr=0.01)
        scaler.scale(hap(X)).backward()
        scaler.step(optimizer)
        scaler.update()
        weight = hap.module.a.weight
        assert all(type(v) is torch.Tensor for v in optimizer.state[weight].values())
        assert repr(weight.grad).startswith("ShardValues(")
        copied = copy.deepcopy(weight.grad)
        torch.testing.assert_close(copied, weight.grad)
        weight.grad = copied
        assert hetspmd.get_total_norm(hap) > 0
        del weight.grad
        assert weight.grad is None
        hap(X).backward()
        assert weight.grad is not None
        hap.zero_grad()
        assert weight.grad is None

    on_four(body)


SENT: dict[str, Callable[[Any], Any]] = {
    "gradients": lambda p: dist.all_reduce(p.grad),
    "an average": lambda p: dist.all_reduce(p.grad.div_(4.0), op=dist.ReduceOp.SUM),
    "values": lambda p: dist.broadcast(p.data, 0),
    "a parameter": lambda p: dist.broadcast(p.detach(), 0),
    "a gathering": lambda p: dist.all_gather([torch.zeros(24, 12)] * 4, p.grad),
}


@pytest.fixture
def group() -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("name", SENT)
def test_collectives_by_hand_are_refused(name: str) -> None:

    def body(hap: HAP) -> str:
        hap(X).backward()
        with pytest.raises(ShardError) as caught:
            SENT[name](hap.module.a.weight)
        return str(caught.value)

    for text in on_four(body):
        assert text.endswith("Leave it out: HAP reduces gradients, and keeps parameters alike")
