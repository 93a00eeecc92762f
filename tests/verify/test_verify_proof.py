"""Zeros and NaN prove nothing: verification draws values of its own, or says so."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small_plans import cluster
from torch import nn
from torch.nn import functional as F

from hetspmd.errors import CheckError, ExampleError
from hetspmd.verify.comparison import verify
from nets import Net

DEVICES = cluster(4, 2, 1, 1)


def net(body: Any, **parts: Any) -> Net:
    torch.manual_seed(1)
    return Net(body, a=nn.Linear(12, 24, bias=False), b=nn.Linear(24, 12, bias=False), **parts)


def regression(s: Any, x: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(s.b(torch.tanh(s.a(x))), x)


def classes(s: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(s.b(torch.tanh(s.a(x))), y)


def summed(s: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(s.b(torch.tanh(s.a(x))), y, reduction="sum")


def masked(s: Any, x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
    return (s.b(torch.tanh(s.a(x))).square().mean(1) * keep).sum()


def probabilities(s: Any, x: torch.Tensor) -> torch.Tensor:
    return F.binary_cross_entropy_with_logits(s.b(torch.tanh(s.a(x))), x.log().exp())


RANDOM = torch.randn(16, 12, generator=torch.Generator().manual_seed(2))
IGNORED = torch.full((16,), -100)
EMPTY: dict[str, tuple[Any, tuple[torch.Tensor, ...], str]] = {
    "a batch of zeros": (regression, (torch.zeros(16, 12),), "all gradients are zero"),
    "all labels ignored, mean": (classes, (RANDOM, IGNORED), "the loss is nan"),
    "all labels ignored, sum": (summed, (RANDOM, IGNORED), "all gradients are zero"),
    "nothing is kept": (masked, (RANDOM, torch.zeros(16, dtype=torch.bool)), "all gradients are zero"),
    "NaN in the batch": (regression, (torch.full((16, 12), float("nan")),), "the loss is nan"),
    "zero is no logarithm": (probabilities, (-RANDOM.abs(),), "the loss is nan"),
    "an infinite loss": (regression, (torch.full((16, 12), float("inf")),), "the loss is"),
}


@pytest.mark.parametrize("name", EMPTY)
def test_other_values_are_drawn(name: str) -> None:
    body, batch, why = EMPTY[name]
    report = verify(net(body), batch, DEVICES)
    assert report.ok, report.text
    assert report.gradient_error > 0.0
    (note,) = report.notes
    assert note.startswith(f"with the example {why}"), note
    assert "other values were drawn" in report.text


def test_drawn_integers_are_in_the_range_of_the_example() -> None:
    def embedded(s: Any, i: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return (s.e(i).sum() * x).sum()

    model = net(embedded, e=nn.Embedding(9, 3))
    report = verify(model, (torch.arange(8) + 1, torch.zeros(3)), DEVICES)
    assert report.ok, report.text
    assert report.notes[0].startswith("with the example all gradients are zero")


NOTHING: dict[str, tuple[Any, str]] = {
    "a constant loss": (lambda s, x: (s.a(x) * 0).sum() + 3, "all gradients are zero"),
    "never a number": (lambda s, x: s.a(x).sum() * float("nan"), "the loss is nan"),
    "a gradient that is never a number": (
        lambda s, x: (s.a(x) * 0).sqrt().sum() + s.b(s.a(x)).sum(), "some gradients are not finite",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", NOTHING)
def test_nothing_can_be_proved(name: str) -> None:
    body, why = NOTHING[name]
    report = verify(net(body), (RANDOM,), DEVICES)
    assert not report.ok
    assert report.unproved.startswith(why)
    assert report.text.startswith(f"NO PROOF that it is equal to the single device: {why}"), report.text
    with pytest.raises(CheckError, match="NO PROOF"):
        report.require()


def test_a_gradient_that_is_zero_in_every_step_is_named() -> None:
    class Adapted(nn.Module):
        """Zero-initialised as LoRA's: the first gradient of ``a`` is zero, the second is not."""

        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(1)
            self.w, self.a, self.b = nn.Linear(12, 12), nn.Linear(12, 4), nn.Linear(4, 12, bias=False)
            nn.init.zeros_(self.b.weight)
            self.off = nn.Parameter(torch.ones(12))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.mse_loss(self.w(x) + self.b(self.a(x)) + 0.0 * self.off, x)

    report = verify(Adapted(), (RANDOM,), DEVICES)
    assert report.ok
    assert report.notes == ("zero in every step is the gradient of off, of which little is proved",)
    first = verify(Adapted(), (RANDOM,), DEVICES, steps=1)
    assert first.notes == (
        "zero in every step is the gradient of a.bias, a.weight, off, of which little is proved",
    )


def test_a_model_that_fails_is_named() -> None:
    def body(s: Any, x: torch.Tensor) -> torch.Tensor:
        if not torch.compiler.is_compiling() and x.dtype == torch.float64:
            raise RuntimeError("no float64 here")
        return regression(s, x)

    with pytest.raises(ExampleError, match=r"Net fails on the example in float64: RuntimeError: no float64"):
        verify(net(body), (RANDOM,), DEVICES)
    assert verify(net(body), (RANDOM,), DEVICES, dtype="float32").ok
