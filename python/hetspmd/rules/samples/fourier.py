"""Sample calls of :mod:`hetspmd.rules.ops.fourier`."""

from __future__ import annotations

import torch

from hetspmd.rules.samples import Factory, Sample


def _complex() -> torch.Tensor:
    return torch.randn(5, 4, 6, generator=torch.Generator().manual_seed(0), dtype=torch.complex128)


def _to_complex() -> list[Sample]:
    return [((_complex(), [2], 0, True), {}), ((_complex(), [0, 2], 1, False), {})]


SAMPLES: dict[str, Factory] = {
    "aten._fft_c2c.default": _to_complex,
    "aten._fft_r2c.default": lambda: [
        ((_complex().real, [2], 0, True), {}),
        ((_complex().real, [0, 1], 2, True), {}),
        ((_complex().real, [1], 0, False), {}),
    ],
    "aten._fft_c2r.default": lambda: [((_complex(), [2], 2, 10), {}), ((_complex(), [1, 2], 2, 11), {})],
}
