"""A model that is changed after it was wrapped: seen by the next call, which names what has changed."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from divided import X, net, on_four, train
from torch import nn

from hetspmd.errors import HetspmdError, ShardError
from hetspmd.run.module import HAP


def replaced(hap: Any) -> None:
    hap.module.a = nn.Linear(12, 24).double()


def replaced_inside(hap: Any) -> None:
    hap.module.b[2] = nn.Linear(16, 12).double()


def whole_parameter(hap: Any) -> None:
    hap.module.a.weight = nn.Parameter(torch.zeros(24, 12, dtype=torch.float64))


def whole_data(hap: Any) -> None:
    hap.module.a.weight.data = torch.zeros(24, 12, dtype=torch.float64)


def another_shard(hap: Any) -> None:
    hap.module.b[0].weight = hap.module.a.weight


def parametrized(hap: Any) -> None:
    nn.utils.parametrizations.weight_norm(hap.module.a)


def removed(hap: Any) -> None:
    del hap.module.a.bias


CHANGES: dict[str, tuple[Callable[[HAP], Any], str]] = {
    "half": (lambda hap: hap.half(), r"a\.weight is float16 now, and float64 in the plan"),
    "a part in float32": (lambda hap: hap.module.b.float(), r"b\.0\.weight is float32 now"),
    "to a dtype": (
        lambda hap: hap.to(torch.bfloat16),
        r"bfloat16 now.*before HAP\(\.\.\.\), or use torch\.autocast",
    ),
    "a layer": (replaced, "module a of the model was replaced"),
    "a layer in a container": (replaced_inside, r"module b\.2 of the model was replaced"),
    "a whole parameter": (whole_parameter, r"hap\.load_state_dict\(\{'a\.weight': whole\}, strict=False\)"),
    "whole data": (whole_data, r"a\.weight has shape \[24, 12\] now, where this rank stores"),
    "another shard": (another_shard, r"b\.0\.weight has shape|lies otherwise"),
    "parametrized": (
        parametrized,
        r"a\.weight of \[24, 12\] lies in shards.*norm_except_dim would see no more",
    ),
    "removed": (removed, "no parameter a.bias any more|has other parameters .*a.bias"),
}


@pytest.mark.parametrize("name", list(CHANGES))
def test_a_change_is_named(name: str) -> None:
    change, text = CHANGES[name]

    def change_and_call(hap: HAP) -> None:
        change(hap)
        hap(X)

    def body(hap: HAP) -> None:
        hap(X).backward()
        with pytest.raises(HetspmdError, match=text):
            change_and_call(hap)

    on_four(body)


def test_what_changes_nothing_is_let_through() -> None:
    """Moves to where it is, new objects of the same shard, frozen parameters, gradients."""
    want = train(net(), 5)

    def body(hap: Any) -> list[float]:
        optimizer = torch.optim.AdamW(hap.parameters(), lr=0.01, eps=1e-4)
        losses = train(hap, 2, optimizer)
        hap.to("cpu").double().cpu().requires_grad_().zero_grad()
        hap.module.a.weight.data = hap.module.a.weight.data.clone()
        losses += train(hap, 2, optimizer)
        hap.module.a.weight = nn.Parameter(hap.module.a.weight.detach().clone())
        with pytest.raises(ShardError, match="lies in shards"):
            hap.module.a.weight.norm() if hap(X) > 0 else None
        hap.train()
        return losses

    for losses in on_four(body):
        assert losses == pytest.approx(want[:4], rel=1e-10)


def test_a_parameter_is_set_to_a_whole_value() -> None:
    value = torch.randn(24, 12, dtype=torch.float64)
    single = net()
    with torch.no_grad():
        single.a.weight.copy_(value)
    want = train(single)

    def body(hap: Any) -> list[float]:
        with torch.no_grad():
            hap.module.a.weight.copy_(value)
        return train(hap)

    for losses in on_four(body):
        assert losses == pytest.approx(want, rel=1e-10)


@pytest.mark.slow
def test_the_look_costs_little() -> None:
    """Of 200 parameters in 200 modules: less than 0.3 ms, also on a busy machine."""
    from hetspmd.run.known_parameters import KnownParameters

    model = nn.Sequential(*(nn.Linear(2, 2, bias=False) for _ in range(200)))
    names = [f"{i}.weight" for i in range(200)]
    known = KnownParameters(model, names, [(m, "weight") for m in model], {})
    best = min(_seconds(known.now) for _ in range(50))
    assert best < 3e-4, best


def _seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began
