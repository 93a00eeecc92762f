"""Warnings of a trace are located where the trace was asked for, so that Python shows each of them once a place."""

from __future__ import annotations

import time
import warnings

import torch
from torch import nn
from transformers import DynamicCache

from hetspmd.errors import ClockWarning, DroppedOutputWarning, TensorTypeWarning
from hetspmd.trace.trace import trace


class Warned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> dict[str, object]:
        time.time()
        if type(x) is torch.Tensor:
            x = x + 0.0
        return {"loss": self.lin(x).sum(), "cache": DynamicCache()}


def test_warnings_are_located_where_the_trace_was_asked_for() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trace(Warned(), (torch.ones(2, 3),), {})
    ours = (ClockWarning, DroppedOutputWarning, TensorTypeWarning)
    assert {(w.category, w.filename) for w in caught if w.category in ours} == {
        (kind, __file__) for kind in ours
    }
