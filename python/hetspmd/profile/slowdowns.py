"""What computing and a collective on its way take from each other, on each rank.

Of each kind of collectives one is measured that takes about ``beside_seconds`` between all ranks with even shards.
Three times are taken of it, in turns: alone; beside computing, in which every rank repeats a piece of work (a
product and an addition over cold memory) until its collective has completed; and of the pieces without a
collective, in between. A rank's computing slowdown is the seconds of a piece beside the collective over those
without one. The collective's slowdown, which is the same for all ranks, is the slowest rank's seconds beside
computing over those alone. Medians. What lies within ``slowdown_noise`` of 1 counts as 1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import le
from statistics import median
from time import perf_counter

import torch

from hetspmd.cluster.collective_kinds import Kind
from hetspmd.cluster.curves import COLLECTIVES
from hetspmd.dist.pending import PendingTensor
from hetspmd.dist.random import Randomness
from hetspmd.dist.runtime import Runtime
from hetspmd.profile.collective_trials import ITEM_BYTES, Trial, start, trials
from hetspmd.profile.profile_thresholds import THRESHOLDS
from hetspmd.profile.session import Session

_BYTES, _MOST_BYTES = THRESHOLDS.level_bytes[0], THRESHOLDS.beside_bytes


@dataclass(frozen=True)
class Slowdowns:
    """Of a device, by kind of collectives: how many times as long it computes while one is on its way, and how many
    times as long the collective takes while it computes. A kind that is not there slows nothing, and nothing slows
    it."""

    computing: dict[str, float] = field(default_factory=dict)
    collective: dict[str, float] = field(default_factory=dict)


def measure_slowdowns(session: Session, tick: Callable[[str], None] = lambda what: None) -> list[Slowdowns]:
    """By rank, what computing and collectives take from each other; nothing on GPUs, where it is not measured.

    Every rank calls this and gets the same. Raises ProfileError on every rank if a rank fails.
    """
    if session.device.type == "cuda" or session.world == 1:
        return [Slowdowns()] * session.world
    with session.guard("computing beside collectives"):
        bench = _Bench(session)
        computing, collective = dict[str, list[float]](), dict[str, float]()
        for kind in COLLECTIVES:
            tick(f"{kind} beside computing")
            computing[kind], collective[kind] = bench.slowdowns(kind)
        return [
            Slowdowns(
                {kind: factors[rank] for kind, factors in computing.items() if _slows(factors[rank])},
                {kind: factor for kind, factor in collective.items() if _slows(factor)},
            )
            for rank in range(session.world)
        ]


def _slows(factor: float) -> bool:
    return factor > 1 + THRESHOLDS.slowdown_noise


class _Bench:
    def __init__(self, session: Session) -> None:
        self.session = session
        self._runtime = Runtime(session.communicator, Randomness(0, session.rank, session.device))
        self._one = torch.ones(1)
        self._operand = torch.ones(_MOST_BYTES // ITEM_BYTES)
        self._cold = torch.ones(THRESHOLDS.beside_cold_bytes // ITEM_BYTES)
        side = THRESHOLDS.beside_product
        self._left, self._right = torch.ones(side, side), torch.ones(side, side)
        self._product = torch.empty(side, side)

    def slowdowns(self, kind: Kind) -> tuple[list[float], float]:
        """By rank, how many times as long it computes beside such a collective, and how many times as long that
        takes. Alike on all ranks."""
        trial = self._trial(kind)
        self._beside(trial)
        own: list[float] = []
        carried: list[float] = []
        for _ in range(THRESHOLDS.beside_rounds):
            alone = self._slowest(self._alone(trial))
            free = self._pieces(partial(le, alone))
            busy, seconds = self._beside(trial)
            own.append(busy / free)
            carried.append(self._slowest(seconds) / alone)
        return self.session.communicator.exchange(median(own)), median(carried)

    def _trial(self, kind: Kind) -> Trial:
        """An even one that takes about ``beside_seconds``, or of the most bytes."""
        order, nbytes = range(self.session.world), _BYTES
        while True:
            (trial,) = (t for t in trials(nbytes, order) if t.kind == kind and t.skew == "even")
            seconds = min(self._slowest(self._alone(trial)) for _ in range(2))
            if seconds >= THRESHOLDS.beside_seconds or nbytes >= _MOST_BYTES:
                return trial
            grown = nbytes * min(max(THRESHOLDS.beside_seconds / max(seconds, 1e-9), 2.0), 8.0)
            nbytes = min(int(grown), _MOST_BYTES)

    def _slowest(self, seconds: float) -> float:
        slowest: float = max(self.session.communicator.exchange(seconds))
        return slowest

    def _start(self, trial: Trial) -> PendingTensor:
        shape = trial.shape(self.session.rank)
        self.session.communicator.all_reduce(self._one).wait()
        return start(self._runtime, trial, self._operand[: torch.Size(shape).numel()].view(shape))

    def _alone(self, trial: Trial) -> float:
        """Seconds of the collective with nothing beside it."""
        pending, begin = self._start(trial), perf_counter()
        pending.wait()
        return perf_counter() - begin

    def _beside(self, trial: Trial) -> tuple[float, float]:
        """Seconds of a piece of work beside the collective, and the collective's."""
        pending, begin = self._start(trial), perf_counter()
        piece = self._pieces(lambda seconds: pending.settle())
        seconds = perf_counter() - begin - piece / 2  # it completed during the last piece
        pending.wait()
        return piece, seconds

    def _pieces(self, enough: Callable[[float], bool]) -> float:
        """Seconds of a piece of work, in the mean over those that are done until ``enough`` of the seconds."""
        count, begin = 0, perf_counter()
        while True:
            torch.mm(self._left, self._right, out=self._product)
            self._cold.add_(1.0)
            count += 1
            seconds = perf_counter() - begin
            if enough(seconds):
                return seconds / count


def median_of(own: Sequence[Slowdowns]) -> Slowdowns:
    """The medians over devices of a kind."""

    def of(what: Callable[[Slowdowns], dict[str, float]]) -> dict[str, float]:
        factors = {kind: median(what(one).get(kind, 1.0) for one in own) for kind in COLLECTIVES}
        return {kind: float(f"{factor:.3g}") for kind, factor in factors.items() if _slows(factor)}

    return Slowdowns(of(lambda one: one.computing), of(lambda one: one.collective))
