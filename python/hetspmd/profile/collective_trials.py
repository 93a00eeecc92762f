"""Which cases of a collective are measured: sizes, and how unevenly the shards are cut.

Skews, with the devices in order of speed, fastest first:

- even: equal shards;
- skewed: shares that fall geometrically to an eighth from the fastest device to the slowest;
- half: equal shards on the faster half, empty ones on the slower;
- lone: the fastest device holds everything. Not of padded gathers and scatters: they run as grouped ones then.

Gathers and scatters cut dim 0 of a matrix. An all-to-all goes from rows to columns: evenly and skewed on both
sides, and from half and lone to even ones. An all-reduce has no shards.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch

from hetspmd.cluster.collective_kinds import KINDS, Kind
from hetspmd.cluster.curves import COLLECTIVES
from hetspmd.dist import collectives
from hetspmd.dist.pending import PendingTensor
from hetspmd.dist.runtime import Runtime
from hetspmd.profile.profile_thresholds import THRESHOLDS

ITEM_BYTES: Final = 4
"""Of an element: float32."""


@dataclass(frozen=True, slots=True)
class Trial:
    """A case: ``extents`` of each rank along dim 0 (empty for all_reduce), ``targets`` along dim 1 (all_to_all),
    ``width`` elements of the other dims. The numbers are those of :class:`hetspmd.cluster.curves.Point`."""

    kind: Kind
    skew: str
    extents: tuple[int, ...]
    targets: tuple[int, ...]
    width: int

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return ITEM_BYTES * self.width * max(sum(self.extents), 1)

    @property
    def shards(self) -> int:
        """Shards that hold anything."""
        return sum(1 for e in self.extents if e) if self.extents else 1

    @property
    def largest(self) -> float:
        """The part of the tensor that the largest shard holds."""
        return max(self.extents) / sum(self.extents) if self.extents else 1.0

    @property
    def exchange(self) -> float:
        """The part that the busiest device sends or receives in an all-to-all."""
        if not self.targets:
            return 0.0
        shares = [(s / sum(self.extents), t / sum(self.targets)) for s, t in self._pairs()]
        return max(max(s * (1 - t), t * (1 - s)) for s, t in shares)

    def _pairs(self) -> list[tuple[int, int]]:
        return list(zip(self.extents, self.targets, strict=True))

    def shape(self, rank: int) -> tuple[int, ...]:
        """The shape of this rank's operand."""
        kind = KINDS[self.kind]
        if not kind.sharded_ends:
            return (self.width,)
        return sum(self.extents) if kind.scatters else self.extents[rank], self.width


def trials(nbytes: int, order: Sequence[int]) -> list[Trial]:
    """The cases of about ``nbytes`` bytes; ``order`` holds the ranks, fastest first."""
    skews = _skews(len(order))
    cases: list[Trial] = []
    for kind in COLLECTIVES:
        ends, lone = KINDS[kind].sharded_ends, KINDS[kind].lone
        if ends == 0:
            cases.append(Trial(kind, "even", (), (), nbytes // ITEM_BYTES))
        elif ends == 2:
            side = math.isqrt(nbytes // ITEM_BYTES)
            even = _extents(side, skews["even"], order)
            for skew, shares in skews.items():
                extents = _extents(side, shares, order)
                cases.append(Trial(kind, skew, extents, extents if skew == "skewed" else even, side))
        else:
            width = max(nbytes // ITEM_BYTES // THRESHOLDS.shard_units, 1)
            cases += [
                Trial(kind, skew, _extents(THRESHOLDS.shard_units, shares, order), (), width)
                for skew, shares in skews.items()
                if skew != "lone" or lone is None
            ]
    return cases


def start(runtime: Runtime, trial: Trial, operand: torch.Tensor) -> PendingTensor:
    """Start the collective of ``trial`` on this rank's ``operand``, as a lowered program does."""
    kind = KINDS[trial.kind]
    cuts = [(0, trial.extents), (1, trial.targets)][: kind.sharded_ends]
    return collectives.STARTS[trial.kind].one(runtime, operand, *kind.arguments(cuts))


def _skews(n: int) -> dict[str, list[float]]:
    """Shares by place in the order of speed; a skew that repeats an earlier one is left out."""
    half = n // 2
    skews = {
        "even": [1.0] * n,
        "skewed": [THRESHOLDS.skew_fall ** (-i / (n - 1)) for i in range(n)],
        "half": [1.0] * half + [0.0] * (n - half),
        "lone": [1.0] + [0.0] * (n - 1),
    }
    if skews["half"] == skews["lone"]:
        del skews["half"]
    return skews


def _extents(units: int, shares: Sequence[float], order: Sequence[int]) -> tuple[int, ...]:
    """Whole units per rank in proportion to the shares, by largest remainder; ``shares[i]`` is of ``order[i]``."""
    exact = [units * s / sum(shares) for s in shares]
    counts = [int(e) for e in exact]
    rest = sorted(range(len(exact)), key=lambda i: (counts[i] - exact[i], i))[: units - sum(counts)]
    for i in rest:
        counts[i] += 1
    by_rank = dict(zip(order, counts, strict=True))
    return tuple(by_rank[r] for r in range(len(order)))
