"""What an emulated cluster is: the devices, each with a CPU share and a link."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hetspmd.codec.quantities import parse_quantity, quantity_text

MOST_RANKS = 200


class EmulationError(RuntimeError):
    """The emulated cluster cannot be made, or one of its workers failed."""


@dataclass(frozen=True, slots=True)
class Rank:
    """One device: ``share`` of CPU cores; ``rate`` of its link in bytes/s in each direction; ``latency`` of its
    link in seconds."""

    share: float
    rate: float
    latency: float = 0.0


@dataclass(frozen=True)
class ClusterSpec:
    """The devices in rank order. Raises EmulationError for quantities that cannot be emulated.

    ``one_quota``: a rank's CPU share pays for all of its threads, those that carry messages too.
    """

    ranks: tuple[Rank, ...]
    one_quota: bool = False

    def __post_init__(self) -> None:
        if not 1 <= len(self.ranks) <= MOST_RANKS:
            raise EmulationError(f"{len(self.ranks)} ranks; an emulated cluster has 1 to {MOST_RANKS}")
        for index, rank in enumerate(self.ranks):
            if not 0.02 <= rank.share <= 64:
                raise EmulationError(f"rank {index} has {rank.share:g} cores; give it 0.02 or more")
            if not rank.rate >= 1e4 or not rank.latency >= 0:
                raise EmulationError(
                    f"rank {index} has a link of {rank.rate:g} bytes/s and {rank.latency:g} s; "
                    "give it at least 10 kB/s and no negative latency"
                )

    @classmethod
    def of(
        cls, speeds: Sequence[float], *, cores: float, rate: str | float, latency: str | float = 0.0,
        one_quota: bool = False,
    ) -> ClusterSpec:  # fmt: skip
        """``cores`` divided in proportion to ``speeds``, equal links (``"200Mbit/s"``, ``"1ms"``)."""
        total = sum(speeds)
        wait = parse_quantity(latency, "seconds") if latency else 0.0
        per_second = parse_quantity(rate, "bytes/s")
        return cls(tuple(Rank(cores * s / total, per_second, wait) for s in speeds), one_quota)

    @property
    def cores(self) -> float:
        """The sum of the shares."""
        return sum(r.share for r in self.ranks)

    @property
    def fastest(self) -> int:
        """The rank with the largest share, the lowest among equals."""
        return max(range(len(self.ranks)), key=lambda r: (self.ranks[r].share, -r))

    @property
    def slowest(self) -> float:
        """Bytes/s of the slowest link: a packet must fit the burst of every link on its way."""
        return min(r.rate for r in self.ranks)

    def __str__(self) -> str:
        links = sorted({(r.rate, r.latency) for r in self.ranks})
        shares = " : ".join(f"{r.share:.3g}" for r in self.ranks)
        network = ", ".join(f"{rate * 8 / 1e6:g} Mbit/s" + _text_of(latency) for rate, latency in links)
        return f"{shares} cores, links of {network}"


def _text_of(latency: float) -> str:
    return f" and {quantity_text(latency, 'seconds')}" if latency else ""
