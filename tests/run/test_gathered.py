"""With ``gather_state`` the state dicts that libraries ask for are those of one device."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import lone, loss_of, on_ranks
from small_models import case
from small_plans import cluster, random_plan
from torch import nn
from torch.optim.swa_utils import AveragedModel

import hetspmd
from hetspmd.errors import OptimizerError, ShardError
from hetspmd.optimize.compiler import plan_for
from hetspmd.run.module import HAP
from hetspmd.search.constraints import Constraints

OPTIMIZERS: list[Callable[[Any], torch.optim.Optimizer]] = [
    lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True),
    lambda p: torch.optim.RMSprop(p, lr=0.01),
    lambda p: torch.optim.Adagrad(p, lr=0.01),
]


class Holder(nn.Module):
    """As a LightningModule holds its network."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net, self.head = net, nn.Linear(2, 2)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: dict[str, Any]) -> None:
    optimizer.zero_grad()
    loss_of(model(**batch)).backward()
    optimizer.step()


@pytest.mark.parametrize("name", ["mlp", "conv", "attention"])
def test_a_modules_state_is_whole_by_itself_and_inside_another(name: str) -> None:
    c = case(name)

    def body(hap: HAP) -> None:
        held = Holder(hap)
        with torch.no_grad():
            for p in hap.parameters():
                p.mul_(1.5)
        state, whole = hap.state_dict(), hap.full_state_dict()
        assert list(state) == list(whole) == list(c.model.state_dict())
        inside = held.state_dict()
        assert inside.keys() == Holder(c.model).state_dict().keys()
        for key, value in whole.items():
            assert torch.equal(state[key], value)
            assert torch.equal(inside[f"net.{key}"], value)
        memory = [v.untyped_storage().data_ptr() for v in state.values() if v.numel()]
        assert len(memory) == len(set(memory))
        changed = {k: v + 1 if v.is_floating_point() else v for k, v in inside.items()}
        held.load_state_dict(changed)
        assert all(torch.equal(v, changed[f"net.{k}"]) for k, v in hap.full_state_dict().items())
        held.load_state_dict({k.replace("net.", "net.module."): v for k, v in inside.items()})
        assert all(torch.equal(v, whole[k]) for k, v in hap.full_state_dict().items())
        with pytest.raises(RuntimeError, match="Unexpected key"):
            held.load_state_dict(inside | {"net.other": torch.zeros(1)})

    on_ranks(c, random_plan(c, 3, 1), body, gather_state=True)


@pytest.mark.parametrize("make", OPTIMIZERS)
def test_an_optimizers_state_is_whole_and_is_loaded(make: Callable[[Any], torch.optim.Optimizer]) -> None:
    c = case("mlp")
    alone = copy.deepcopy(c.model)
    one = make(alone.parameters())
    for _ in range(2):
        step(alone, one, c.batch)

    def body(hap: HAP) -> None:
        optimizer = make(hap.parameters())
        step(hap, optimizer, c.batch)
        again = make(hap.parameters())
        again.load_state_dict(optimizer.state_dict())  # as Accelerate and Lightning do
        step(hap, again, c.batch)
        state = again.state_dict()
        for index, entries in one.state_dict()["state"].items():
            for key, value in entries.items():
                torch.testing.assert_close(state["state"][index][key], value, rtol=1e-9, atol=1e-11)
        assert state["param_groups"] == one.state_dict()["param_groups"]

    on_ranks(c, random_plan(c, 3, 2), body, gather_state=True)


