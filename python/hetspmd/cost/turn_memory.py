"""When values are held in the turns of a step in micro-batches, as it is executed.

Turns hold different things. The first one makes the sums, and what is before the loop arrives in it. The last
one gives each sum to what comes after the loop as soon as it has added to it. A turn between them holds all sums
and all that is before the loop from its beginning to its end. A device that has one turn does what is before and
after the loop in it, and holds each value from where it is made to where it is read.

So a step is counted as one of each: moments of the first turn, with all that runs before the loop; of a turn
between, where there is one; and of the last one, with all that runs after the loop.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Final

import numpy as np

from hetspmd.cost.liveness import Liveness, Transit
from hetspmd.cost.loop_memory import HeldValue, Turn, made_before
from hetspmd.cost.model import Index
from hetspmd.placement import PARTIAL
from hetspmd.program.level_layout import LevelKey
from hetspmd.program.levels import carried
from hetspmd.program.micro_batches import MicroBatches

EACH, GIVEN, SUM, ARRIVING, AFTER = range(5)
"""What a value is to the loop: held alike in each turn; made before the loop and read in it; summed over it; on its
way to be read in it, so that it is held in the first turn alone; or made after it."""

ON_THEIR_WAY: Final = 2
"""Sums that come of collectives in the loop: so many are on their way before the first of them is waited for and
added (:mod:`hetspmd.lower.turn_writer`)."""


@dataclass(frozen=True)
class Turns:
    """The turns whose moments are counted, one after the other.

    kinds    of the turns
    loop     the first step of the loop, and the one behind its last
    steps    of the order
    moments  of a device that has one turn: the steps, and what comes behind them
    """

    kinds: tuple[Turn, ...]
    loop: tuple[int, int]
    steps: int
    moments: int

    @cached_property
    def windows(self) -> tuple[tuple[int, int], ...]:
        """The first moment of each turn, and the one behind its last."""
        first, end = self.loop
        of: Mapping[Turn, tuple[int, int]] = {
            "only": (0, self.moments), "first": (0, end), "between": (first, end), "last": (first, self.moments),
        }  # fmt: skip
        return tuple(of[kind] for kind in self.kinds)

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """Where the moments of each turn begin; the last is the number of all."""
        return tuple(accumulate((end - first for first, end in self.windows), initial=0))

    def of_each(self, values: Index) -> Index:
        """What is said of each moment of a device that has one turn, of the moments of all turns."""
        return values if self.kinds == ("only",) else np.concatenate([values[a:b] for a, b in self.windows])

    def held(self, first: Index, end: Index, roles: Index) -> Iterator[tuple[Index, Index]]:
        """By turn the moment from which values are held, and the one before which they are: ``first`` and ``end``
        are those of a device that has one turn, ``roles`` say what they are to the loop."""
        if self.kinds == ("only",):
            yield first, end
            return
        start, stop = self.loop
        lasting = (roles == GIVEN) | (roles == SUM)
        late, early = roles == AFTER, roles == ARRIVING
        for kind, (low, high), at in zip(self.kinds, self.windows, self.starts, strict=False):
            begins, ends = first, end
            if kind in ("between", "last"):
                begins = np.where(lasting, start, begins)
                ends = np.where(early, begins, ends)
            if kind in ("first", "between"):
                ends = np.where(lasting, stop, np.where(late, begins, ends))
            elif kind == "last":
                ends = np.where(roles == GIVEN, np.maximum(ends, self.steps), ends)
            yield begins.clip(low, high) - low + at, ends.clip(low, high) - low + at

    def apart(self, counts: Sequence[int]) -> Index | None:
        """Moments of turns that a device does not have which runs the loop so often, shape (moments, devices); None
        where each has all of them, or where turns are not told apart (in the order of the search)."""
        if self.kinds == ("only",):
            return None
        mine = [set(kinds_of((count,))) for count in counts]
        if all(len(kinds) == len(self.kinds) for kinds in mine):
            return None
        sizes = [end - first for first, end in self.windows]
        other = np.array([[kind not in kinds for kinds in mine] for kind in self.kinds])
        return np.repeat(other, sizes, axis=0)


def kinds_of(counts: Sequence[int]) -> tuple[Turn, ...]:
    """The turns of devices that run the loop so often."""
    kinds: dict[Turn, bool] = {
        "only": any(count < 2 for count in counts),
        "first": any(count >= 2 for count in counts),
        "between": any(count > 2 for count in counts),
        "last": any(count >= 2 for count in counts),
    }
    return tuple(kind for kind, there in kinds.items() if there)


class InTurns:
    """What the values of ``live`` are to the loop; ``loop``: its first step and the one behind its last.

    ``looped``: the values that the loop makes. ``own``: the values that have a storage of their own. ``leaving``:
    the values of the loop that are summed over it; by default those of its sums that no collective in it reduces.
    """

    def __init__(
        self,
        batches: MicroBatches,
        live: Liveness,
        own: Sequence[int],
        loop: tuple[int, int],
        looped: Container[LevelKey],
        leaving: Container[LevelKey] | None = None,
    ) -> None:
        self.live, self.loop, self.looped, self._leaving = live, loop, looped, leaving
        self._before = made_before(live.theory, batches.loop)
        self._joined, self._summed = batches.joined, batches.summed
        self._roles = {value: self._role(value) for value in own}
        self.more = self._more()
        self.roles = [self._roles[value] for value in own]

    def _role(self, value: int) -> int:
        tensor, *_ = key = self.live.sizes[value]
        if key in self.looped:
            return EACH
        if tensor in self._before:
            return GIVEN if self.live.last[value] >= self.loop[0] else EACH
        return AFTER

    def _more(self) -> list[HeldValue]:
        """What is held in each turn beside the values; those that are summed become so here."""
        live, (first, end), more = self.live, self.loop, list[HeldValue]()
        waits = self._waits()
        for value, key in enumerate(live.sizes):
            tensor = key[0]
            if (tensor not in self._joined and tensor not in self._summed) or key not in self.looped:
                continue
            owner = live.storage[value]
            if tensor in self._joined and value not in live.delivered:
                more.append(HeldValue(key, first, max(live.last[owner] + 1, end), joined=True))
            elif tensor in self._summed and self._leaves(key):
                # Beside what is summed the summand of the micro-batch, until it is added.
                added = waits.get(key, live.born[owner])
                more.append(HeldValue(live.sizes[owner], live.born[owner], added + 1))
                self._roles[owner] = SUM
        return more

    @cached_property
    def _reduced(self) -> set[int]:
        return {key[0] for key in map(self.live.sizes.__getitem__, self.live.delivered) if key in self.looped}

    def _leaves(self, key: LevelKey) -> bool:
        """Whether a value of the loop of what is summed over it is what is summed."""
        if self._leaving is not None:
            return key in self._leaving
        return not (key[1] == PARTIAL and key[0] in self._reduced)

    def _waits(self) -> dict[LevelKey, int]:
        """The step at which each sum that comes of a collective in the loop is waited for at the latest."""
        live = self.live
        sums = [
            v
            for v in sorted(live.delivered)
            if live.sizes[v][0] in self._summed and live.sizes[v] in self.looped
            if self._leaving is None or live.sizes[v] in self._leaving
        ]
        ends = [live.born[v] for v in sums[ON_THEIR_WAY:]] + [self.loop[1] - 1] * ON_THEIR_WAY
        return {live.sizes[v]: at for v, at in zip(sums, ends, strict=False)}

    def transits(self, transits: Sequence[Transit]) -> Iterator[tuple[Transit, int]]:
        """Collectives, with the steps at which they are waited for, and what they are to the loop."""
        waits = self._waits()
        for transit in transits:
            ((_, key),) = carried(transit.step)
            if key in self.looped:
                wait = min(transit.wait, waits.get(key, transit.wait))
                yield Transit(transit.start, transit.step, transit.shared, wait), EACH
            else:
                yield transit, ARRIVING if key[0] in self._before else AFTER
