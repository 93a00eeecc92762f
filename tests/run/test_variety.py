"""A plan for each plain value of the batch: warned about at the third, and bounded."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ranks import cluster
from torch import nn

from hetspmd.dist.communicator import Communicator
from hetspmd.dist.simulated_world import run_ranks
from hetspmd.errors import BatchMismatchError, PlanPerValueWarning
from hetspmd.run import variety
from hetspmd.run.module import HAP

X = torch.randn(8, 6)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor, factor: Any = 1.0, mode: str = "sum") -> torch.Tensor:
        y = self.a(x).pow(2) * factor
        return y.sum() if mode == "sum" else y.mean()


def lone(**options: Any) -> HAP:
    return HAP(Scaled(), cluster(1), **options)


def test_the_third_value_is_warned_about_by_name_and_few_are_kept() -> None:
    hap = lone(example=(X, 0.0))
    values = [float(k) for k in range(variety.ALIKE_PLANS_HELD + 4)]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = [float(hap(X, value).detach()) for value in values]
    texts = [str(w.message) for w in caught if issubclass(w.category, PlanPerValueWarning)]
    assert len(texts) == 1
    assert texts[0].startswith("3 plans were compiled because plain values")
    assert r"factor (args[1]) is 0.0, 1.0, 2.0. " in texts[0]
    assert found == pytest.approx([found[1] * value for value in values])
    assert len(hap._plans.entries) == variety.ALIKE_PLANS_HELD
    assert hap._plans.entries[0].plan is hap.plan


def test_strings_and_shapes_are_told_apart() -> None:
    hap = lone(example={"x": X, "mode": "sum"})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hap(x=X, mode="mean")
        for rows in (2, 3, 4, 5):
            hap(x=X[:rows], mode="sum")
    with pytest.warns(PlanPerValueWarning, match="mode is 'sum', 'mean', 'max'"):
        hap(x=X, mode="max")


@pytest.mark.parametrize(
    ("first", "second", "plans"), [(math.nan, math.nan, 1), (0.0, -0.0, 2), (1, True, 2)]
)
def test_equal_numbers_are_those_of_one_graph(first: Any, second: Any, plans: int) -> None:
    hap = lone(example=(X, first))
    hap(X, second)
    assert len(hap._plans.entries) == plans


class Recurrent(nn.Module):
    """It draws nothing, so that the threads of ranks can make one."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.utils.skip_init(nn.Linear, 6, 6)
        with torch.no_grad():
            for parameter in self.a.parameters():
                parameter.copy_(torch.linspace(-2, 2, parameter.numel()).sin().view_as(parameter))

    def forward(self, x: torch.Tensor, hidden: torch.Tensor) -> dict[str, torch.Tensor]:
        new = torch.tanh(self.a(x + hidden))
        return {"loss": new.pow(2).mean(), "hidden": new}


def test_own_rows_that_are_fed_back_name_gather_outputs() -> None:
    slow = cluster(2, 1, 1)
    start = torch.zeros_like(X)

    def own_rows(communicator: Communicator) -> str:
        hap = HAP(Recurrent(), slow, example=(X, start), process_group=communicator)
        hidden = hap(X, start)["hidden"].detach()
        if hidden.shape == X.shape:
            return "whole"
        with pytest.raises(BatchMismatchError) as caught:
            hap(X, hidden)
        return str(caught.value)

    for text in run_ranks(3, own_rows):
        assert text.startswith("hidden (args[1]) is float32[")
        assert "HAP(..., gather_outputs=True)" in text

    def whole(communicator: Communicator) -> float:
        hap = HAP(Recurrent(), slow, example=(X, start), process_group=communicator, gather_outputs=True)
        return float(hap(X, hap(X, start)["hidden"].detach())["loss"].detach())

    model = Recurrent()
    single = float(model(X, model(X, start)["hidden"].detach())["loss"].detach())
    assert run_ranks(3, whole) == pytest.approx([single] * 3)


class Natural(Recurrent):
    """Its first call has no hidden state, as most scripts write it."""

    def forward(self, x: torch.Tensor, state: Any = None, *, scale: float = 1.0) -> Any:  # type: ignore[override]  # another model than its base
        hidden = torch.zeros(6) if state is None else state["h"] if isinstance(state, dict) else state
        new = torch.tanh(self.a(x + hidden.mean(0))) * scale
        return {"loss": new.pow(2).mean(), "hidden": new}


FED_BACK: dict[str, tuple[str, Callable[[torch.Tensor], tuple[tuple[Any, ...], dict[str, Any]]]]] = {
    "a keyword": ("state", lambda h: ((X,), {"state": h})),
    "one more argument": ("state (args[1])", lambda h: ((X, h), {})),
    "in a container": ("state['h'] (args[1]['h'])", lambda h: ((X, {"h": h}), {})),
    "beside another change": ("state", lambda h: ((X,), {"state": h, "scale": 2.0})),
}


@pytest.mark.parametrize("how", FED_BACK)
def test_own_rows_are_named_where_the_first_call_had_none(how: str) -> None:
    """Also where forward could compute with a part of the rows."""
    name, batch = FED_BACK[how]

    def rank(communicator: Communicator) -> str:
        hap = HAP(Natural(), cluster(2, 1, 1), example=(X,), process_group=communicator)
        args, kwargs = batch(hap(X)["hidden"].detach())
        with pytest.raises(BatchMismatchError) as caught:
            hap(*args, **kwargs)
        return str(caught.value)

    for text in run_ranks(3, rank):
        assert text.startswith(f"{name} is float32[")
        assert "HAP(..., gather_outputs=True)" in text


def test_what_only_some_plans_read_is_named() -> None:
    def entry(**reads: str) -> Any:
        found = tuple(SimpleNamespace(root="model", path=(f".{n}",), value=v) for n, v in reads.items())
        graph = SimpleNamespace(host=SimpleNamespace(reads=found))
        return SimpleNamespace(
            expected=SimpleNamespace(names=(), leaves=()), plan=SimpleNamespace(graph=graph)
        )

    text = variety._text([entry(a="1", c="0"), entry(b="2", c="0"), entry(a="1", b="2", c="0")])
    assert "a is 1, not read; b is not read, 2. A number" in text
