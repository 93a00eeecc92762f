"""Where the shards of a tensor lie: extents and regions of ``(tensor, form)`` on each rank."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import accumulate

from hetspmd.placement import Placement, is_sharded, sharded_dim
from hetspmd.program.lengths import Lengths
from hetspmd.rules.axes import Axes
from hetspmd.trace.graph import Graph


@dataclass(frozen=True, slots=True)
class Region:
    """Elements ``start .. start + extent`` along ``dim`` of a tensor."""

    dim: int
    start: int
    extent: int


class Layout:
    """The lengths of a plan applied to the tensors of its graph."""

    def __init__(self, graph: Graph, axes: Axes, lengths: Lengths) -> None:
        self.graph, self.axes, self.lengths = graph, axes, lengths
        self.extents = cache(self._extents)

    def _extents(self, tensor: int, form: Placement) -> tuple[int, ...]:
        extent = self.graph.tensors[tensor].shape[sharded_dim(form)]
        return self.lengths.extents(self.axes, tensor, form, extent)

    def agrees(self, tensor: int, one: Placement, other: Placement) -> bool:
        """Whether two forms that shard the same dim divide it alike."""
        same: bool = self.extents(tensor, one) == self.extents(tensor, other)
        return same

    def region(self, tensor: int, form: Placement, rank: int) -> Region | None:
        """What a rank holds of a tensor; None where it holds the whole shape (replicated, partial)."""
        if not is_sharded(form):
            return None
        extents: tuple[int, ...] = self.extents(tensor, form)
        starts = (0, *accumulate(extents))
        return Region(sharded_dim(form), starts[rank], extents[rank])

    def shape(self, tensor: int, form: Placement, rank: int) -> tuple[int, ...]:
        """The local shape."""
        shape = self.graph.tensors[tensor].shape
        region = self.region(tensor, form, rank)
        if region is None:
            return shape
        return (*shape[: region.dim], region.extent, *shape[region.dim + 1 :])

    def units(self, axis: int, factor_size: int, rank: int) -> tuple[int, int]:
        """The units of a factor on ``axis`` that a rank holds."""
        start, stop = self.lengths.range(axis, rank)
        scale = factor_size // self.axes.axes[axis].units
        return start * scale, stop * scale
