"""torch's own clipping over HAP modules: the norm of one device on every rank, also where some ranks are idle."""

from __future__ import annotations

import copy
import math
import warnings
from typing import Any

import pytest
import torch
from ranks import CLOSE, loss_of, on_ranks, own_gradient
from small_models import Case, case
from small_plans import cluster, random_plan
from torch import nn
from torch.nn.utils import clip_grad_norm_ as imported_before
from torch.nn.utils import get_total_norm as total_before

import hetspmd
from hetspmd.errors import GradientError
from hetspmd.optimize.compiler import plan_for
from hetspmd.plan.plan import Plan
from hetspmd.run.module import HAP
from hetspmd.search import constraints as known
from hetspmd.search.constraints import Constraints


def plans(c: Case) -> list[Plan]:
    """Uneven shards, some of them empty; one active device of two; two of three."""
    lone = plan_for(c.theory, cluster(1, 3), Constraints({}), (1.0,), active=(1,))
    idle = plan_for(c.theory, cluster(3, 1, 2), Constraints({}), (0.6, 0.4), active=(0, 2))
    return [random_plan(c, 3, 2), random_plan(c, 3, 4), idle, lone]


def clipped(module: nn.Module, batch: dict[str, Any], **options: Any) -> tuple[torch.Tensor, list[Any]]:
    module.zero_grad()
    loss_of(module(**batch)).backward()
    norm = imported_before(module.parameters(), 0.05, **options)
    return norm, [p.grad for p in module.parameters()]


@pytest.mark.parametrize("name", ["mlp", "conv"])
def test_the_norm_of_one_device(name: str) -> None:
    c = case(name)
    orders: tuple[Any, ...] = (2.0, math.inf, "inf", 1, 0.5)
    want = [clipped(c.model, c.batch, norm_type=order) for order in orders]
    whole = {n: p.grad.clone() for n, p in c.model.named_parameters() if p.grad is not None}

    def body(hap: HAP) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
        norms = [clipped(hap, c.batch, norm_type=order, foreach=False)[0] for order in orders]
        return norms, hap.full_gradients()

    for plan in plans(c):
        results = on_ranks(c, plan, body)
        for norms, gradients in results:
            for norm, first, (expected, _) in zip(norms, results[0][0], want, strict=True):
                assert torch.equal(norm, first)
                torch.testing.assert_close(norm, expected, **CLOSE)
            assert set(gradients) == set(whole)
            for key, value in gradients.items():
                torch.testing.assert_close(value, whole[key], **CLOSE)


def test_every_way_to_call_it() -> None:
    """Each on fresh gradients; one device in the same way."""
    other = nn.Parameter(torch.tensor([3.0, 4.0], dtype=torch.float64))

    def with_other(module: nn.Module) -> list[nn.Parameter]:
        mine = nn.Parameter(other.detach().clone())
        mine.grad = other.detach().clone()
        return [mine, *module.parameters()]

    def old_name(module: nn.Module) -> torch.Tensor:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            return nn.utils.clip_grad_norm(module.parameters(), 0.1)

    ways: list[Any] = [
        lambda m: nn.utils.clip_grad_norm_(m.parameters(), max_norm=0.1),
        lambda m: torch.nn.utils.clip_grad.clip_grad_norm_(list(m.parameters()), 0.1, foreach=True),
        lambda m: imported_before((p for p in m.parameters() if p.requires_grad), 0.1, 2.0, True),
        lambda m: imported_before(m.get_parameter("a.weight"), 0.1),
        lambda m: imported_before([m.get_parameter("b.bias")] * 2, 0.1),
        lambda m: imported_before(with_other(m), 0.1),
        old_name,
        lambda m: total_before([p.grad for p in m.parameters() if p.grad is not None]),
        lambda m: total_before(m.get_parameter("a.weight").grad, 1.0),
        lambda m: nn.utils.get_total_norm(m.parameters(), norm_type=math.inf),
        lambda m: nn.utils.get_total_norm([other, *(p.grad for p in m.parameters() if p.grad is not None)]),
    ]
    c = case("mlp")

    def every(module: nn.Module, model: nn.Module) -> list[torch.Tensor]:
        found = []
        for way in ways:
            module.zero_grad()
            loss_of(module(**c.batch)).backward()
            found.append(way(model))
            found.append(nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]))
        return found

    want = every(c.model, c.model)
    for plan in plans(c):
        for found in on_ranks(c, plan, lambda hap: every(hap, hap.module)):
            torch.testing.assert_close(found, want, **CLOSE)


def test_clipped_training_equals_one_device() -> None:
    c = case("mlp")

    def train(module: nn.Module) -> list[float]:
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.05)
        losses = []
        for _ in range(4):
            optimizer.zero_grad()
            loss = loss_of(module(**c.batch))
            loss.backward()
            nn.utils.clip_grad_norm_(module.parameters(), 0.3)
            nn.utils.clip_grad_value_(module.parameters(), 0.1)
            optimizer.step()
            losses.append(loss.item())
        return losses

    want = train(copy.deepcopy(c.model))
    for plan in plans(c):
        for losses in on_ranks(c, plan, train):
            assert losses == pytest.approx(want, rel=1e-10)


