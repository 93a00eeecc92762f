"""Sample calls of :mod:`hetspmd.rules.ops.segment`."""

from __future__ import annotations

import torch

from hetspmd.rules.samples import Factory, Sample
from hetspmd.trace.graph import REBALANCE


def _copies() -> list[Sample]:
    x = torch.randn(5, 4, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return [((x,), {}), ((x[0, 0],), {}), ((x > 0,), {}), ((torch.arange(20).reshape(5, 4),), {})]


SAMPLES: dict[str, Factory] = {REBALANCE: _copies}
