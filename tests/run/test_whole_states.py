"""State of any shape, of optimizers that are not elementwise, where parameters are stored whole."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from divided import CLUSTER, Net, X, net
from test_loaded_states import replace_speeds

import hetspmd
from hetspmd.dist.communicator import Communicator
from hetspmd.dist.simulated_world import run_ranks
from hetspmd.errors import OptimizerError
from hetspmd.plan.plan import Plan
from hetspmd.run.module import HAP

LONG = X.repeat(400, 1)


class Rows(torch.optim.Optimizer):
    """Steps by the mean of each row, and remembers these means, and in a list how often."""

    def __init__(self, parameters: Any, lr: float = 0.1) -> None:
        super().__init__(parameters, {"lr": lr})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["rows"], state["counts"] = p.new_zeros(p.shape[:1]), [p.new_zeros(3)]
                rows = p.grad.detach().flatten(1).mean(1) if p.dim() > 1 else p.grad.detach()
                state["rows"] = 0.5 * state["rows"] + rows
                state["counts"][0] += 1
                with torch.no_grad():
                    p.sub_(group["lr"] * state["rows"].reshape(-1, *[1] * (p.dim() - 1)).expand_as(p))


MAKE: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "Adafactor": lambda ps: torch.optim.Adafactor(ps, lr=0.05),
    "LBFGS": lambda ps: torch.optim.LBFGS(ps, lr=0.1, max_iter=3),
    "Rows": Rows,
}


@cache
def plan_of(idle: bool) -> Plan:
    cluster = replace_speeds(1e-6) if idle else CLUSTER
    plan = hetspmd.compile(net(), (LONG,), cluster, constraints={"*": "replicated"})
    assert bool(plan.idle) == idle
    _ = plan.theory, plan.digest
    return plan


def trained(model: Any, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
    losses = []
    for _ in range(steps):

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss: torch.Tensor = model(LONG)
            loss.backward()
            losses.append(loss.item())
            return loss

        if isinstance(optimizer, torch.optim.LBFGS):
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()
    return losses


def on(plan: Plan, body: Callable[[HAP], Any]) -> list[Any]:
    models = [net() for _ in range(4)]

    def rank(communicator: Communicator) -> Any:
        return body(HAP(models[communicator.rank], plan.cluster, plan=plan, process_group=communicator))

    return run_ranks(4, rank)


def flat(value: Any, at: str = "") -> dict[str, Any]:
    if isinstance(value, dict):
        return {k: v for key in value for k, v in flat(value[key], f"{at}.{key}").items()}
    if isinstance(value, (list, tuple)):
        return {k: v for n, each in enumerate(value) for k, v in flat(each, f"{at}[{n}]").items()}
    return {at: value}


@pytest.mark.parametrize(
    ("kind", "idle"),
    [
        ("Adafactor", False),
        pytest.param("LBFGS", False, marks=pytest.mark.slow),
        pytest.param("Rows", False, marks=pytest.mark.slow),
        ("Rows", True),
    ],
)
def test_it_goes_from_plan_to_plan_as_on_one_device(kind: str, idle: bool) -> None:
    make, model = MAKE[kind], net()
    optimizer = make(model.parameters())
    trained(model, optimizer, 2)
    want = copy.deepcopy(optimizer.state_dict())
    further = trained(model, optimizer, 2)

    def first(hap: HAP) -> tuple[Any, Any]:
        own = make(hap.parameters())
        trained(hap, own, 2)
        return hap.full_state_dict(), hetspmd.full_optimizer_state_dict(hap, own)

    saved = on(plan_of(idle), first)
    for _, state in saved:
        found, expected = flat(state), flat(want)
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            if isinstance(value, torch.Tensor):
                torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-11)
    others = [False] if kind != "Rows" else [False, True]
    for other in others:
        for plain in (False, True):

            def second(hap: HAP, plain: bool = plain) -> list[float]:
                hap.load_state_dict(saved[0][0])
                own = make(hap.parameters())
                state = copy.deepcopy(saved[hap.rank][1])
                if plain:
                    own.load_state_dict(state)
                else:
                    hetspmd.load_full_optimizer_state_dict(hap, own, state)
                return trained(hap, own, 2)

            for losses in on(plan_of(other), second):
                assert losses == pytest.approx(further, rel=1e-9)


@pytest.mark.parametrize("kind", ["Adafactor", "LBFGS"])
def test_idle_ranks_are_named_as_the_reason(kind: str) -> None:
    def body(hap: HAP) -> str:
        optimizer = MAKE[kind](hap.parameters())
        with pytest.raises(
            OptimizerError, match=rf"ranks 1, 2 and 3 hold nothing.*{kind} cannot step"
        ) as error:
            trained(hap, optimizer, 1)
        return str(error.value)

    assert len(set(on(plan_of(True), body))) == 1


def test_a_shape_that_an_elementwise_optimizer_does_not_have_is_refused() -> None:
    model: Net = net()
    optimizer = torch.optim.AdamW(model.parameters())
    trained(model, optimizer, 1)
    state = optimizer.state_dict()
    state["state"][0]["exp_avg"] = state["state"][0]["exp_avg"][:5]

    def body(hap: HAP) -> None:
        own = torch.optim.AdamW(hap.parameters())
        with pytest.raises(OptimizerError, match=r"'exp_avg' of AdamW for a\.weight is of shape \[5, 12\]"):
            hetspmd.load_full_optimizer_state_dict(hap, own, copy.deepcopy(state))

    on(plan_of(False), body)
