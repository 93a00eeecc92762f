"""Functions that lowered programs call where no single op computes the local result."""

from __future__ import annotations

from typing import Any

import torch


def empty_shards(shapes: list[list[int]], dtypes: list[torch.dtype | None], device: torch.device) -> Any:
    """What a device without any unit of the sharded factor contributes: zeros of the local shapes
    (of no elements for a cut output, the neutral summand for an All-Reduce output); None where the dtype
    is None."""
    tensors = [
        None if d is None else torch.zeros(s, dtype=d, device=device)
        for s, d in zip(shapes, dtypes, strict=True)
    ]
    return tensors[0] if len(tensors) == 1 else tuple(tensors)
