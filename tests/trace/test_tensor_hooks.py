"""Hooks on tensors that forward makes: what changes a gradient is traced, what only looks is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hetspmd.errors import TraceError
from hetspmd.trace.trace import trace

SEEN: list[Any] = []
X = torch.randn(4, 6)


class Net(nn.Module):
    def __init__(self, at: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.first, self.second, self.at = nn.Linear(6, 6), nn.Linear(6, 3), at

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        self.at(hidden)
        return self.second(hidden.relu()).square().mean()


def looks(hidden: Tensor) -> None:
    hidden.register_hook(print)


def keeps(hidden: Tensor) -> None:
    hidden.register_hook(SEEN.append)


def measures(hidden: Tensor) -> None:
    hidden.register_hook(lambda g: SEEN.append(g.norm()))


def looks_at_a_view(hidden: Tensor) -> None:
    hidden[:2].sum()
    hidden.view(-1).register_hook(print)
    hidden.register_hook(lambda g: print(g.shape))


def retains(hidden: Tensor) -> None:
    hidden.retain_grad()


@pytest.mark.parametrize("at", [looks, keeps, measures, looks_at_a_view])
def test_hooks_that_only_look_are_refused(at: Callable[[Tensor], Any]) -> None:
    with pytest.raises(
        TraceError, match=r"test_tensor_hooks\.py:\d+: .*register_hook.*only looks at the grad"
    ):
        trace(Net(at), (X,), {})
    alone = Net(lambda hidden: hidden.register_hook(lambda g: None))
    alone(X).backward()  # as ever outside of a trace
    assert alone.first.weight.grad is not None


def test_a_kept_gradient_is_refused() -> None:
    with pytest.raises(TraceError, match=r"retain_grad\(\) at .*test_tensor_hooks\.py"):
        trace(Net(retains), (X,), {})
    hidden = X.clone().requires_grad_().square()
    hidden.retain_grad()
    hidden.sum().backward()
    assert hidden.grad is not None


@pytest.mark.parametrize(
    "change", [lambda g: g * 0.5, lambda g: -g, lambda g: g.clamp(-0.1, 0.1), torch.zeros_like]
)
def test_hooks_that_change_the_gradient_are_part_of_the_graph(change: Callable[[Tensor], Tensor]) -> None:
    plain = trace(Net(lambda hidden: None), (X,), {})
    changed = trace(Net(lambda hidden: hidden.register_hook(change)), (X,), {})
    assert [i.op for i in changed.instructions] != [i.op for i in plain.instructions]


def test_evaluation_registers_nothing() -> None:
    net = Net(lambda hidden: hidden.register_hook(print) if hidden.requires_grad else None)
    assert trace(net, (X,), {}, training=False).instructions