@pytest.mark.parametrize("make", OPTIMIZERS)
@pytest.mark.parametrize("idle", [False, True])
def test_an_optimizers_state_is_saved_before_its_next_step(
    make: Callable[[Any], torch.optim.Optimizer], idle: bool
) -> None:
    """Loaded into the one that was stepped, into a new one, and from a single device, and saved at once."""
    c = case("mlp")
    alone = copy.deepcopy(c.model)
    one = make(alone.parameters())
    step(alone, one, c.batch)
    of_one = one.state_dict()
    plan = random_plan(c, 3, 2)
    if idle:
        plan = plan_for(c.theory, cluster(3, 1, 2), Constraints({}), (0.6, 0.4), active=(0, 2))

    def body(hap: HAP) -> None:
        optimizer, fresh = make(hap.parameters()), make(hap.parameters())
        step(hap, optimizer, c.batch)
        for state in (optimizer.state_dict(), of_one):
            for again in (optimizer, fresh):
                again.load_state_dict(copy.deepcopy(state))
                saved = hetspmd.full_optimizer_state_dict(hap, again)
                found = again.state_dict()
                for index, entries in of_one["state"].items():
                    for key, value in entries.items():
                        for got in (saved, found):
                            torch.testing.assert_close(got["state"][index][key], value, rtol=1e-9, atol=1e-11)
        step(hap, optimizer, c.batch)

    on_ranks(c, plan, body, gather_state=True)


def test_an_optimizers_state_of_another_shape_is_refused_on_every_rank() -> None:
    c = case("mlp")

    def body(hap: HAP) -> str:
        optimizer = torch.optim.Adam(hap.parameters())
        step(hap, optimizer, c.batch)
        if hap.rank == 1:
            optimizer.state[hap.module.get_parameter("a.weight")]["exp_avg"] = torch.zeros(3, 7)
        with pytest.raises(OptimizerError, match=r"exp_avg.*a\.weight is of shape \[3, 7\]") as e:
            hetspmd.full_optimizer_state_dict(hap, optimizer)
        return str(e.value)

    assert len(set(on_ranks(c, random_plan(c, 3, 2), body))) == 1


def test_an_average_of_weights_is_whole_as_well() -> None:
    c = case("mlp")

    def body(hap: HAP) -> None:
        average = AveragedModel(hap)
        average.update_parameters(hap)
        state = average.state_dict()
        for key, value in c.model.state_dict().items():
            torch.testing.assert_close(state[f"module.{key}"], value)

    on_ranks(c, random_plan(c, 3, 2), body, gather_state=True)


def test_an_average_that_was_made_before_is_refused() -> None:
    """Its parameters are whole; a shard of one row would spread over all of them without a word."""
    c = case("mlp")
    averages = [AveragedModel(copy.deepcopy(c.model)) for _ in range(3)]

    def body(hap: HAP) -> None:
        for model in (hap, hap.module):
            with pytest.raises(ShardError, match=r"AveragedModel\(hap\)"):
                averages[hap.rank].update_parameters(model)
        averages[hap.rank].update_parameters(hap.full_module())
        other = AveragedModel(nn.Linear(2, 2))
        other.update_parameters(nn.Linear(2, 2))

    on_ranks(c, random_plan(c, 3, 2), body)


def test_shards_are_refused_without_it() -> None:
    c = case("mlp")

    def body(hap: HAP) -> None:
        for refused in (hap.state_dict, Holder(hap).state_dict):
            with pytest.raises(ShardError, match="gather_state=True"):
                refused()
        optimizer = torch.optim.Adam(hap.parameters())
        step(hap, optimizer, c.batch)
        with pytest.raises(OptimizerError, match="gather_state=True"):
            optimizer.state_dict()

    on_ranks(c, random_plan(c, 3, 2), body)


def test_forward_has_the_models_signature() -> None:
    c = case("mlp")
    hap = lone(c)
    assert inspect.signature(hap.forward) == inspect.signature(c.model.forward)
    assert list(inspect.signature(HAP.forward).parameters) == ["self", "args", "kwargs"]
    other = lone(c, loss=lambda model, x, labels=None: model(x=x, labels=labels)["loss"])
    assert list(inspect.signature(other.forward).parameters) == ["x", "labels"]
    free = lone(c, loss=lambda *args, **kwargs: args[0](**kwargs)["loss"])
    assert list(inspect.signature(free.forward).parameters) == ["args", "kwargs"]


def test_ranks_are_not_hidden_before_there_are_any() -> None:
    with pytest.raises(hetspmd.errors.WorldSizeError, match=r"rank = hetspmd\.hide_ranks\(\)"):
        hetspmd.hide_ranks()
