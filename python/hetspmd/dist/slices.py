"""Slices of tensors, and the buffers in which they travel.

``extents[r]`` is the number of elements that rank r holds along a dim, zeros allowed; slices are consecutive in rank
order.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch

_MOVABLE = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.int8,
)


def common(one: tuple[int, int], other: tuple[int, int]) -> int:
    """How many elements two ranges ``(start, extent)`` have in common."""
    return max(0, min(one[0] + one[1], other[0] + other[1]) - max(one[0], other[0]))


def ranges(extents: Sequence[int]) -> list[tuple[int, int]]:
    """(start, extent) of each rank."""
    return [(stop - extent, extent) for stop, extent in zip(accumulate(extents), extents, strict=True)]


def lone(extents: Sequence[int]) -> int | None:
    """The only rank that holds anything, None if none or several do."""
    holders = [rank for rank, extent in enumerate(extents) if extent]
    return holders[0] if len(holders) == 1 else None


def whole_slice(tensor: torch.Tensor, dim: int, extents: Sequence[int], rank: int) -> torch.Tensor:
    """A rank's slice of a whole tensor, a view of it."""
    start, extent = ranges(extents)[rank]
    return tensor.narrow(dim, start, extent)


def is_alone(tensor: torch.Tensor) -> bool:
    """Whether the tensor lies in order in a storage of which it is all, so that a sum may be made there."""
    dense = tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()
    return dense and tensor.untyped_storage().nbytes() == tensor.numel() * tensor.itemsize


def whole_numel(tensor: torch.Tensor, dim: int, extents: Sequence[int]) -> int:
    """Elements of the whole tensor of which this is a shard."""
    count = sum(extents)
    for d, extent in enumerate(tensor.shape):
        count *= 1 if d == dim else extent
    return count


def filled(tensor: torch.Tensor, dim: int, extents: Sequence[int]) -> torch.Tensor:
    """The whole tensor where nothing need be sent: the only rank's shard, or a tensor of no elements."""
    if tensor.shape[dim] == sum(extents):
        return tensor
    return tensor.new_empty((*tensor.shape[:dim], sum(extents), *tensor.shape[dim + 1 :]))


def back(front: torch.Tensor, dim: int) -> torch.Tensor:
    """Dim 0 moved back to where it belongs, contiguous."""
    return front.movedim(0, dim).contiguous()


def byte_factor(dtype: torch.dtype) -> int:
    """How many elements of :func:`movable`'s dtype one element is."""
    return 1 if dtype in _MOVABLE else dtype.itemsize


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, whose memory holds its values: no conjugate or negative is left to be taken."""
    return tensor.resolve_conj().resolve_neg() if tensor.is_complex() or tensor.is_neg() else tensor


def movable(buffer: torch.Tensor) -> torch.Tensor:
    """A flat view of a contiguous buffer in a dtype that every backend moves."""
    flat = buffer.view(-1)
    return flat if buffer.dtype in _MOVABLE else flat.view(torch.uint8)


def summable(buffer: torch.Tensor) -> torch.Tensor:
    """A flat view of a contiguous buffer in a dtype that every backend sums."""
    return (torch.view_as_real(buffer) if buffer.is_complex() else buffer).view(-1)
