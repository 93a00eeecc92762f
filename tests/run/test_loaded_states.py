"""An optimizer's state that ranks load each for itself, and what they multiply the loss by, is compared."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from divided import CLUSTER, X, net, net_plan, on_four, train
from torch import nn

import hetspmd
from hetspmd.dist.communicator import Communicator
from hetspmd.dist.simulated_world import run_ranks
from hetspmd.errors import OptimizerError, ParameterMismatchError
from hetspmd.plan.plan import Plan
from hetspmd.run.loaded_states import unlike_states
from hetspmd.run.module import HAP

Make = Callable[[Any], torch.optim.Optimizer]
MAKE: dict[str, Make] = {
    "AdamW": lambda ps: torch.optim.AdamW(ps, lr=0.01),
    "SGD": lambda ps: torch.optim.SGD(ps, lr=0.01, momentum=0.9),
}


def own(state: dict[str, Any]) -> dict[str, Any]:
    """A copy for one of the ranks, which are threads here: torch keeps the tensors that are loaded."""
    return copy.deepcopy(state)


def saved(make: Make, steps: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """The states of one device's model and optimizer after so many steps."""
    model = net()
    optimizer = make(model.parameters())
    train(model, steps, optimizer)
    return model.state_dict(), optimizer.state_dict()


def after(make: Make, steps: int, more: int) -> list[float]:
    """The losses of further steps on one device."""
    model = net()
    optimizer = make(model.parameters())
    train(model, steps, optimizer)
    return train(model, more, optimizer)


LOADS: dict[str, Callable[[HAP, torch.optim.Optimizer, dict[str, Any]], Any]] = {
    "load_full_optimizer_state_dict": hetspmd.load_full_optimizer_state_dict,
    "load_state_dict": lambda _, optimizer, state: optimizer.load_state_dict(state),
}


@pytest.mark.parametrize("how", LOADS)
@pytest.mark.parametrize("kind", MAKE)
@pytest.mark.parametrize(
    "stepped", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["new", "stepped"]
)
def test_state_of_another_step_on_one_rank_is_named_on_every_rank(kind: str, how: str, stepped: bool) -> None:
    make = MAKE[kind]
    states = [saved(make, steps) for steps in (3, 2)]

    def body(hap: HAP, alike: bool) -> list[float]:
        optimizer = make(hap.parameters())
        if stepped:
            train(hap, 1, optimizer)
        hap.load_state_dict(states[0][0])
        LOADS[how](hap, optimizer, own(states[0 if alike or hap.rank != 1 else 1][1]))
        return train(hap, 2, optimizer)

    def refused(hap: HAP) -> str:
        with pytest.raises((OptimizerError, ParameterMismatchError)) as error:
            body(hap, alike=False)
        return str(error.value)

    first, *others = on_four(refused)
    assert all(text == first for text in others)
    assert "rank 1" in first
    assert f"of {kind}" in first
    want = after(make, 3, 2)
    for found in on_four(lambda hap: body(hap, alike=True)):
        assert found == pytest.approx(want, rel=1e-9)


@pytest.mark.parametrize("unlike", [False, True])
def test_state_of_before_the_model_was_wrapped(unlike: bool) -> None:
    """The model's values are rank 0's; an optimizer's state has to be the same on every rank."""
    states = [saved(MAKE["SGD"], steps) for steps in (3, 2)]
    models = [net() for _ in range(4)]
    optimizers = [MAKE["SGD"](model.parameters()) for model in models]
    for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
        model.load_state_dict(states[0][0])
        optimizer.load_state_dict(own(states[1 if unlike and rank == 2 else 0][1]))
    plan = net_plan()
    _ = plan.theory, plan.digest

    def body(communicator: Communicator) -> Any:
        rank = communicator.rank
        try:
            hap = HAP(models[rank], CLUSTER, plan=plan, process_group=communicator)
        except OptimizerError as error:
            return str(error)
        return train(hap, 2, optimizers[rank])

    found = run_ranks(4, body)
    if unlike:
        assert all("rank 2 loaded another momentum_buffer of SGD for a.weight" in text for text in found)
    else:
        want = after(MAKE["SGD"], 3, 2)
        assert all(losses == pytest.approx(want, rel=1e-9) for losses in found)


