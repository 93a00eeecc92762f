"""Random models that reorder dims and flatten them: the traced step is the model's, whole and divided."""

from __future__ import annotations

import random

import pytest
import torch
from in_turns import run_in_turns
from torch import nn
from torch.nn import functional as F

from hetspmd.errors import MicroBatchError
from hetspmd.program.lengths import lengths_for
from hetspmd.program.time_split import split_in_time
from hetspmd.rules.theory import derive
from hetspmd.trace.trace import trace
from hetspmd.verify.comparison import largest_error
from hetspmd.verify.reference import ReferenceResult
from workbench import single_device

SEEDS = range(60)


class RandomModel(nn.Module):
    """Ops drawn by a seed; among them some to which the order of rows matters."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed, self.weights = seed, nn.ParameterList()

    def weight(self, *shape: int) -> torch.Tensor:
        """The next parameter, made in the first run."""
        self.used += 1
        if self.used > len(self.weights):
            self.weights.append(nn.Parameter(torch.randn(*shape, dtype=torch.float64) / shape[-1] ** 0.5))
        return self.weights[self.used - 1]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        drawn, self.used = random.Random(self.seed), 0
        total = torch.zeros((), dtype=x.dtype)
        if drawn.random() < 0.7:
            x = x.transpose(0, 1)
        for _ in range(drawn.randint(4, 9)):
            what = drawn.choice(
                ("permute", "flatten", "flatten", "linear", "tanh", "positions", "split", "merge", "loss")
            )
            if what == "permute":
                order = list(range(x.ndim - 1))
                drawn.shuffle(order)
                x = x.permute(*order, x.ndim - 1)
            elif what == "flatten" and x.ndim > 2:
                x, more = self.rows(x, drawn)
                total = total + more
            elif what == "linear":
                x = F.linear(x, self.weight(x.shape[-1], x.shape[-1]), self.weight(x.shape[-1]))
            elif what == "tanh":
                x = F.layer_norm(x.tanh(), x.shape[-1:])
            elif what == "positions" and x.ndim > 1:
                x = x + self.weight(*x.shape[-2:])
            elif what == "split" and x.shape[-1] % 2 == 0 and x.ndim < 5:
                x = x.reshape(*x.shape[:-1], 2, x.shape[-1] // 2)
            elif what == "merge" and x.ndim > 2:
                x = x.flatten(-3, -2) if drawn.random() < 0.5 else x.flatten(-2)
            elif what == "loss":
                total = total + x.sum(tuple(range(x.ndim - 1))).square().mean()
        return total + x.square().mean()

    def rows(self, x: torch.Tensor, drawn: random.Random) -> tuple[torch.Tensor, torch.Tensor]:
        """Ops on the rows of all dims but the last, and a part of the loss."""
        width, total = x.shape[-1], torch.zeros((), dtype=x.dtype)
        y = x.reshape(-1, width) @ self.weight(width, width)
        if drawn.random() < 0.4:
            y = F.layer_norm(y, (width,)).softmax(-1)
        if drawn.random() < 0.3 and width > 1:
            a, b = y.chunk(2, -1)
            y = torch.cat([a * b.sum(-1, keepdim=True).sigmoid(), b], -1)
        if drawn.random() < 0.2:
            y = y * torch.linspace(0, 1, len(y), dtype=y.dtype)[:, None]
        if drawn.random() < 0.15:
            y = y.cumsum(0)
        if drawn.random() < 0.3:
            total = total + (y.t() @ y).square().mean() + (y @ y.t()).tanh().mean()
        if drawn.random() < 0.2:
            total = total + (y @ y.t()).view(*x.shape[:-1], *x.shape[:-1]).square().mean()
        return y.view(x.shape), total


def error(got: ReferenceResult, want: dict[str, torch.Tensor], peak: torch.Tensor) -> float:
    assert got.loss is not None
    found = {n: got.loss if n == "loss" else got.gradients[n] for n in want}
    return largest_error({**found, "peak": peak}, {**want, "peak": peak}, 1e-9)[0]


@pytest.mark.slow
def test_random_models() -> None:
    changed = divided = 0
    for seed in SEEDS:
        torch.manual_seed(seed)
        model, x = RandomModel(seed), torch.randn(4, 3, 8, dtype=torch.float64)
        loss = model(x)
        if not loss.requires_grad:
            continue
        loss.backward()
        want = {n: p.grad for n, p in model.named_parameters() if p.grad is not None} | {
            "loss": loss.detach()
        }
        peak = torch.stack([t.abs().max() for t in want.values()]).max()
        theory = derive(trace(model, (x,), {}), quiet=True)
        changed += any("samples first" in t.name for t in theory.graph.tensors)
        assert error(single_device(theory, model, [x]), want, peak) < 1e-9, seed
        try:
            loop = split_in_time(theory)
        except MicroBatchError:
            continue
        divided += 1
        for parts in ((0.5, 0.5), (0.0, 0.75, 0.25)):
            got = run_in_turns(theory, loop, lengths_for(theory.axes, parts), model, [x])
            assert error(got, want, peak) < 1e-9, seed
    assert changed >= 12
    assert divided >= 20
