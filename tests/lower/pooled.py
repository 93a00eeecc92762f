"""Poolings of every kind, behind a rectifier."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import nn

POOLS: Final[dict[str, dict[str, Any]]] = {
    "square": {"kernel_size": 2},
    "overlapping": {"kernel_size": 3, "stride": 2, "padding": 1},
    "oblong": {"kernel_size": (3, 2), "stride": (1, 3), "padding": (1, 0)},
    "dilated": {"kernel_size": (2, 3), "stride": 2, "padding": 1, "dilation": (3, 2)},
    "ceil": {"kernel_size": 3, "stride": 2, "ceil_mode": True},
    "wide": {"kernel_size": 6, "stride": (2, 3), "padding": 2},
    "large": {"kernel_size": 12, "stride": 1, "padding": 1},
}


class Pooled(nn.Module):
    """A convolution, a rectifier, a pooling with ``options``, and a product. The gradient of ``shift``, which is
    added to each plane, says where the maxima lay."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(2, 13, 11))
        self.conv = nn.Conv2d(2, 3, 1)
        self.pool = nn.MaxPool2d(**options)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The pooled tensor, scaled."""
        found: torch.Tensor = self.pool(torch.relu(self.conv(x + self.shift))) * self.scale
        return found
