"""Shards are plain parameters while an optimizer's own code runs; its hooks and its closure meet shards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from divided import X, net, on_four, train
from torch import nn

import hetspmd
from hetspmd.errors import ShardError
from hetspmd.run.module import HAP
from hetspmd.run.shard_tensors import Shard

USES: dict[str, Callable[[nn.Module], Any]] = {
    "a norm": lambda model: [p.detach().norm() for p in model.parameters()],
    "a penalty": lambda model: sum((p**2).sum() for p in model.parameters()),
    "noise": lambda model: [p.data.normal_() for p in model.parameters()],
    "a row": lambda model: [p.data[0].zero_() for p in model.parameters()],
}


def in_hook_before(hap: HAP, use: Callable[[nn.Module], Any]) -> None:
    optimizer = torch.optim.SGD(hap.parameters(), lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: use(hap) and None)
    hap(X).backward()
    optimizer.step()


def in_hook_after(hap: HAP, use: Callable[[nn.Module], Any]) -> None:
    optimizer = torch.optim.SGD(hap.parameters(), lr=0.1)
    hap(X).backward()
    optimizer.step()
    optimizer.register_step_post_hook(lambda *_: use(hap) and None)
    optimizer.step()


def in_closure(hap: HAP, use: Callable[[nn.Module], Any]) -> None:
    """Before the model is called, and as an argument with a name."""
    optimizer = torch.optim.SGD(hap.parameters(), lr=0.1)

    def closure() -> torch.Tensor:
        use(hap)
        return hap(X)

    optimizer.step(closure=closure)


@pytest.mark.parametrize("use", USES.values(), ids=USES)
@pytest.mark.parametrize("place", [in_hook_before, in_hook_after, in_closure], ids=lambda p: p.__name__)
def test_code_of_the_user_within_a_step_meets_shards(
    place: Callable[..., None], use: Callable[[nn.Module], Any]
) -> None:
    def body(hap: HAP) -> None:
        with pytest.raises(ShardError):
            place(hap, use)

    on_four(body)


class Seen(torch.optim.SGD):
    """Says of which class its parameters are when it steps."""

    kinds: list[set[type]]

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        self.kinds = [*getattr(self, "kinds", []), {type(p) for g in self.param_groups for p in g["params"]}]
        return loss


class Holding(torch.optim.Optimizer):
    """Steps another optimizer, and then goes on (SAM, Lookahead)."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__([p for group in inner.param_groups for p in group["params"]], {})
        self.inner, self.kinds = inner, set[type]()

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = self.inner.step(closure)
        self.kinds = {type(p) for p in self.param_groups[0]["params"]}
        return loss


def with_closure(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    losses = []

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(X)
        loss.backward()
        losses.append(loss.item())
        return loss

    for _ in range(3):
        optimizer.step(closure)
    return losses


def test_an_optimizers_own_code_meets_plain_parameters() -> None:
    """Also after its closure and after the step of an optimizer that it holds; they are shards again afterwards."""
    hetspmd.allow_optimizer(Seen)
    hetspmd.allow_optimizer(Holding)

    def body(hap: HAP) -> tuple[list[float], bool]:
        optimizer = Seen(hap.parameters(), lr=0.1, momentum=0.9)
        optimizer.register_step_pre_hook(lambda *_: None)
        optimizer.register_step_post_hook(lambda *_: None)
        holding = Holding(optimizer)
        losses = with_closure(hap, holding)
        plain = [*optimizer.kinds, holding.kinds] == [{nn.Parameter}] * 4
        return losses, plain and type(hap.module.a.weight) is Shard

    want = with_closure((model := net()), torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    for losses, right in on_four(body):
        assert right
        assert losses == pytest.approx(want, rel=1e-10)


def test_the_next_call_ends_a_step_that_failed() -> None:
    def body(hap: HAP) -> None:
        optimizer = torch.optim.SGD(hap.parameters(), lr=0.1)

        def failing() -> torch.Tensor:
            hap(X)
            raise ValueError("in the closure")

        with pytest.raises(ValueError, match="in the closure"):
            optimizer.step(failing)
        assert type(hap.module.a.weight) is Shard
        train(hap)
        assert type(hap.module.a.weight) is Shard

    on_four(body)


class Failing(torch.optim.SGD):
    """Fails in its first step."""

    failed = False

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        if not self.failed:
            self.failed = True
            raise ValueError("in the step")
        return super().step(closure)


def test_so_does_the_next_step() -> None:
    hetspmd.allow_optimizer(Failing)

    def body(hap: HAP) -> None:
        optimizer = Failing(hap.parameters(), lr=0.1)
        hap(X).backward()
        with pytest.raises(ValueError, match="in the step"):
            optimizer.step()
        optimizer.step()
        assert type(hap.module.a.weight) is Shard

    on_four(body)


class Adapting(torch.optim.Optimizer):
    """Keeps among its options what it has computed of its shards (Prodigy)."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"d": 1.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["d"] = sum(float(p.abs().sum()) for p in group["params"])


def test_options_of_an_optimizer_that_is_allowed_may_differ_between_ranks() -> None:
    hetspmd.allow_optimizer(Adapting)

    def body(hap: HAP) -> float:
        optimizer = Adapting([p for p in hap.parameters() if p.dim() == 2])
        train(hap, optimizer=optimizer)
        return optimizer.param_groups[0]["d"]

    assert len(set(on_four(body))) > 1
