"""A plan computes gradients once: what asks for gradients of them is refused, unless it is in the model."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from divided import X, on_four
from torch import nn

from hetspmd.errors import GradientError
from hetspmd.run.module import HAP


def penalty(hap: HAP) -> None:
    gradients = torch.autograd.grad(hap(X), list(hap.parameters()), create_graph=True)
    sum(g.square().sum() for g in gradients).backward()  # type: ignore[union-attr]  # a sum of tensors


def of_one(hap: HAP) -> None:
    torch.autograd.grad(hap(X) * 2, hap.module.a.weight, create_graph=True)


def backward(hap: HAP) -> None:
    hap(X).backward(create_graph=True)


def with_a_tangent(hap: HAP) -> None:
    tangent = torch.ones((), dtype=X.dtype, requires_grad=True)
    torch.autograd.grad(hap(X), list(hap.parameters()), tangent, create_graph=True)


@pytest.mark.parametrize("ask", [penalty, of_one, backward, with_a_tangent], ids=lambda f: f.__name__)
def test_it_is_refused_on_every_rank(ask: Callable[[HAP], None]) -> None:
    def body(hap: HAP) -> float:
        with pytest.raises(GradientError, match=r"create_graph=True .* into the model or into loss="):
            ask(hap)
        hap.zero_grad()
        loss = hap(X)  # the module goes on
        loss.backward()
        return loss.item()

    assert len(set(on_four(body))) == 1


class Penalised(nn.Module):
    """As WGAN-GP has it: the gradient of the output with respect to the batch is part of the loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(12, 24), nn.Linear(24, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_()
        out = self.b(torch.tanh(self.a(x))).square().mean()
        (gradient,) = torch.autograd.grad(out, x, create_graph=True)
        return out + 10 * gradient.square().sum()


def test_inside_the_model_it_is_as_on_one_device() -> None:
    def made() -> nn.Module:
        return Penalised().double()

    single = made()
    single(X).backward()

    def body(hap: HAP) -> dict[str, torch.Tensor]:
        hap(X).backward()
        return hap.full_gradients()

    for gradients in on_four(body, made):
        for name, parameter in single.named_parameters():
            torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-10, atol=1e-12)
