"""Objects that do not answer when they are asked for their class are named."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from hetspmd.errors import TraceError
from hetspmd.trace.trace import trace


class _Strict:
    """Raises what mappings raise, for whatever it does not have."""

    def __init__(self) -> None:
        object.__setattr__(self, "values", {"factor": 2.0})

    def __getattribute__(self, name: str) -> float:
        return float(object.__getattribute__(self, "values")[name])


_STRICT = _Strict()


class _Asks(nn.Module):
    def __init__(self, held: object) -> None:
        super().__init__()
        self.lin, self.held = nn.Linear(3, 3), held

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        held: Any = self.held or _STRICT
        while type(held) in (list, tuple):
            held = held[0]
        return (self.lin(x) * held.factor).sum()


@pytest.mark.parametrize(
    "held", [None, [_Strict()], (_Strict(), 1), [(_Strict(),)]], ids=["global", "list", "tuple", "nested"]
)
def test_an_object_that_does_not_answer_is_named(held: object) -> None:
    model = _Asks(held)
    model(torch.ones(2, 3))  # as it is, without a plan
    with pytest.raises(
        TraceError, match=r"cannot look at an object at .*test_odd_objects\.py:\d+: .*KeyError: '__class__'"
    ):
        trace(model, (torch.ones(2, 3),), {})
