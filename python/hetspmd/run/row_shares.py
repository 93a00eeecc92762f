"""Which rows of a batch each rank loads: those that its part of a plan needs (:mod:`hetspmd.lower.input_rows`).

Every rank knows the rows of all ranks, so that all of them decide alike what is there and what has to be gathered.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Final

import torch

from hetspmd.lower import active_ranks
from hetspmd.lower.input_rows import Intervals, input_rows, merged
from hetspmd.plan.plan import Plan
from hetspmd.program.lengths import apportion

GATHERED: Final = 1 << 20
"""Bytes of an input up to which rows that a rank does not load are gathered in every step: about a millisecond at
10 Gbit/s. Of larger ones (images) the rank loads all rows that it needs. Labels are often needed whole, to be
counted, by ranks that need few rows of what they are the labels of."""


@dataclass(frozen=True)
class Share:
    """Rows of a batch of ``size`` samples by rank."""

    size: int
    rows: tuple[Intervals, ...]

    def count(self, rank: int) -> int:
        """How many rows a rank has."""
        return _count(self.rows[rank])

    def indices(self, rank: int) -> Iterator[int]:
        """The rows of a rank, ascending."""
        return (row for start, stop in self.rows[rank] for row in range(start, stop))

    def covers(self, needed: Sequence[Intervals]) -> bool:
        """Whether every rank has the rows that it needs."""
        return not any(_without(needs, rows) for needs, rows in zip(needed, self.rows, strict=True))

    def owners(self) -> list[Intervals]:
        """Each row once: the rows of each rank that no lower rank has."""
        taken: Intervals = ()
        found: list[Intervals] = []
        for rows in self.rows:
            found.append(_without(rows, taken))
            taken = merged((*taken, *rows))
        return found

    def shared(self) -> list[tuple[int, list[int]]]:
        """The rows that several ranks have, with these ranks."""
        holders: dict[int, list[int]] = {}
        for rank in range(len(self.rows)):
            for row in self.indices(rank):
                holders.setdefault(row, []).append(rank)
        return [(row, ranks) for row, ranks in sorted(holders.items()) if len(ranks) > 1]


@dataclass(frozen=True)
class Needs:
    """Of a plan whose batches have ``size`` rows: ``rows[input][rank]`` are those that a rank needs of each input
    (by its place among all) that has as many, ``nbytes[input]`` its bytes. ``touched``: of each rank, whether its
    ops read rows that it does not need."""

    size: int
    rows: dict[int, tuple[Intervals, ...]]
    nbytes: dict[int, int]
    touched: tuple[bool, ...]

    def share(self, active: Sequence[int]) -> Share:
        """What each rank loads: the rows of the input of which the ranks need the least, and of those that are too
        large to be gathered in every step. A row that no rank needs is the first active rank's."""
        world = len(self.touched)
        totals = {k: sum(map(_count, rows)) for k, rows in self.rows.items()}
        least = min((total for total in totals.values() if total), default=0)
        loaded = [k for k, total in totals.items() if total == least or self.nbytes[k] > GATHERED]
        rows = [merged(i for k in loaded for i in self.rows[k][rank]) for rank in range(world)]
        for rank in active:
            if self.touched[rank] and not rows[rank]:
                rows[rank] = ((0, 1),)  # ops that read what they need not find a valid row
        missing = _without(merged([(0, self.size)]), merged(i for own in rows for i in own))
        rows[active[0]] = merged((*rows[active[0]], *missing))
        return Share(self.size, tuple(rows))

    def covered(self, place: int, share: Share) -> bool:
        """Whether all ranks have what they need of an input."""
        return place not in self.rows or share.covers(self.rows[place])


def needs_of(plan: Plan, size: int) -> Needs:
    """What each rank needs by a plan whose batches have ``size`` rows. An input that has as many rows by chance
    (positions, say) counts as one of rows."""
    graph, active, world = plan.graph, active_ranks(plan), plan.cluster.ranks
    tensors = {k: graph.tensors[i.tensor] for k, i in enumerate(graph.inputs)}
    places = [k for k, tensor in tensors.items() if tensor.shape[:1] == (size,)]
    needed = [input_rows(plan, rank) for rank in range(world)]
    rows = {k: tuple(of.rows[k] for of in needed) for k in places}
    if len(active) == 1:  # where the model itself may run
        whole = tuple(merged([(0, size)]) if rank in active else () for rank in range(world))
        rows = dict.fromkeys(places, whole)
    nbytes = {k: tensors[k].nbytes for k in places}
    return Needs(size, rows, nbytes, tuple(of.touched for of in needed))


def even_share(plan: Plan, size: int) -> Share:
    """Rows for a batch for which there is no plan yet: as many for each active rank."""
    active = active_ranks(plan)
    bounds = accumulate(apportion(size, (1.0,) * len(active)), initial=0)
    parts = dict(zip(active, pairwise(bounds), strict=True))
    world = plan.cluster.ranks
    rows = tuple(merged([parts[rank]]) if rank in parts else () for rank in range(world))
    return Share(size, rows)


def placed(rows: torch.Tensor, share: Share, rank: int, whole: torch.Tensor, *, filled: bool) -> None:
    """Write a rank's rows to their places in the whole tensor. ``filled``: the other rows get a valid one."""
    if filled:
        whole.copy_(rows[:1].expand_as(whole) if len(rows) else torch.zeros_like(whole))
    offset = 0
    for start, stop in share.rows[rank]:
        whole[start:stop] = rows[offset : offset + stop - start]
        offset += stop - start


def own_first(rows: torch.Tensor, share: Share, rank: int) -> tuple[torch.Tensor, list[int], torch.Tensor]:
    """What a rank sends so that all ranks get the whole: its rows that no lower rank has, how many each rank
    sends, and the place of each row in what all send."""
    owners = share.owners()
    places = {row: place for place, row in enumerate(share.indices(rank))}
    mine = [places[row] for start, stop in owners[rank] for row in range(start, stop)]
    order = [row for intervals in owners for start, stop in intervals for row in range(start, stop)]
    back = torch.empty(share.size, dtype=torch.int64)
    back[torch.tensor(order, dtype=torch.int64)] = torch.arange(len(order))
    extents = [_count(intervals) for intervals in owners]
    return rows[torch.tensor(mine, dtype=torch.int64, device=rows.device)], extents, back.to(rows.device)


def _count(rows: Intervals) -> int:
    return sum(stop - start for start, stop in rows)


def _without(rows: Intervals, taken: Intervals) -> Intervals:
    """The rows that are not among those taken."""
    left: list[tuple[int, int]] = []
    for start, stop in rows:
        for a, b in taken:
            if start < min(a, stop):
                left.append((start, min(a, stop)))
            start = max(start, b)
        if start < stop:
            left.append((start, stop))
    return merged(left)