def test_whole_state_of_before_is_not_saved_mixed() -> None:
    states = [saved(MAKE["AdamW"], steps) for steps in (3, 2)]

    def body(hap: HAP) -> str:
        optimizer = MAKE["AdamW"](hap.parameters())
        optimizer.load_state_dict(own(states[hap.rank // 3][1]))
        with pytest.raises(OptimizerError, match="rank 3 loaded another exp_avg of AdamW for ") as error:
            hetspmd.full_optimizer_state_dict(hap, optimizer)
        return str(error.value)

    assert len(set(on_four(body))) == 1


def test_a_rank_that_holds_all_or_nothing_says_nothing_wrong() -> None:
    """Ranks that hold a whole parameter, by their share or since others are idle, load the same as others."""
    make = MAKE["AdamW"]
    states = saved(make, 2)
    want = after(make, 2, 3)
    model = net()
    alone = hetspmd.compile(model, (X,), replace_speeds(1e-6), constraints={"*": "replicated"})
    assert alone.idle
    for plan in (alone, net_plan()):
        models: list[nn.Module] = [net() for _ in range(4)]
        _ = plan.theory, plan.digest

        def body(
            communicator: Communicator, plan: Plan = plan, models: list[nn.Module] = models
        ) -> list[float]:
            hap = HAP(models[communicator.rank], plan.cluster, plan=plan, process_group=communicator)
            hap.load_state_dict(states[0])
            optimizer = make(hap.parameters())
            optimizer.load_state_dict(own(states[1]))
            losses = train(hap, 2, optimizer)
            optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
            return losses + train(hap, 1, optimizer)

        for found in run_ranks(4, body):
            assert found == pytest.approx(want, rel=1e-9)


def replace_speeds(other: float) -> Any:
    """The cluster with ranks 1 to 3 so much slower that they are idle."""
    first, *rest = CLUSTER.devices
    slow = [replace(d, flops={k: v * other for k, v in d.flops.items()}) for d in rest]
    return replace(CLUSTER, devices=(first, *slow))


@pytest.mark.parametrize(
    ("told", "said"),
    [
        ([{"m": [1]}, {"m": [1]}], ""),
        ([{"m": [1]}, {}, {"n": [2]}], ""),
        ([{}, {"m": [1, 2]}, {"m": [2]}], ""),
        ([{"m": [1]}, {"m": [2]}], "rank 1 loaded another m than rank 0,"),
        ([{"n": [5], "m": [1]}, {"m": [1]}, {"n": [4], "m": [1]}], "rank 2 loaded another n than rank 0,"),
        (
            [{"m": [3]}, {"m": [3]}, {"m": [1]}, {"m": [2]}],
            "ranks 2 and 3 loaded another m than ranks 0 and 1,",
        ),
    ],
)
def test_what_is_said_of_digests(told: list[dict[str, list[int]]], said: str) -> None:
    text = unlike_states(told)
    assert bool(text) == bool(said)
    assert said in text


FACTORS: dict[str, Callable[[int, int], float]] = {
    "twice": lambda rank, step: 2.0 if (rank, step) == (1, 1) else 1.0,
    "its inverse": lambda rank, step: (0.5 if rank == 3 else 2.0) if step == 1 else 1.0,
    "nothing": lambda rank, step: 0.0 if (rank, step) == (2, 1) else 1.0,
    "the other sign": lambda rank, step: -1.0 if (rank, step) == (1, 1) else 1.0,
    "a little": lambda rank, step: 1.0 + 1e-6 * ((rank, step) == (3, 1)),
}


@pytest.mark.parametrize("factor", FACTORS)
@pytest.mark.parametrize("accumulated", [1, 2])
def test_another_factor_of_the_loss_is_named_on_every_rank(factor: str, accumulated: int) -> None:
    def scaled(hap: HAP) -> None:
        optimizer = torch.optim.SGD(hap.parameters(), lr=0.1)
        for step in range(4):
            (hap(X) * FACTORS[factor](hap.rank, step)).backward()
            if step % accumulated == accumulated - 1:
                optimizer.step()
                optimizer.zero_grad()

    def body(hap: HAP) -> str:
        said = r"before step 3 the ranks multiplied the loss by other numbers .*rank "
        with pytest.raises(ParameterMismatchError, match=said) as error:
            scaled(hap)
        return str(error.value)

    assert len(set(on_four(body))) == 1


def test_factors_that_differ_by_rounding_are_none() -> None:
    def body(hap: HAP) -> int:
        optimizer = torch.optim.SGD(hap.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for step in range(3):
            scaler.scale(hap(X) / 3 * (1 + 1e-15 * hap.rank) * (step + 1)).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        return 1

    assert on_four(body) == [1] * 4
