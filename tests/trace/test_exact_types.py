"""A forward that asks whether the class of a value is just that of tensors is warned of, with the line."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hetspmd.errors import TensorTypeWarning
from hetspmd.trace.trace import trace


class Asking(nn.Module):
    def __init__(self, ask: Callable[[Any, Any], bool]) -> None:
        super().__init__()
        self.linear, self.ask = nn.Linear(3, 3), ask

    def forward(self, x: Any) -> Any:
        y = self.linear(x)
        return (y * 2 if self.ask(y, self.linear.weight) else y).sum()


def in_a_loop(y: Any, w: Any) -> bool:
    for value in (y, w):
        kind = value
        if type(kind) == torch.Tensor:  # noqa: E721  # what a user may write
            return True
    return False


ASKING: dict[str, Callable[[Any, Any], bool]] = {
    "is": lambda y, w: type(y) is torch.Tensor,
    "is not": lambda y, w: type(y) is not torch.Tensor,
    "equal": lambda y, w: type(y) == Tensor,  # noqa: E721  # what a user may write
    "a parameter": lambda y, w: type(w) is nn.Parameter,
    "among": lambda y, w: type(y) in (list, torch.Tensor),
    "its class": lambda y, w: y.__class__ is torch.Tensor,
    "its name": lambda y, w: type(y).__name__ == "Tensor",
    "in a loop": in_a_loop,
}
OTHER: dict[str, Callable[[Any, Any], bool]] = {
    "isinstance": lambda y, w: isinstance(y, torch.Tensor),
    "another class": lambda y, w: type(y) is list or isinstance(w, nn.Parameter),
    "a dtype": lambda y, w: y.dtype == torch.Tensor([1.0]).dtype and type(y) is not dict,
    "a class that is made": lambda y, w: type("Tensor", (), {}) is not None,
}


@pytest.mark.parametrize("name", ASKING)
def test_it_is_warned_of(name: str) -> None:
    with pytest.warns(
        TensorTypeWarning, match=r"test_exact_types\.py:\d+: .*isinstance\(value, torch\.Tensor\)"
    ):
        trace(Asking(ASKING[name]), (torch.ones(2, 3),), {})


@pytest.mark.parametrize("name", OTHER)
def test_other_questions_are_not(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", TensorTypeWarning)
        trace(Asking(OTHER[name]), (torch.ones(2, 3),), {})
