"""Small tensors for sample calls: reproducible, in dims that split unevenly."""

from __future__ import annotations

import torch


def real(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Normal numbers."""
    return torch.randn(shape, dtype=torch.float64, generator=_generator(seed, shape)).to(dtype)


def positive(*shape: int, seed: int = 0, low: float = 0.1, high: float = 0.9) -> torch.Tensor:
    """Uniform numbers in ``[low, high)``, float64."""
    return torch.rand(shape, dtype=torch.float64, generator=_generator(seed, shape)) * (high - low) + low


def integers(high: int, *shape: int, seed: int = 0, low: int = 0) -> torch.Tensor:
    """Uniform integers in ``[low, high)``, int64."""
    return torch.randint(low, high, shape, generator=_generator(seed, shape))


def booleans(*shape: int, seed: int = 0) -> torch.Tensor:
    """Fair coins."""
    return torch.rand(shape, generator=_generator(seed, shape)) < 0.5


def _generator(seed: int, shape: tuple[int, ...]) -> torch.Generator:
    mixed = seed
    for extent in shape:
        mixed = mixed * 31 + extent
    return torch.Generator().manual_seed(mixed)
