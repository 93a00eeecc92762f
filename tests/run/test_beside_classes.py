"""What forward reads by way of its classes, however it reaches them: ranks train as one device does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from beside import base, equal
from torch import nn

pytestmark = pytest.mark.filterwarnings("ignore::hetspmd.errors.PlanPerValueWarning")

MADE = CALLED = FORWARD = BACKWARD = PROPERTY = BASE = OPERATOR = ITEM = BY_NAME = HOOK = 1.0


class Helper:
    """Is made, and called, in forward."""

    def __init__(self, value: torch.Tensor) -> None:
        self.value = value * MADE

    def __call__(self) -> torch.Tensor:
        return self.value * CALLED


class Reversed(torch.autograd.Function):
    """A gradient that is scaled and turned round."""

    strength = 1.0

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * FORWARD

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return -BACKWARD * Reversed.strength * gradients[0]


class Operators:
    """Is multiplied and asked for items."""

    def __mul__(self, other: torch.Tensor) -> torch.Tensor:
        return other * OPERATOR

    def __getitem__(self, _index: int) -> float:
        return ITEM


class Descriptor:
    """Gives what it holds."""

    value = 1.0

    def __get__(self, of: Any, kind: Any = None) -> float:
        return self.value


class Below(nn.Module):
    """The base of the model."""

    inherited = of_class = own = 1.0
    described = Descriptor()

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(12, 24), nn.Linear(24, 12)
        self.operators, self.k, self.half, self.type = Operators(), 1.0, 1.0, 1.0
        self.strength = 1.0

    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        return x * BASE

    @property
    def factor(self) -> float:
        return PROPERTY

    @classmethod
    def of_its_class(cls) -> float:
        return cls.own


class Model(Below):
    """Reads by each way."""

    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        return super().scaled(x) * super().inherited

    def function(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.function_attribute()

    def function_attribute(self) -> float:
        return counted.factor  # type: ignore[attr-defined,no-any-return]  # set below

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = Reversed.apply(self.up(Helper(x)()))  # type: ignore[no-untyped-call]  # torch's
        hidden.register_hook(lambda gradient: gradient * self.strength * HOOK)
        hidden = self.operators * self.function(self.scaled(hidden)) * self.operators[0] * self.factor
        loss = self.down(hidden).square().mean() + base(self, x)
        loss = loss * type(self).of_class * self.of_its_class() * self.described * self.__dict__["k"]
        return loss * globals()["BY_NAME"] * vars(self)["half"] * self.type  # type: ignore[no-any-return]


def counted() -> None:
    """Has an attribute."""


counted.factor = 1.0  # type: ignore[attr-defined]  # what the test is about

GLOBALS = ("MADE", "CALLED", "FORWARD", "BACKWARD", "PROPERTY", "BASE", "OPERATOR", "ITEM", "BY_NAME", "HOOK")
HOLDERS: dict[str, tuple[Any, str]] = {
    "a strength of a backward": (Reversed, "strength"),
    "an attribute of a base": (Below, "inherited"),
    "one by type(self)": (Below, "of_class"),
    "one of the class": (Below, "own"),
    "a descriptor": (Descriptor, "value"),
    "a function's attribute": (counted, "factor"),
}
OWN = ("k", "half", "type", "strength")


def _set(model: Any, values: list[float]) -> None:
    """Set all. What the threads of the ranks share is set by the first of them, before any of them traces."""
    given = iter(values)
    if SHARED[-1] != values:
        SHARED[:] = [values]
        globals().update({name: next(given) for name in GLOBALS})
        for holder, name in HOLDERS.values():
            setattr(holder, name, next(given))
    for name, value in zip(OWN, values[-len(OWN) :], strict=True):
        setattr(model, name, value)


SHARED: list[list[float]] = [[]]
"""What was set last."""


@pytest.fixture(autouse=True)
def _as_it_was() -> Any:
    yield
    _set(Model(), [1.0] * (len(GLOBALS) + len(HOLDERS) + len(OWN)))


@pytest.mark.parametrize("part", range(5))
def test_each_way_is_seen(part: int) -> None:
    """Each step changes one more value of four."""
    count = len(GLOBALS) + len(HOLDERS) + len(OWN)

    def each(model: Any, step: int) -> None:
        _set(model, [1.5 if part * 4 <= k < part * 4 + step else 1.0 for k in range(count)])

    equal(Model, each, steps=5)
