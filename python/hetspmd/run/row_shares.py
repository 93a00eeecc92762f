"""Which rows of a batch each rank loads: those that its part of a plan needs (:mod:`hetspmd.lower.input_rows`).

Every rank knows the rows of all ranks, so that all of them decide alike what is there and what has to be gathered.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch

from hetspmd.lower import active_ranks
from hetspmd.lower.input_rows import Intervals, input_rows, merged
from hetspmd.plan.plan import Plan
from hetspmd.program.lengths import apportion


@dataclass(frozen=True)
class Share:
    """Rows of a batch of ``size`` samples by rank. ``touched``: of each rank, whether its ops read rows beside its
    own."""

    size: int
    rows: tuple[Intervals, ...]
    touched: tuple[bool, ...]

    def count(self, rank: int) -> int:
        """How many rows a rank has."""
        return sum(stop - start for start, stop in self.rows[rank])

    def indices(self, rank: int) -> Iterator[int]:
        """The rows of a rank, ascending."""
        return (row for start, stop in self.rows[rank] for row in range(start, stop))

    def covers(self, other: Share) -> bool:
        """Whether every rank has all rows that it has in another share."""
        return self.size == other.size and all(
            all(any(a <= start and stop <= b for a, b in mine) for start, stop in theirs)
            for mine, theirs in zip(self.rows, other.rows, strict=True)
        )

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


def share_of(plan: Plan, size: int) -> Share:
    """What each rank needs by a plan whose batches have ``size`` rows. Of inputs that have as many rows by chance
    (positions, say) the rows count, too. A row that no rank needs is the first active rank's."""
    world, active = plan.cluster.ranks, active_ranks(plan)
    inputs = [k for k, i in enumerate(plan.graph.inputs) if plan.graph.tensors[i.tensor].shape[:1] == (size,)]
    rows: list[Intervals] = [()] * world
    touched = [False] * world
    for rank in active:
        needed = input_rows(plan, rank)
        touched[rank] = needed.touched
        rows[rank] = merged(interval for k in inputs for interval in needed.rows[k])
        if touched[rank] and not rows[rank]:
            rows[rank] = ((0, 1),)  # ops that read what they need not find a valid row
    if len(active) == 1:  # where the model itself may run
        rows[active[0]] = merged([(0, size)])
    covered = merged(interval for own in rows for interval in own)
    rows[active[0]] = merged((*rows[active[0]], *_without(merged([(0, size)]), covered)))
    return Share(size, tuple(rows), tuple(touched))


def even_share(plan: Plan, size: int) -> Share:
    """Rows for a batch for which there is no plan yet: as many for each active rank."""
    active = active_ranks(plan)
    bounds = accumulate(apportion(size, (1.0,) * len(active)), initial=0)
    parts = dict(zip(active, pairwise(bounds), strict=True))
    world = plan.cluster.ranks
    rows = tuple(merged([parts[rank]]) if rank in parts else () for rank in range(world))
    return Share(size, rows, (False,) * world)


def placed(rows: torch.Tensor, share: Share, rank: int, whole: torch.Tensor, *, filled: bool) -> None:
    """Write a rank's rows to their places in the whole tensor. ``filled``: the other rows get a valid one."""
    if filled:
        whole.copy_(rows[:1].expand_as(whole) if len(rows) else torch.zeros_like(whole))
    offset = 0
    for start, stop in share.rows[rank]:
        whole[start:stop] = rows[offset : offset + stop - start]
        offset += stop - start


def own_first(rows: torch.Tensor, share: Share, rank: int) -> tuple[torch.Tensor, list[int], torch.Tensor]:
    """What a rank sends so that all ranks get the whole: its rows that no lower rank has, how many each rank sends,
    and the place of each row in what all send."""
    owners = share.owners()
    places = {row: place for place, row in enumerate(share.indices(rank))}
    mine = [places[row] for start, stop in owners[rank] for row in range(start, stop)]
    order = [row for intervals in owners for start, stop in intervals for row in range(start, stop)]
    back = torch.empty(share.size, dtype=torch.int64)
    back[torch.tensor(order, dtype=torch.int64)] = torch.arange(len(order))
    extents = [sum(stop - start for start, stop in intervals) for intervals in owners]
    return rows[torch.tensor(mine, dtype=torch.int64, device=rows.device)], extents, back.to(rows.device)


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
