"""Averages of weights, target networks and copies over shards: as on one device."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from divided import CLUSTER, X, net, net_plan, on_four
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from hetspmd.run.module import HAP

Values = dict[str, torch.Tensor]


class Average:
    """An exponential moving average as most scripts write it: a copy, and a loop over the parameters."""

    def __init__(self, model: nn.Module, copied: nn.Module | None = None) -> None:
        self.module = copy.deepcopy(model) if copied is None else copied
        self.module.requires_grad_(False)

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        for mine, theirs in zip(self.module.parameters(), model.parameters(), strict=True):
            mine.data.mul_(0.9).add_(theirs.data, alpha=0.1)
        for mine, theirs in zip(self.module.buffers(), model.buffers(), strict=True):
            mine.copy_(theirs)


class Named(Average):
    """The same by name and lerp_."""

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        theirs = dict(model.named_parameters())
        for name, mine in self.module.named_parameters():
            mine.lerp_(theirs[name], 0.1)
        for mine, other in zip(self.module.buffers(), model.buffers(), strict=True):
            mine.copy_(other)


class Swa:
    """torch's own."""

    def __init__(self, model: nn.Module, **options: Any) -> None:
        self.average = AveragedModel(model, use_buffers=True, **options)
        self.module = self.average.module

    def update(self, model: nn.Module) -> None:
        self.average.update_parameters(model)


AVERAGES: dict[str, Callable[[nn.Module], Any]] = {
    "by hand": Average,
    "by name": Named,
    "swa": Swa,
    "torch's ema": lambda model: Swa(model, multi_avg_fn=get_ema_multi_avg_fn(0.9)),
}


def averaged(model: nn.Module, make: Callable[[nn.Module], Any]) -> tuple[list[float], Any]:
    """Three steps with an average after each; losses of both, and the average's module."""
    average = make(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-4)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(X)
        loss.backward()
        optimizer.step()
        average.update(model)
        average.module.eval()
        with torch.no_grad():
            losses += [loss.item(), average.module(X).item()]
    return losses, average.module


@pytest.mark.parametrize("name", list(AVERAGES))
def test_averages_of_a_copy(name: str) -> None:
    losses, module = averaged(net(), AVERAGES[name])
    want = module.state_dict()

    def body(hap: HAP) -> tuple[list[float], Values]:
        found, average = averaged(hap, AVERAGES[name])
        assert isinstance(average, HAP)
        return found, average.full_state_dict()

    for found, state in on_four(body):
        assert found == pytest.approx(losses, rel=1e-10)
        for key, value in want.items():
            torch.testing.assert_close(state[key], value, rtol=1e-9, atol=1e-11)


def test_an_average_of_a_copy_from_before() -> None:
    """Made before HAP(...), it is whole; wrapped by the same plan, it lies in the same shards."""
    losses, _ = averaged(net(), Average)

    def body(hap: HAP, before: nn.Module) -> list[float]:
        ema = HAP(before, CLUSTER, plan=hap.plan, process_group=hap.everyone)
        return averaged(hap, lambda model: Average(model, ema))[0]

    for found in on_four(body, before=copy.deepcopy):
        assert found == pytest.approx(losses, rel=1e-10)


def test_a_target_network_that_follows_in_steps() -> None:
    """Trained alternately with its original; a hard update loads the one into the other."""

    def played(online: nn.Module, update: Callable[[Any, Any], object]) -> list[float]:
        target = copy.deepcopy(online)
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (online, target)]
        losses = []
        for step in range(4):
            for model, optimizer in zip((online, target), optimizers, strict=True):
                optimizer.zero_grad()
                loss = model(X + step)
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
            if step % 2:
                update(target, online)
        return losses

    want = played(net(), lambda target, online: target.load_state_dict(online.state_dict()))
    full = on_four(lambda hap: played(hap, lambda t, o: t.load_state_dict(o.full_state_dict())))

    @torch.no_grad()
    def each(target: nn.Module, online: nn.Module) -> None:
        for mine, theirs in zip(target.parameters(), online.parameters(), strict=True):
            mine.copy_(theirs)
        for mine, theirs in zip(target.buffers(), online.buffers(), strict=True):
            mine.copy_(theirs)

    for found in (*full, *on_four(lambda hap: played(hap, each))):
        assert found == pytest.approx(want, rel=1e-10)


def test_a_copy_is_apart_from_its_original() -> None:
    def body(hap: HAP) -> tuple[float, float, float, bool]:
        first = hap(X).item()
        other = copy.deepcopy(hap)
        assert other.plan is hap.plan
        assert other.module is not hap.module
        with torch.no_grad():
            for p in other.parameters():
                p.zero_()
        other.eval()
        with torch.no_grad():
            zero = other(X).item()
        hap.train()
        marked = all(p.grad is None for p in other.parameters())
        return first, zero, hap(X).item(), marked

    want = net()(X).item()
    for first, zero, again, marked in on_four(body):
        assert first == pytest.approx(want)
        assert again == pytest.approx(want)
        assert zero == pytest.approx(X.pow(2).mean().item())
        assert marked


def test_a_copy_within_something_that_is_copied() -> None:
    """A trainer with the module and its optimizer."""

    def body(hap: HAP) -> list[float]:
        class Trainer:
            def __init__(self) -> None:
                self.model = hap
                self.optimizer = torch.optim.SGD(hap.parameters(), lr=0.1, momentum=0.9)

            def step(self) -> float:
                self.optimizer.zero_grad()
                loss = self.model(X)
                loss.backward()
                self.optimizer.step()
                return loss.item()

        trainer = Trainer()
        trainer.step()
        other = copy.deepcopy(trainer)
        return [other.step(), trainer.step(), other.step(), trainer.step()]

    for found in on_four(body):
        assert found[0] == pytest.approx(found[1], rel=1e-12)
        assert found[2] == pytest.approx(found[3], rel=1e-12)


def test_a_whole_copy_is_a_module_like_any_other() -> None:
    single = net()
    want = copy.deepcopy(single.state_dict())

    def body(hap: HAP) -> tuple[nn.Module, bool]:
        model = hap.full_module()
        again = copy.deepcopy(model)
        with torch.no_grad():
            for p in model.parameters():
                p.normal_()
        return again, all(p.requires_grad for p in model.parameters())

    for model, trainable in on_four(body):
        assert trainable
        state = model.state_dict()
        assert list(state) == list(want)
        assert all(torch.equal(state[key], value) for key, value in want.items())
        assert net_plan() is net_plan()


def test_a_copy_has_plans_of_its_own_for_other_batches_and_modes() -> None:
    """A plan that is compiled after the copy is one of the copy's own module."""

    def body(hap: HAP) -> tuple[float, float]:
        average = copy.deepcopy(hap)
        with torch.no_grad():
            for parameter in average.parameters():
                parameter.mul_(0.5)
            average.eval()
            hap.eval()
            return average(X[:5]).item(), hap(X[:5]).item()

    for found in on_four(body):
        model = net().eval()
        plain = model(X[:5]).item()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.5)
        assert found == pytest.approx((model(X[:5]).item(), plain))
