"""Optimizer state goes from uneven shards to one device, to other clusters and back, as if nothing had happened."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from machine_plans import machine_plan
from ranks import CLOSE, loss_of, on_ranks
from small_models import Case, case
from small_plans import cluster, random_plan
from torch import nn

import hetspmd
from hetspmd.errors import OptimizerError
from hetspmd.optimize.compiler import plan_for
from hetspmd.placement import is_sharded
from hetspmd.plan.plan import Plan
from hetspmd.run.module import HAP
from hetspmd.search.constraints import Constraints

Make = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "momentum": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, nesterov=True),
    "amsgrad": lambda ps: torch.optim.AdamW(ps, lr=0.01, amsgrad=True),
    "fused": lambda ps: torch.optim.Adam(ps, lr=0.01, fused=True),
    "foreach": lambda ps: torch.optim.AdamW(ps, lr=0.01, foreach=True),
    "adagrad": lambda ps: torch.optim.Adagrad(ps, lr=0.01, initial_accumulator_value=0.1),
    "centered": lambda ps: torch.optim.RMSprop(ps, lr=0.01, centered=True, momentum=0.5),
    "nadam": lambda ps: torch.optim.NAdam(ps, lr=0.01),
    "radam": lambda ps: torch.optim.RAdam(ps, lr=0.01),
    "adamax": lambda ps: torch.optim.Adamax(ps, lr=0.01),
    "rprop": lambda ps: torch.optim.Rprop(ps, lr=0.01),
    "asgd": lambda ps: torch.optim.ASGD(ps, lr=0.01),
    "adadelta": lambda ps: torch.optim.Adadelta(ps, lr=0.5),
}
BEFORE, AFTER = 3, 3


def groups(module: nn.Module) -> list[nn.Parameter]:
    """In another order than the module's own."""
    return list(module.parameters())[::-1]


def train(
    module: nn.Module, batch: dict[str, Any], optimizer: torch.optim.Optimizer, steps: int
) -> list[float]:
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = loss_of(module(**batch))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def plans(c: Case) -> list[Plan]:
    """Of four ranks, and of two; with an idle rank; with one active; of machines of several accelerators."""
    idle = plan_for(c.theory, cluster(3, 1, 2), Constraints({}), (0.6, 0.4), active=(0, 2))
    lone = plan_for(c.theory, cluster(1, 3), Constraints({}), (1.0,), active=(1,))
    inside = machine_plan(c, (2, 1, 1), 2)
    return [random_plan(c, 4, 4), random_plan(c, 2, 2), idle, lone, inside]


Saved = dict[str, tuple[dict[str, Any], dict[str, Any]]]


def saved_on(c: Case, plan: Plan) -> Saved:
    """Model and optimizer after a few steps, by optimizer, as every rank sees them."""
    start = copy.deepcopy(c.model.state_dict())

    def body(hap: HAP) -> Saved:
        found = {}
        for name, make in OPTIMIZERS.items():
            hap.load_full_state_dict(start)
            optimizer = make(groups(hap))
            train(hap, c.batch, optimizer, BEFORE)
            found[name] = hap.full_state_dict(), hetspmd.full_optimizer_state_dict(hap, optimizer)
        return found

    first, *others = on_ranks(c, plan, body)
    for other in others:
        for name, (_, state) in other.items():
            torch.testing.assert_close(state, first[name][1], rtol=0.0, atol=0.0)
    return first


@pytest.mark.slow
def test_saved_in_uneven_shards_and_continued_elsewhere() -> None:
    """Equal to training on one device without a break."""
    c = case("mlp")
    want: dict[str, list[float]] = {}
    states: Saved = {}
    for name, make in OPTIMIZERS.items():
        model = copy.deepcopy(c.model)
        optimizer = make(groups(model))
        train(model, c.batch, optimizer, BEFORE)
        states[name] = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        want[name] = train(model, c.batch, optimizer, AFTER)

    def resumed(hap: HAP, saved: Saved) -> dict[str, list[float]]:
        found = {}
        for name, make in OPTIMIZERS.items():
            hap.load_full_state_dict(saved[name][0])
            optimizer = make(groups(hap))
            hetspmd.load_full_optimizer_state_dict(hap, optimizer, saved[name][1])
            found[name] = train(hap, c.batch, optimizer, AFTER)
        return found

    four, two, idle, lone, inside = plans(c)
    kept = saved_on(c, four)
    for saved in (kept, saved_on(c, idle), saved_on(c, inside)):
        for name, make in OPTIMIZERS.items():
            assert set(saved[name][1]) == set(states[name][1])
            torch.testing.assert_close(saved[name][1]["state"], states[name][1]["state"], **CLOSE)
            assert saved[name][1]["param_groups"] == states[name][1]["param_groups"]
            model = copy.deepcopy(c.model)
            model.load_state_dict(saved[name][0])
            optimizer = make(groups(model))
            optimizer.load_state_dict(copy.deepcopy(saved[name][1]))  # which keeps the tensors
            assert train(model, c.batch, optimizer, AFTER) == pytest.approx(want[name], rel=1e-9)
    for plan in (two, idle, lone, inside):
        for found in on_ranks(c, plan, lambda hap: resumed(hap, kept)):
            for name, losses in found.items():
                assert losses == pytest.approx(want[name], rel=1e-9), name


class Odd(torch.optim.Optimizer):
    """Keeps a row of sums beside plain values, as Adafactor does."""

    def __init__(self, params: Iterable[nn.Parameter], rows: bool = True) -> None:
        self.rows = rows
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                state["count"] = state.get("count", 0) + 1
                state["seen"] = torch.ones_like(p, dtype=torch.bool)
                if self.rows:
                    state["rows"] = p.grad.flatten(1).sum(1) if p.ndim > 1 else p.grad.clone()
                p.sub_(p.grad, alpha=0.1)


