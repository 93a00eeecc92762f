"""What computing and a collective on its way take from each other, in the simulation of a step.

A device that computes while a collective is on its way computes more slowly (a CPU's threads carry messages, NCCL
holds multiprocessors of a GPU), and the collective takes longer. A cluster says by how many times, per device and
kind of collective (:meth:`hetspmd.cluster.devices.Device.slowdowns`).

A computation that needs w seconds alone has done (e - b) / s of them between b and e, where a collective that slows
computing down by s is on its way. A collective takes

    seconds (1 + max_j (k_j - 1) o_j)

where k_j is its slowdown while device j computes, and o_j the part of its time in which device j does: a ring waits
for the slowest of its ranks. The parts are those of the pass of the simulation before (:data:`PASSES`), the first
with k = 1. A longer collective has less of its time beside computing, so that passes overshoot in turns; from the
third on a pass takes the mean of what it finds and of the pass before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np
import numpy.typing as npt

from hetspmd.cluster.devices import Device
from hetspmd.cost.model import Array

PASSES: Final = 3
"""The most passes of the simulation: the parts of collectives' time in which devices compute change little after
that."""

SETTLED: Final = 0.02
"""A pass that would change no collective's seconds by more than this part of them alone is left out."""


@dataclass(frozen=True)
class Contention:
    """While collective c is on its way, device j computes ``computing[c, j]`` times as long, and while the device
    computes, the collective takes ``carrying[c, j]`` times as long."""

    computing: Array
    carrying: Array

    @classmethod
    def of(cls, devices: Sequence[Device], kinds: Sequence[str | None]) -> Contention | None:
        """That of collectives of these kinds (None: one that has no slowdown); None if nothing slows anything."""
        if not any(d.computing_slowdown or d.collective_slowdown for d in devices):
            return None
        none = np.ones((len(devices), 2))
        by_kind = {
            kind: np.array([d.slowdowns(kind) for d in devices]) for kind in set(kinds) if kind is not None
        }
        both = np.array([none if kind is None else by_kind[kind] for kind in kinds]).reshape(
            -1, len(devices), 2
        )
        return cls(both[:, :, 0], both[:, :, 1]) if (both != 1.0).any() else None

    @cached_property
    def carries_alike(self) -> bool:
        """Whether no collective takes longer beside computing."""
        return bool((self.carrying == 1.0).all())


class Beside:
    """What one pass of a simulation computes beside collectives.

    ``sums``: seconds of each group of computations on each device alone. ``longer``: by collective, how many times
    as long it takes as alone in this pass. ``number``: of the pass, from 0.
    """

    def __init__(
        self, contention: Contention, sums: Array, longer: Array | None = None, number: int = 0
    ) -> None:
        count, world = contention.computing.shape
        self.contention = contention
        self.sums = sums
        self.longer: Array = np.ones(count) if longer is None else longer
        self.number = number
        self._spans: list[tuple[float, float, int]] = []
        self._slower: list[list[float]] = contention.computing.T.tolist()
        self._beside = [[0.0] * count for _ in range(world)]  # seconds in which a device computes beside each
        self._at = [0] * world  # of each device the first span that has not ended
        self._spent: dict[int, Array] = {}  # by group of computations, seconds of each device for it

    def then(self, starts: Sequence[float], ends: Sequence[float]) -> Beside | None:
        """For the pass after this one, in which collectives had these starts and ends; None if there is none."""
        if self.number + 1 == PASSES or self.contention.carries_alike:
            return None
        spans = np.array(ends) - np.array(starts)
        beside = np.array(self._beside).T
        parts = np.divide(beside, spans[:, None], out=np.zeros_like(beside), where=spans[:, None] > 0)
        longer: Array = 1.0 + ((self.contention.carrying - 1.0) * parts).max(axis=1)
        if self.number:
            longer = (longer + self.longer) / 2
        if np.abs(longer - self.longer).max(initial=0.0) < SETTLED:
            return None
        return Beside(self.contention, self.sums, longer, self.number + 1)

    def begun(self, collective: int, start: float, end: float) -> None:
        """A collective is on its way from start to end: the next one, for one begins where the last has ended."""
        if end > start:
            self._spans.append((start, end, collective))

    def computed(self, clock: Array, group: int) -> Array:
        """The clocks behind a group of computations."""
        seconds = self.sums[group]
        if not self._spans or self._spans[-1][1] <= clock.min():
            clocks: Array = clock + seconds
            return clocks
        pairs = zip(clock.tolist(), seconds.tolist(), strict=True)
        clocks = np.array([self._behind(j, now, rest) for j, (now, rest) in enumerate(pairs)])
        self._spent[group] = clocks - clock
        return clocks

    def _behind(self, device: int, now: float, rest: float) -> float:
        """When a device has done ``rest`` seconds of work from ``now`` on."""
        spans, at = self._spans, self._at[device]
        slower, beside = self._slower[device], self._beside[device]
        while at < len(spans):
            start, end, collective = spans[at]
            if end > now:
                if now + rest <= start:
                    break
                if now < start:
                    now, rest = start, rest - (start - now)
                factor = slower[collective]
                if now + rest * factor <= end:
                    beside[collective] += rest * factor
                    now, rest = now + rest * factor, 0.0
                    break
                beside[collective] += end - now
                now, rest = end, rest - (end - now) / factor
            at += 1
        self._at[device] = at
        return now + rest

    def stretched(self, seconds: Array, groups: npt.NDArray[np.int64]) -> Array:
        """Seconds of each computation on each device as it was, of those that it takes alone; ``groups``: where
        each group begins."""
        factors: Array = np.ones_like(self.sums)
        for group, spent in self._spent.items():
            alone = self.sums[group]
            np.divide(spent, alone, out=factors[group], where=alone > 0)
        sizes = np.diff([*groups.tolist(), len(seconds)])
        stretched: Array = seconds * np.repeat(factors, sizes, axis=0)
        return stretched
