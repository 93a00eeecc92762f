"""Small models with what makes real ones hard: tied, frozen and unused parameters, buffers, dropout."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import hetspmd.rules.ops  # noqa: F401  # registers the rules
from hetspmd.rules.theory import Theory, derive
from hetspmd.trace.autocast import autocast_state
from hetspmd.trace.trace import trace


class MLP(nn.Module):
    """Two layers, a frozen and an unused parameter, a mean loss over labels of which some are ignored."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 10)
        self.b = nn.Linear(10, 5)
        self.scale = nn.Parameter(torch.rand(10), requires_grad=False)
        self.unused = nn.Parameter(torch.rand(3))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.b(torch.relu(self.a(x)) * self.scale)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


class Branches(nn.Module):
    """Cannot be traced: what it computes depends on values."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.w).sum() if x.sum() > 0 else self.w.sum()


class ConvNet(nn.Module):
    """Batch norm in training, a convolution, pooling; the running statistics change."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 3, padding=1)
        self.norm = nn.BatchNorm2d(6)
        self.head = nn.Linear(6, 4)

    def forward(self, image: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = F.max_pool2d(torch.relu(self.norm(self.conv(image))), 2)
        return F.cross_entropy(self.head(x.mean((2, 3))), labels)


class Residual(nn.Module):
    """Convolutions with batch norm (one without weights), a residual sum, a masked cross entropy."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 6, 3, padding=1), nn.Conv2d(6, 6, 1, bias=False)
        self.norm, self.plain = nn.BatchNorm2d(6), nn.BatchNorm2d(6, affine=False)
        self.head = nn.Linear(6, 5)

    def forward(self, image: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.norm(self.first(image)))
        x = torch.relu(x + self.plain(self.second(x)))
        return F.cross_entropy(self.head(x.mean((2, 3))), labels)


class Attention(nn.Module):
    """A block of attention with dropout and tied embeddings, a mask buffer, a constant (positions), a
    language model's loss."""

    def __init__(self, dropout: float = 0.1) -> None:
        super().__init__()
        self.tokens = nn.Embedding(11, 12)
        self.qkv = nn.Linear(12, 36)
        self.out = nn.Linear(12, 12)
        self.norm = nn.LayerNorm(12)
        self.drop = nn.Dropout(dropout)
        self.head = nn.Linear(12, 11, bias=False)
        self.head.weight = self.tokens.weight
        self.register_buffer("mask", torch.ones(5, 5).tril().bool(), persistent=False)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        positions = (torch.arange(5, device=ids.device) - 2).to(self.out.weight.dtype) * 0.1
        x = self.drop(self.tokens(ids) + positions[:, None])
        n, s, d = x.shape
        q, k, v = (t.view(n, s, 3, d // 3).transpose(1, 2) for t in self.qkv(self.norm(x)).split(d, -1))
        scores = (q @ k.transpose(-1, -2) / 2.0).masked_fill(~self.mask, float("-inf"))
        y = (self.drop(scores.softmax(-1)) @ v).transpose(1, 2).reshape(n, s, d)
        logits = self.head(x + self.drop(self.out(y)))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits


@dataclass(frozen=True)
class Case:
    """A model with a batch, and the theory of its training step."""

    model: nn.Module
    batch: dict[str, Any]
    theory: Theory


def case(name: str, dtype: torch.dtype = torch.float64, **options: Any) -> Case:
    """The model called ``name`` with its batch, both made anew, and the theory, which is made once."""
    theory = _theory(name, dtype, tuple(options.items()), autocast_state("cpu"))
    return Case(*_made(name, dtype, options), theory)


@cache
def _theory(name: str, dtype: torch.dtype, options: tuple[tuple[str, Any], ...], _autocast: Any) -> Theory:
    model, batch = _made(name, dtype, dict(options))
    return derive(trace(model, (), batch))


def _made(name: str, dtype: torch.dtype, options: dict[str, Any]) -> tuple[nn.Module, dict[str, Any]]:
    torch.manual_seed(0)
    model: nn.Module
    batch: dict[str, Any]
    if name == "mlp":
        labels = torch.tensor([0, 1, -100, 3, 4, -100, 2, 2, 1])
        model, batch = MLP(), {"x": torch.randn(9, 6), "labels": labels}
    elif name == "conv":
        model, batch = ConvNet(), {"image": torch.randn(5, 3, 6, 6), "labels": torch.randint(0, 4, (5,))}
    elif name == "residual":
        model = Residual()
        batch = {"image": torch.randn(5, 3, 6, 6), "labels": torch.tensor([0, -100, 4, 2, 2])}
    else:
        model = Attention(**options)
        batch = {"ids": torch.randint(0, 11, (4, 5)), "labels": torch.randint(0, 11, (4, 5))}
    model = model.to(dtype)
    batch = {k: v.to(dtype) if v.is_floating_point() else v for k, v in batch.items()}
    return model, batch
