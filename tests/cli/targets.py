"""Targets for the tests of the command line: each function is one way to be right or wrong."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor, nn


class Perceptron(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu()).square().mean()


def build() -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    return Perceptron(), {"x": torch.randn(12, 8)}


def positional() -> tuple[nn.Module, Any]:
    model, example = build()
    return model, (example["x"],)


def on_meta() -> tuple[nn.Module, Any]:
    with torch.device("meta"):
        return build()


def two_devices() -> tuple[nn.Module, Any]:
    model, example = build()
    model.get_submodule("down").to("meta")
    return model, example


def misfit() -> tuple[nn.Module, Any]:
    model, example = build()
    return model, {"y": example["x"]}


def wrong_width() -> tuple[nn.Module, Any]:
    model, _ = build()
    return model, {"x": torch.randn(12, 7)}


class Noisy(Perceptron):
    def forward(self, x: Tensor, noise: Tensor) -> Tensor:
        return super().forward(x + noise)


def noisy() -> tuple[nn.Module, Any]:
    example = build()[1]
    return Noisy(), {**example, "noise": torch.zeros(12, 8)}


class Branching(Perceptron):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x if x.sum() > 0 else -x)


def branching() -> tuple[nn.Module, Any]:
    return Branching(), build()[1]


@torch.library.custom_op("hetspmd_cli_test::twice", mutates_args=())
def twice(x: Tensor) -> Tensor:
    return 2 * x


@twice.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


twice.register_autograd(lambda _ctx, gradient: 2 * gradient)


class Unruly(Perceptron):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(twice(x))


def unruly() -> tuple[nn.Module, Any]:
    return Unruly(), build()[1]


def takes_arguments(width: int) -> None:
    raise AssertionError(width)


def raises() -> None:
    raise KeyError("no such checkpoint")


def exits() -> None:
    raise SystemExit(0)


def returns_nothing() -> None:
    return None


def returns_model() -> nn.Module:
    return build()[0]


def returns_three() -> tuple[Any, ...]:
    return (*build(), 1)


def returns_text() -> tuple[Any, Any]:
    return "model", build()[1]


def returns_tensor() -> tuple[Any, Any]:
    return build()[0], torch.zeros(12, 8)


not_a_function = 3


class Coin(Perceptron):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1.0 if random.random() < 0.5 else 2.0)


def coin() -> tuple[nn.Module, Any]:
    return Coin(), build()[1]


class Stacked(nn.Module):
    """Three layers that are alike."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.GELU(), nn.Linear(8, 8)) for _ in range(3)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()


def blocks() -> tuple[nn.Module, Any]:
    return Stacked(), (torch.randn(12, 8),)
