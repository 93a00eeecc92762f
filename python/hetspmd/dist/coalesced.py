"""Several collectives as one: what :mod:`hetspmd.program.buckets` puts together, packed side by side.

A rank's part of the packed buffer is the concatenation of its parts of the tensors, each padded to the largest
extent along its own dim, so that one equal-size primitive carries all of them. Where none of them has an element
(inside a machine that holds empty shards), nothing is sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import torch

from hetspmd.dist.communicator import Member
from hetspmd.dist.pending import Pending
from hetspmd.dist.slices import back, ranges, whole_slice

Place = tuple[int, Sequence[int]]
"""The dim along which a tensor is cut, and the extent of each rank's shard along it."""


class Awaited(Protocol):
    """What carries a bucket."""

    def wait(self) -> list[torch.Tensor]:
        """Wait and give the results."""


class PendingBucket:
    """A bucket on its way; :meth:`take` gives each of its results, once."""

    __slots__ = ("_parts", "_pending")

    def __init__(self, pending: Awaited) -> None:
        self._pending: Awaited | None = pending
        self._parts: list[torch.Tensor | None] = []

    @property
    def pending(self) -> Awaited | None:
        """The collective that carries the bucket, None once it was waited for."""
        return self._pending

    def arrive(self) -> None:
        """Wait until it has completed, and let go of what it needed; the results are taken later."""
        if isinstance(self._pending, Pending):
            self._pending.arrive()

    def take(self, index: int) -> torch.Tensor:
        """Wait, and give one tensor's result."""
        if self._pending is not None:
            self._parts = list(self._pending.wait())
            self._pending = None
        part, self._parts[index] = self._parts[index], None
        assert part is not None, "a collective is waited for once"
        return part


def start_all_reduces(
    runtime: Member, tensors: Sequence[torch.Tensor], places: Sequence[tuple[()]] = ()
) -> PendingBucket:
    """partial to replicated of each tensor, which has no place; the results are views of one buffer."""
    comm = runtime.communicator
    if comm.world == 1:
        return PendingBucket(Pending((), lambda: list(tensors)))
    comm.settle()
    packed = torch.cat([tensor.reshape(-1) for tensor in tensors])
    shapes = [tensor.shape for tensor in tensors]
    works = (comm.all_reduce(packed),) if packed.numel() else ()

    def finish() -> list[torch.Tensor]:
        flat = torch.split(packed, [shape.numel() for shape in shapes])
        return [part.view(shape) for part, shape in zip(flat, shapes, strict=True)]

    return PendingBucket(Pending(works, finish, comm))


def start_reduce_scatters(
    runtime: Member, tensors: Sequence[torch.Tensor], places: Sequence[Place]
) -> PendingBucket:
    """partial to shard(dim) of each tensor, padded: this rank's slices of the sums."""
    comm = runtime.communicator
    if comm.world == 1:
        slices = [whole_slice(t, dim, extents, 0) for t, (dim, extents) in zip(tensors, places, strict=True)]
        return PendingBucket(Pending((), lambda: slices))
    comm.settle()
    packing = [_Packed.of(tensor, place) for tensor, place in zip(tensors, places, strict=True)]
    size, uneven = _laid_out(packing)
    make = tensors[0].new_zeros if uneven else tensors[0].new_empty
    packed = make((comm.world, size))
    for tensor, packs in zip(tensors, packing, strict=True):
        front = tensor.movedim(packs.dim, 0)
        for rank, (start, extent) in enumerate(ranges(packs.extents)):
            packs.view(packed[rank], extent).copy_(front[start : start + extent])
    mine = tensors[0].new_empty(size)
    works = (comm.reduce_scatter(mine, packed.view(-1), spare=True),) if size else ()

    def finish() -> list[torch.Tensor]:
        parts = [back(packs.view(mine, packs.extents[comm.rank]), packs.dim) for packs in packing]
        # Padding is not held on to by what is a view.
        return [part.clone() for part in parts] if uneven else parts

    return PendingBucket(Pending(works, finish, comm, early=uneven))


def start_all_gathers(
    runtime: Member, tensors: Sequence[torch.Tensor], places: Sequence[Place]
) -> PendingBucket:
    """shard(dim) to replicated of each tensor, padded."""
    comm = runtime.communicator
    if comm.world == 1:
        return PendingBucket(Pending((), lambda: list(tensors)))
    comm.settle()
    packing = [_Packed.of(tensor, place) for tensor, place in zip(tensors, places, strict=True)]
    size, uneven = _laid_out(packing)
    packed = tensors[0].new_empty((comm.world, size))
    # A rank's own part is sent from its place in what is gathered.
    mine = packed[comm.rank]
    if uneven:
        mine.zero_()
    for tensor, packs in zip(tensors, packing, strict=True):
        packs.view(mine, tensor.shape[packs.dim]).copy_(tensor.movedim(packs.dim, 0))
    works = (comm.all_gather(packed.view(-1), mine),) if size else ()
    del mine

    def finish() -> list[torch.Tensor]:
        return [
            torch.cat(
                [
                    packs.view(packed[rank], extent).movedim(0, packs.dim)
                    for rank, extent in enumerate(packs.extents)
                    if extent or not any(packs.extents)
                ],
                packs.dim,
            )
            for packs in packing
        ]

    return PendingBucket(Pending(works, finish, comm, early=True))



@dataclass
class _Packed:
    """Where a tensor lies in a rank's part: ``offset`` elements from its beginning, dim ``dim`` first."""

    dim: int
    extents: Sequence[int]
    rest: torch.Size
    offset: int = 0

    @classmethod
    def of(cls, tensor: torch.Tensor, place: Place) -> _Packed:
        dim, extents = place
        return cls(dim, extents, torch.Size((*tensor.shape[:dim], *tensor.shape[dim + 1 :])))

    @property
    def size(self) -> int:
        """Elements, padding included."""
        return max(self.extents) * self.rest.numel()

    def view(self, part: torch.Tensor, extent: int) -> torch.Tensor:
        """The first ``extent`` slices within a rank's part."""
        stop = self.offset + extent * self.rest.numel()
        return part[self.offset : stop].view(extent, *self.rest)


def _laid_out(packing: Sequence[_Packed]) -> tuple[int, bool]:
    """Set the offsets; elements of a rank's part, and whether any of it is padding."""
    stops = list(accumulate(packs.size for packs in packing))
    for packs, stop in zip(packing, stops, strict=True):
        packs.offset = stop - packs.size
    return stops[-1], any(min(packs.extents) < max(packs.extents) for packs in packing)
