"""What counts as the loss: found, picked by name or index, or named as missing with the line to write."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
from torch import nn

import hetspmd
from hetspmd.errors import OptionError, TraceError
from hetspmd.trace.losses import as_loss
from hetspmd.trace.trace import trace

X = torch.randn(8, 6)


class Model(nn.Module):
    """Returns what ``shape`` makes of its logits and its loss."""

    def __init__(self, shape: Any) -> None:
        super().__init__()
        self.a = nn.Linear(6, 4)
        self.shape = shape

    def forward(self, x: torch.Tensor) -> Any:
        y = self.a(x)
        return self.shape(y.detach(), y.pow(2).mean())


SHAPES: dict[str | int, Any] = {
    1: lambda y, loss: (y, loss),
    -1: lambda y, loss: [y, y, loss],
    "total": lambda y, loss: {"logits": y, "total": loss},
    "losses.main": lambda y, loss: {"losses": {"main": loss, "other": 2.0 * loss.detach()}, "y": y},
    "parts.1": lambda y, loss: {"parts": [y, loss]},
}


@pytest.mark.parametrize("place", list(SHAPES))
def test_a_loss_is_picked_and_the_whole_output_comes_back(place: str | int) -> None:
    model = Model(SHAPES[place])
    single = copy.deepcopy(model)
    slow = {"devices": [{"name": "lone", "flops": 1e6}]}
    hap = hetspmd.HAP(model, slow, example=(X,), loss=place)
    found, want = hap(X), single(X)
    assert type(found) is type(want)
    picked: Any = as_loss(place)
    loss = picked.of(found)
    loss.backward()
    picked.of(want).backward()
    assert torch.equal(loss, picked.of(want))
    assert torch.equal(hap.module.a.weight.grad, single.a.weight.grad)


@pytest.mark.parametrize("place", [1, "losses.main"])
def test_a_picked_loss_is_verified_and_divided(place: str | int) -> None:
    slow = {
        "devices": [
            {"name": f"d{k}", "flops": s * 1e6, "memory_bandwidth": s * 1e6} for k, s in enumerate((2, 1))
        ],
        "network": {"bandwidth": "100GB/s", "latency": "1ns"},
    }
    hetspmd.verify(Model(SHAPES[place]), (X,), slow, loss=place).require()


@pytest.mark.parametrize(
    ("shape", "line"),
    [
        (SHAPES[1], "loss=1."),
        (SHAPES["total"], "loss='total'."),
        (SHAPES["losses.main"], "loss='losses.main'."),
        (lambda y, loss: loss[None], "loss=lambda model, *args, **kwargs: model(*args, **kwargs).squeeze()."),
        (
            lambda y, loss: {"l": loss[None]},
            "loss=lambda model, *args, **kwargs: model(*args, **kwargs)['l'].squeeze().",
        ),
        (lambda y, loss: (loss > 0).sum(), "is an integer"),
        (lambda y, loss: loss * 1j, "is complex"),
        (lambda y, loss: y, "a Tensor of float32[8, 4]"),
        (lambda y, loss: (y, y), "a tuple of (a Tensor of float32[8, 4], a Tensor of float32[8, 4])"),
        (lambda y, loss: 3.0, "a float"),
    ],
)
def test_the_error_shows_the_line(shape: Any, line: str) -> None:
    with pytest.raises(TraceError, match=re.escape(line)):
        trace(Model(shape), (X,), {})


def test_a_place_that_is_not_there() -> None:
    with pytest.raises(TraceError, match=r"no floating-point scalar at loss='los'.*loss='total'"):
        hetspmd.compile(
            Model(SHAPES["total"]), (X,), {"devices": [{"name": "lone", "flops": 1e6}]}, loss="los"
        )


@pytest.mark.parametrize("loss", [1.5, True, "", [1], nn.MSELoss])
def test_what_is_no_loss_is_refused(loss: Any) -> None:
    with pytest.raises(OptionError, match="give a name or an index"):
        as_loss(loss)
