"""Sample calls of :mod:`hetspmd.rules.ops.scan`."""

from __future__ import annotations

import torch

from hetspmd.rules.samples import Factory, Sample


def _scans() -> list[Sample]:
    x = torch.randn(5, 4, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return [((x, 0), {}), ((x, -1), {}), ((x[0], 1), {})]


def _cumsums() -> list[Sample]:
    ones = torch.ones(5, 4, dtype=torch.bool)
    return [*_scans(), ((ones, 0), {}), ((torch.arange(20).reshape(5, 4), 1), {"dtype": torch.float64})]


SAMPLES: dict[str, Factory] = {
    "aten.cumsum.default": _cumsums,
    **{f"aten.{name}.default": _scans for name in ("cumprod", "logcumsumexp", "cummax", "cummin")},
}
