"""Reports about gradient checkpointing: results are those of one device, whatever is recomputed."""

from __future__ import annotations

import torch
from cases_forward import Body, Made, only_x
from harness import case
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential


@case("FocalNet#4: blocks under checkpoint, without reentrance")
def blocks_under_checkpoint() -> Made:
    class Model(Body):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = checkpoint(lambda z: torch.tanh(self.first(z)), x, use_reentrant=False)
            return self.second(hidden).pow(2).mean()

    return Model(), only_x()


@case("FocalNet#4: blocks under the reentrant checkpoint")
def blocks_under_reentrant_checkpoint() -> Made:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Linear(12, 12)
            self.blocks = nn.ModuleList(nn.Linear(12, 12) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.stem(x)
            for block in self.blocks:
                x = checkpoint(lambda z, b=block: torch.tanh(b(z)), x, use_reentrant=True)
            return x.pow(2).mean()

    return Model(), only_x()


@case("pytorch#24005: checkpoint_sequential")
def a_sequence_in_segments() -> Made:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(*(m for _ in range(4) for m in (nn.Linear(12, 12), nn.Tanh())))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint_sequential(self.layers, 2, x, use_reentrant=False).pow(2).mean()

    return Model(), only_x()


@case("pytorch#121594: the same block under checkpoint in two tasks")
def one_block_in_two_tasks() -> Made:
    class Model(Body):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            a = checkpoint(self.first, x, use_reentrant=False)
            b = checkpoint(self.first, x.flip(0), use_reentrant=False)
            return self.second(a).pow(2).mean() + self.second(b).abs().mean()

    return Model(), only_x()


@case("pytorch#96136: running statistics under checkpoint are updated as often as on one device")
def running_statistics_under_checkpoint() -> Made:
    class Model(Body):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(24)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = checkpoint(lambda z: torch.relu(self.norm(self.first(z))), x, use_reentrant=False)
            return self.second(hidden).pow(2).mean()

    return Model(), only_x()
