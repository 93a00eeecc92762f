"""Prices of memory at which earlier searches have found programs, from which the next one starts.

Searches for programs that fit the memory (:mod:`hetspmd.search.memory_limits`) are asked for again and again: at
other ratios, with more bytes left free, on fewer devices, in more micro-batches. The prices that they end with are
much alike. So a search looks first near those of the last one that found a program, and where the last one found
none, whether there is hope at all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from hetspmd.search.memory_prices import Place


@dataclass(frozen=True)
class PricedAt:
    """Prices of bytes of a search.

    at            seconds per byte, by instruction and rank in the cluster
    instructions  how many the graph has: in one that has others, prices are of instructions at the same part of it
    tilt          by which part the prices rise from the beginning of the graph to its end
    estimated     whether what collectives hold is estimated
    """

    at: Mapping[Place, float]
    instructions: int
    tilt: float = 0.0
    estimated: bool = False

    def on(self, ranks: Sequence[int], instructions: int) -> dict[Place, float]:
        """The prices on these devices, by their places among them, in a graph of so many instructions."""
        place = {rank: j for j, rank in enumerate(ranks)}
        moved: dict[Place, float] = {}
        for (i, rank), price in self.at.items():
            if rank in place:
                moved[i * instructions // self.instructions, place[rank]] = price
        return moved


@dataclass
class EarlierPrices:
    """What the searches of a compilation tell the next ones.

    bounding   where the bound was highest
    fitting    at which the last program that fits was found, and on which devices
    exceeded   after a search that has found none: the instructions at which the programs that hold least exceeded
               the memory, and how many the graph has
    """

    bounding: PricedAt | None = None
    fitting: PricedAt | None = None
    found_on: tuple[int, ...] | None = None
    exceeded: tuple[tuple[int, ...], int] | None = None

    def become(self, other: EarlierPrices) -> None:
        """Tell the next searches what ``other`` tells them."""
        vars(self).update(vars(other))

    def exceeded_in(self, instructions: int) -> list[int]:
        """The same in a graph of so many instructions."""
        places, end = self.exceeded or ((), 1)
        return sorted({i * instructions // end for i in places})


@dataclass(frozen=True)
class Known:
    """Earlier prices as a search on the devices ``ranks`` sees and leaves them. ``worth``: the fewest seconds of a
    program that fits and is known; 0 where a quick search is not to go on for a better one."""

    prices: EarlierPrices = field(default_factory=EarlierPrices)
    ranks: tuple[int, ...] = ()
    worth: float = 0.0

    def priced(
        self, at: Mapping[Place, float], instructions: int, tilt: float = 0.0, *, estimated: bool = False
    ) -> PricedAt:
        """Prices on these devices, as the next search, on whatever devices, can use them."""
        by_rank = {(i, self.ranks[j]): price for (i, j), price in at.items()}
        return PricedAt(by_rank, instructions, tilt, estimated)
