"""Measured seconds of single ops: the part ``ops`` of a cluster file's ``measured:``.

An op with given shapes, dtypes, arguments and layouts, run by one of its triples, has a *key*
(:mod:`hetspmd.cost.op_keys`). On one kind of device it takes

    seconds = constant + slope * share                          of a device that holds ``share`` > 0 of the axis

with ``constant`` and ``slope`` not negative; a triple that shards nothing has the share 1 and no slope. The part of
a file, one line per key, for each kind of device::

    ops:
    - ranks: [0, 1]
      times:
      # key, constant, slope, error, then the measured points: share, seconds
      - ['aten.relu.default(float32[64/64,512]) -> float32[64/64,512]', 2e-6, 2e-5, 0.02, 0.25, 7e-6, 1.0, 2.2e-5]

``error`` is the largest relative error of the line at the points. The cost model takes a key's line in place of the
roofline (:mod:`hetspmd.cost.model`); what has no line keeps it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from hetspmd.cluster.file import Node
from hetspmd.errors import ClusterError


@dataclass(frozen=True, slots=True)
class OpTime:
    """Seconds of the op and triple ``key``. Raises ClusterError for a number that is negative or not finite, and
    for an op that takes no time."""

    key: str
    constant: float
    slope: float

    def __post_init__(self) -> None:
        for name in ("constant", "slope"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ClusterError(
                    f"measured op {self.key}: {name} is {getattr(self, name)}; it must be finite and not negative"
                )
        if self.constant + self.slope == 0:
            raise ClusterError(f"measured op {self.key} takes no time; profile again")

    def seconds(self, share: float) -> float:
        """Seconds at a share above 0."""
        return self.constant + self.slope * share


@dataclass(frozen=True)
class OpTimes:
    """The op times of the devices ``ranks``, which are of one kind."""

    ranks: tuple[int, ...]
    times: tuple[OpTime, ...]

    @cached_property
    def by_key(self) -> dict[str, OpTime]:
        """The times by key."""
        return {t.key: t for t in self.times}


@dataclass(frozen=True, slots=True)
class OpFit:
    """A line, its largest relative ``error`` at the ``points`` (share, seconds) that it was fitted to."""

    time: OpTime
    error: float = 0.0
    points: tuple[tuple[float, float], ...] = ()


OpFits = tuple[tuple[tuple[int, ...], tuple[OpFit, ...]], ...]
"""For each kind of device, its ranks and its lines."""


def check_op_times(ops: Iterable[OpTimes], world: int) -> None:
    """Raise ClusterError for a rank that there is not or that stands twice, and for a key that stands twice."""
    seen: set[int] = set()
    for kind in ops:
        for rank in kind.ranks:
            if not 0 <= rank < world:
                raise ClusterError(f"measured ops of rank {rank}; the cluster has {world} devices")
            if rank in seen:
                raise ClusterError(f"measured ops of rank {rank} stand twice; remove one list")
            seen.add(rank)
        if len(kind.by_key) != len(kind.times):
            keys = [t.key for t in kind.times]
            twice = next(k for i, k in enumerate(keys) if k in keys[:i])
            raise ClusterError(f"measured op {twice} stands twice for ranks {list(kind.ranks)}; remove one")


def at_ranks(ops: Sequence[OpTimes], ranks: Sequence[int]) -> tuple[OpTimes, ...]:
    """The op times of some ranks, which are numbered in the given order."""
    place = {rank: new for new, rank in enumerate(ranks)}
    op_times = [OpTimes(tuple(sorted(place[r] for r in k.ranks if r in place)), k.times) for k in ops]
    return tuple(k for k in op_times if k.ranks)


def op_entries(ops: OpFits) -> list[dict[str, Any]]:
    """The part ``ops`` as :func:`read_ops` reads it."""
    return [
        {
            "ranks": list(ranks),
            "times": [
                [f.time.key, f.time.constant, f.time.slope, f.error, *(x for p in f.points for x in p)]
                for f in fits
            ],
        }
        for ranks, fits in ops
    ]


def read_ops(node: Node, world: int) -> OpFits:
    """The part ``ops`` of a cluster of ``world`` devices. Raises ClusterError that names the place."""
    op_fits = []
    for kind in node.elements("ops"):
        entry = kind.entries("ops of a kind of device", ("ranks", "times"), ("ranks", "times"))
        ranks = tuple(r.whole("a rank", 0) for r in entry["ranks"].elements("ranks"))
        op_fits.append((ranks, tuple(map(_read_line, entry["times"].elements("times")))))
    try:
        check_op_times((OpTimes(ranks, tuple(f.time for f in fits)) for ranks, fits in op_fits), world)
    except ClusterError as error:
        node.fail(str(error))
    return tuple(op_fits)


def _read_line(node: Node) -> OpFit:
    row = node.elements("an op")
    if len(row) < 4 or len(row) % 2:
        node.fail(
            f"an op has {len(row)} entries; write key, constant, slope, error, then pairs of share and seconds"
        )
    constant, slope, error = (
        cell.number(name) for cell, name in zip(row[1:4], ("constant", "slope", "error"), strict=True)
    )
    numbers = [cell.number("a point", positive=True) for cell in row[4:]]
    try:
        time = OpTime(row[0].text("key"), constant, slope)
    except ClusterError as problem:
        node.fail(str(problem))
    return OpFit(time, error, tuple(zip(numbers[::2], numbers[1::2], strict=True)))