def test_what_is_not_of_the_parameters_shape_is_refused_on_every_rank() -> None:
    c = case("mlp")

    def body(hap: HAP) -> tuple[str, dict[str, Any]]:
        optimizer = Odd(hap.parameters())
        train(hap, c.batch, optimizer, 1)
        with pytest.raises(OptimizerError, match=r"'rows' of Odd for [ab]\.weight is (neither|of)") as caught:
            hetspmd.full_optimizer_state_dict(hap, optimizer)
        optimizer = Odd(hap.parameters(), rows=False)
        train(hap, c.batch, optimizer, 2)
        return str(caught.value), hetspmd.full_optimizer_state_dict(hap, optimizer)

    plans = (random_plan(c, 3, seed) for seed in range(100))
    divided = next(
        plan
        for plan in plans
        if all(is_sharded(plan.parameter_layout()[n][0]) for n in ("a.weight", "b.weight"))
    )
    results = on_ranks(c, divided, body)
    assert len({message for message, _ in results}) == 1
    for _, state in results:
        assert {entries["count"] for entries in state["state"].values()} == {2}
        for index, entries in state["state"].items():
            assert entries["seen"].dtype == torch.bool
            assert entries["seen"].shape == list(c.model.parameters())[index].shape


def test_another_model_and_a_second_hap_in_one_optimizer() -> None:
    """Frozen, unused and tied parameters, groups, a module of its own, and two HAP modules, as on one device."""
    c, d = case("mlp"), case("attention", dropout=0.0)
    other = nn.Linear(2, 2).double()

    def optimizer_of(one: nn.Module, two: nn.Module, own: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(
            [
                {"params": own.parameters(), "lr": 0.5},
                {"params": one.parameters()},
                {"params": two.parameters()},
            ],
            lr=0.01,
        )

    def steps(one: nn.Module, two: nn.Module, own: nn.Module) -> torch.optim.Optimizer:
        optimizer = optimizer_of(one, two, own)
        for _ in range(2):
            optimizer.zero_grad()
            loss_of(one(**c.batch)).backward()
            loss_of(two(**d.batch)).backward()
            own(torch.ones(2, 2).double()).sum().backward()
            optimizer.step()
        return optimizer

    want = steps(copy.deepcopy(c.model), copy.deepcopy(d.model), copy.deepcopy(other)).state_dict()
    second = random_plan(d, 3, 5)
    models = [copy.deepcopy(d.model) for _ in range(3)]
    _ = second.theory, second.digest

    def body(one: HAP) -> tuple[dict[str, Any], dict[str, Any]]:
        two = HAP(models[one.rank], second.cluster, plan=second, process_group=one.everyone)
        optimizer = steps(one, two, copy.deepcopy(other))
        found = hetspmd.full_optimizer_state_dict(one, optimizer)
        hetspmd.load_full_optimizer_state_dict(two, optimizer, found)
        return found, hetspmd.full_optimizer_state_dict(two, optimizer, rank0_only=True)

    for rank, (found, again) in enumerate(on_ranks(c, random_plan(c, 3, 4), body)):
        assert list(found["state"]) == list(want["state"])
        torch.testing.assert_close(found["state"], want["state"], **CLOSE)
        assert found["param_groups"] == want["param_groups"]
        if rank:
            assert again == {}
        else:
            torch.testing.assert_close(again["state"], found["state"], rtol=0.0, atol=0.0)


def test_wrong_states_and_optimizers_are_named() -> None:
    c = case("mlp")

    def body(hap: HAP) -> None:
        optimizer = torch.optim.Adam(hap.parameters())
        train(hap, c.batch, optimizer, 1)
        state = hetspmd.full_optimizer_state_dict(hap, optimizer)
        wrong = copy.deepcopy(state)
        wrong["state"][2]["exp_avg"] = torch.zeros(77)
        with pytest.raises(OptimizerError, match=r"'exp_avg' of Adam for a\.weight is of shape \[77\]"):
            hetspmd.load_full_optimizer_state_dict(hap, optimizer, wrong)
        wrong = copy.deepcopy(state)
        wrong["param_groups"][0]["params"].append(99)
        with pytest.raises(ValueError, match="size of optimizer's group"):
            hetspmd.load_full_optimizer_state_dict(hap, optimizer, wrong)
        again = hetspmd.full_optimizer_state_dict(hap, optimizer)
        torch.testing.assert_close(again["state"], state["state"], rtol=0.0, atol=0.0)
        with pytest.raises(OptimizerError, match="has no parameters of this HAP module"):
            hetspmd.full_optimizer_state_dict(hap, torch.optim.Adam(nn.Linear(2, 2).parameters()))

    on_ranks(c, random_plan(c, 3, 4), body)


def test_moments_of_another_dtype() -> None:
    """Those of bfloat16 parameters come back as they are."""
    c = case("mlp", torch.bfloat16)

    def body(hap: HAP) -> dict[str, Any]:
        optimizer = torch.optim.SGD(hap.parameters(), lr=0.1, momentum=0.9)
        train(hap, c.batch, optimizer, 2)
        for entries in optimizer.state.values():
            entries["master"] = entries["momentum_buffer"].float() + 1e-4
        return hetspmd.full_optimizer_state_dict(hap, optimizer)

    for found in on_ranks(c, random_plan(c, 2, 2), body):
        for entries in found["state"].values():
            assert entries["momentum_buffer"].dtype == torch.bfloat16
            assert entries["master"].dtype == torch.float32
            torch.testing.assert_close(entries["master"], entries["momentum_buffer"].float() + 1e-4)
