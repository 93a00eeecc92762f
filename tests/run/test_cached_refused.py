"""Cached functions that keep what one device would keep and a plan could not: they are refused."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from outside import X, student
from torch import nn

from hetspmd.errors import TraceError
from hetspmd.trace.trace import trace


def test_tensors_that_are_drawn_are_refused() -> None:
    @functools.cache
    def noise(n: int) -> torch.Tensor:
        return torch.randn(n)

    model, state = student(), torch.get_rng_state()
    with pytest.raises(TraceError, match=r"noise.* depends on random numbers.*register_buffer"):
        trace(model, (X,), {}, loss=lambda model, x: (model(x) + noise(12)).square().mean())
    assert torch.equal(torch.get_rng_state(), state)
    assert noise.cache_info().currsize == 0


class Table:
    """An object with a tensor, which is called."""

    def __init__(self, of: torch.Tensor) -> None:
        self.of = of

    def __call__(self) -> torch.Tensor:
        return self.of


HELD: dict[str, Callable[[torch.Tensor], Callable[[], torch.Tensor]]] = {
    "a function around it": lambda tensor: lambda: tensor,
    "a default": lambda tensor: lambda tensor=tensor: tensor,
    "a method": lambda tensor: Table(tensor).__call__,
    "an object": Table,
    "a partial function": lambda tensor: functools.partial(torch.mul, tensor, 1.0),
}


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("held", HELD)
def test_tensors_of_the_models_weights_are_refused(held: str, frozen: bool) -> None:
    """Also of frozen ones, which averages of weights move between steps."""
    model = nn.Sequential(nn.Linear(12, 12), nn.Linear(12, 12))
    model[0].requires_grad_(not frozen)

    @functools.cache
    def first() -> Any:
        return HELD[held](model[0].weight.detach().clone())

    with pytest.raises(TraceError, match=r"depends on parameter 0\.weight"):
        trace(model, (X,), {}, loss=lambda model, x: (model(x) + first()()[0]).square().mean())


def test_a_parameter_that_is_kept_is_refused() -> None:
    """On ranks another tensor stands in its place."""

    class Model(nn.Linear):
        @functools.cache  # noqa: B019  # a cached method is what the case is about
        def first(self) -> torch.Tensor:
            return self.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * self.first().mean()

    with pytest.raises(TraceError, match="keeps its first result"):
        trace(Model(12, 12), (X,), {}, loss=lambda model, x: model(x).square().mean())


def test_tensors_of_weights_that_are_kept_for_a_tensor_are_refused() -> None:
    model, table = nn.Sequential(nn.Linear(12, 12)), torch.ones(12)

    @functools.cache
    def scaled(tensor: torch.Tensor) -> torch.Tensor:
        return tensor * model[0].weight.detach().mean()

    with pytest.raises(TraceError, match="keeps its first result"):
        trace(model, (X,), {}, loss=lambda model, x: (model(x) * scaled(table)).square().mean())


def test_an_object_that_refers_to_the_model_does_not_keep_what_forward_leaves_there() -> None:
    class Reader:
        def __init__(self, model: nn.Module) -> None:
            self.model = model

    class Model(nn.Linear):
        @functools.cache  # noqa: B019  # a cached method is what the case is about
        def reader(self) -> Reader:
            return Reader(self)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.last = x.mean(0)
            return super().forward(x) * self.reader().model.last

    trace(Model(12, 12), (X,), {}, loss=lambda model, x: model(x).square().mean())


def test_tensors_of_what_forward_sets_are_refused() -> None:
    class Model(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.rows = len(x)
            return super().forward(x) * self.mask()

        @functools.cache  # noqa: B019  # a cached method is what the case is about
        def mask(self) -> torch.Tensor:
            return torch.ones(self.rows, 1)

    with pytest.raises(TraceError, match="does not give again when it is called outside of forward"):
        trace(Model(12, 12), (X,), {}, loss=lambda model, x: model(x).square().mean())


def test_a_parameter_as_an_argument_is_refused() -> None:
    model = nn.Sequential(nn.Linear(12, 12))

    @functools.cache
    def norm(weight: torch.Tensor) -> torch.Tensor:
        return weight.detach().norm()

    with pytest.raises(TraceError, match="a parameter or buffer of the model"):
        trace(model, (X,), {}, loss=lambda model, x: model(x).square().mean() * norm(model[0].weight))
