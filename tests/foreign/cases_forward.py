"""Reports about what a forward computes: losses over what is ignored, shapes, dtypes, views and random access."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from harness import case
from torch import nn
from torch.nn import functional as F

Made = tuple[nn.Module, Sequence[Any]]


class Body(nn.Module):
    """Two linear layers from 12 to 7 features, and whatever a case adds."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(12, 24)
        self.second = nn.Linear(24, 7)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.first(x)))


def rows(count: int = 3, batch: int = 16) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(torch.randn(batch, 12), torch.randint(0, 7, (batch,))) for _ in range(count)]


@case("transformers#34242: the loss is a mean over tokens, and ranks hold unlike numbers of them")
def tokens_ignored_unevenly() -> Made:
    class Model(Body):
        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            return F.cross_entropy(self.logits(x), labels, ignore_index=0)

    batches = rows()
    for _, labels in batches:
        labels[:9] = 0
    return Model(), batches