def test_not_finite_on_one_rank_is_refused_on_all() -> None:
    c = case("mlp")
    found = (random_plan(c, 3, seed) for seed in range(20))
    plan = next(p for p in found if p.parameter_layout()["a.weight"][1][2:] > (0,))

    def body(hap: HAP) -> str:
        loss_of(hap(**c.batch)).backward()
        weight = hap.module.get_parameter("a.weight")
        if hap.rank == 2:
            own_gradient(weight).view(-1)[0] = math.nan
        with pytest.raises(RuntimeError, match="cannot be clipped") as caught:
            nn.utils.clip_grad_norm_(hap.parameters(), 1.0, error_if_nonfinite=True)
        return str(caught.value)

    assert len(set(on_ranks(c, plan, body))) == 1


def test_some_elements_of_gradients_are_refused_with_the_line_to_write() -> None:
    c = case("mlp")
    theory = c.theory
    replicated = plan_for(theory, cluster(2, 1), known.data_parallel(theory), (0.6, 0.4))

    def body(hap: HAP) -> None:
        loss_of(hap(**c.batch)).backward()
        gradients = [p.grad for p in hap.parameters() if p.grad is not None]
        with pytest.raises(GradientError, match=r"is a view of [ab]\..*hetspmd\.get_total_norm\(model\)"):
            nn.utils.get_total_norm([g[:1] for g in gradients])

    on_ranks(c, replicated, body)


COMPUTED: dict[str, Any] = {
    "weights": lambda ps: [p.detach() for p in ps],
    "their data": lambda ps: [p.data for p in ps],
    "gradients by another name": lambda ps: [p.grad.detach() for p in ps],
    "both": lambda ps: [t for p in ps for t in (p.grad, p.data)],
    "scaled gradients": lambda ps: [p.grad / 2 for p in ps],
    "copies": lambda ps: [p.grad.clone() for p in ps],
    "an update": lambda ps: [p.detach() - 0.1 * p.grad for p in ps],
    "one of them": lambda ps: ps[0].grad * 3,
}


@pytest.mark.parametrize("name", COMPUTED)
def test_the_norm_of_what_is_computed_from_shards(name: str) -> None:
    """It was of this rank's shards, without a word. Whole and sharded parameters; plans without idle ranks."""
    c = case("mlp")

    def norm(module: nn.Module) -> torch.Tensor:
        module.zero_grad()
        loss_of(module(**c.batch)).backward()
        return nn.utils.get_total_norm(COMPUTED[name]([p for p in module.parameters() if p.grad is not None]))

    want = norm(c.model)
    replicated = plan_for(c.theory, cluster(2, 1), known.data_parallel(c.theory), (0.6, 0.4))
    sharded = plan_for(c.theory, cluster(2, 1), known.zero_like(c.theory), (0.6, 0.4))
    for plan in (replicated, sharded, random_plan(c, 3, 2), random_plan(c, 3, 4)):
        for found in on_ranks(c, plan, norm):
            torch.testing.assert_close(found, want, **CLOSE)


@pytest.mark.parametrize("name", ["weights", "their data"])
def test_idle_ranks_take_part_in_the_norm_of_values(name: str) -> None:
    c = case("mlp")

    def norm(module: nn.Module) -> torch.Tensor:
        found: torch.Tensor = nn.utils.get_total_norm(COMPUTED[name](list(module.parameters())))
        return found

    want = norm(c.model)
    for plan in plans(c)[2:]:
        for found in on_ranks(c, plan, norm):
            torch.testing.assert_close(found, want, **CLOSE)


def test_complex_gradients() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(4, 6, dtype=torch.complex64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x @ self.w).abs().square().sum()

    torch.manual_seed(0)
    model, x = Net(), torch.randn(8, 4, dtype=torch.complex64)
    alone = HAP(copy.deepcopy(model), cluster(1), example=(x,))
    model(x).backward()
    alone(x).backward()
    want = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    torch.testing.assert_close(hetspmd.clip_grad_norm_(alone, 1.0), want)


def test_other_modules_are_clipped_as_ever() -> None:
    """Also an empty generator, of which torch warns, and while HAP modules of several ranks exist."""
    c = case("mlp")

    def body(hap: HAP) -> tuple[torch.Tensor, torch.Tensor]:
        model = copy.deepcopy(c.model)
        loss_of(model(**c.batch)).backward()
        want = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
        assert nn.utils.clip_grad_norm_((p for p in ()), 1.0) == 0.0
        assert nn.utils.get_total_norm([]) == 0.0
        assert hap.rank in (0, 1)
        return nn.utils.clip_grad_norm_(model.parameters(), 1.0), want

    with pytest.warns(UserWarning, match="empty generator"):  # around all threads, which share what is caught
        found = on_ranks(c, random_plan(c, 2, 1), body)
    for norm, want in found:
        torch.testing.assert_close(norm, want, **CLOSE)
