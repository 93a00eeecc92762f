"""Which points are measured: every model on every cluster over every kind of link, all arms of a point in one run.

The link ``balanced`` is the one over which proportional DDP communicates as long as it computes. Over a link of
rate r the bench measures C, the seconds of a step without any communication (of the slowest rank, each on its share
of the batch), and M, those of the all-reduces of all gradients in DDP's buckets, nothing else running. M goes with
the inverse of the rate while messages are large, so

    r' = r M / C

rounded to a rate of :data:`GRID`, from 1 Gbit/s on until the rate stays, at most :data:`TRIES` times. The table
gives M / C as it was measured over the link of the point.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from statistics import stdev

from emulated.spec import ClusterSpec
from hetspmd.codec.quantities import parse_quantity

FASTEST_LINK = "1Gbit/s"
CLUSTERS: Mapping[str, ClusterSpec] = {
    "4:2:1:1": ClusterSpec.of((4, 2, 1, 1), cores=1.2, rate=FASTEST_LINK),
    "2:1": ClusterSpec.of((2, 1), cores=0.9, rate=FASTEST_LINK),
    "8:1:1:1": ClusterSpec.of((8, 1, 1, 1), cores=0.9, rate=FASTEST_LINK),
    "equal": ClusterSpec.of((1, 1, 1, 1), cores=1.2, rate=FASTEST_LINK),
}
"""The quotas leave time for the threads that carry messages, which have none."""

BALANCED = "balanced"
LINKS = (FASTEST_LINK, "200Mbit/s", BALANCED)

GRID = (10, 12.5, 16, 20, 25, 31.5, 40, 50, 63, 80)
"""Ten rates to a decade."""

TRIES = 3
SLOWEST, QUICKEST = parse_quantity("10Mbit/s", "bytes/s"), parse_quantity("4Gbit/s", "bytes/s")
"""Bytes/s between which a balanced link is looked for; a token bucket holds no higher rate on a busy core."""

ALONE, DDP_EVEN, DDP, FSDP_EVEN, FSDP = (
    "the fastest alone", "DDP even", "DDP proportional", "FSDP2 even", "FSDP2 proportional",
)  # fmt: skip
FORCED, COMPILED = "hetspmd, data parallel", "hetspmd"
INCUMBENTS = (ALONE, DDP_EVEN, DDP, FSDP_EVEN, FSDP)
ARMS = (*INCUMBENTS, FORCED, COMPILED)

TURN = 4.0
"""Seconds that the timed steps of a turn should last."""

SLOW = 8.0
"""Seconds of a step above which an arm has one turn of one timed step."""

CARRYING = 15.0
"""Seconds of a step above which it does little but communicate: one step before the timed one is enough."""

FAR = 2.0
"""Times the seconds of the fastest arm's step above which an arm has one turn: it is no one's best."""

PAIRED = 12.0
"""Seconds of a step of proportional DDP or of hetspmd's data parallel up to which the two have all turns: they are
compared with each other to five per cent, about what one step of each differs from the next."""

CLOSE, MORE = 1.15, 9
"""Times the seconds of one up to which hetspmd and the best incumbent are close, either way, and the further turns
that the two have then: turns differ by several per cent, and medians of three turns of the same computation by
nine now and then."""

CLOSER, MOST, LONGEST = 1.05, 24, 300.0
"""Times the seconds up to which the two may be closer than twelve turns can tell, the further turns that they have
then, and the seconds that all these turns may last."""

KNOWN = 0.0075
"""The standard error of their ratio at which they have no further turns: a quarter of the three per cent."""


def steps_of(seconds: float, most: int) -> int:
    """How many steps of a turn are timed, of an arm whose step takes ``seconds``."""
    return max(1, min(most, int(TURN / seconds))) if seconds <= SLOW else 1


def again(seconds: Mapping[str, float]) -> frozenset[str]:
    """The arms that have further turns, of those whose steps took so many ``seconds`` in the first."""
    most = FAR * min(seconds.values())
    pair = frozenset(name for name in (DDP, FORCED) if name in seconds)
    found = frozenset(name for name, taken in seconds.items() if taken <= min(most, SLOW))
    return found | pair if any(seconds[name] <= PAIRED for name in pair) else found


def close(seconds: Mapping[str, float], within: float = CLOSE) -> frozenset[str]:
    """hetspmd and the best of the others, of steps that took so many ``seconds``, if neither takes more than
    ``within`` times as long as the other; otherwise none, and none without hetspmd."""
    if COMPILED not in seconds:
        return frozenset()
    best = min((name for name in seconds if name not in (FORCED, COMPILED)), key=lambda name: seconds[name])
    ratio = seconds[COMPILED] / seconds[best]
    return frozenset((best, COMPILED)) if 1 / within <= ratio <= within else frozenset()


def known(one: Sequence[float], other: Sequence[float]) -> bool:
    """Whether the ratio of two arms is known, of which these are the seconds in the same turns (two at least)."""
    logs = [math.log(a / b) for a, b in zip(one, other, strict=True)]
    return stdev(logs) / math.sqrt(len(logs)) <= KNOWN


def on_grid(rate: float) -> float:
    """The rate of the grid (bytes/s) with the least ratio to ``rate``, within the bounds."""
    rate = min(max(rate, SLOWEST), QUICKEST)
    decade = 10.0 ** math.floor(math.log10(rate * 8))
    rates = [decade * step / 10 / 8 for step in (*GRID, 100)]
    return min(rates, key=lambda r: (abs(math.log(r / rate)), r))


def balanced(measure: Callable[[float], tuple[float, float]], start: float) -> float:
    """The balanced rate in bytes/s. ``measure`` gives seconds (computing, communicating) over links of a rate."""
    rate = on_grid(start)
    for _ in range(TRIES):
        computing, communicating = measure(rate)
        after = on_grid(rate * communicating / computing)
        if after == rate:
            break
        rate = after
    return rate


def wanted(cluster: str, model: str, link: str, only: Sequence[str] | None, models: Sequence[str]) -> bool:
    """Whether the names leave a point: of each kind, one of those named, if any is."""
    for name, kind in ((cluster, CLUSTERS), (model, models), (link, LINKS)):
        named = [n for n in only or () if n in kind]
        if named and name not in named:
            return False
    return True
