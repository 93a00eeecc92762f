"""By when a collective has completed, whatever its link does: the start of another one waits for it.

The simulation says when collectives have completed, and by that what they hold is counted. A link may be slower
than its profile. So each collective that holds something for itself is due: the first collective that starts behind
the place at which it should have completed, in the same graph, waits for it first
(:func:`hetspmd.lower.calls.start`). One behind which nothing starts is waited for where its result is first read.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

from hetspmd.cost.liveness import Transit
from hetspmd.program.levels import FlatKey

Graph: TypeAlias = tuple[bool, int]
"""Which local graph a collective is in: whether it is the backward's, and what it is to a loop."""


def due(
    transits: Sequence[tuple[Transit, int]], completed: Mapping[int, int], backward: int
) -> dict[int, int]:
    """The step before which each collective has completed for certain, by the step at which it starts.

    ``completed`` are the steps before which it should have. What is not there ends where its result is first read.
    ``backward``: the first step of the backward, where that is a graph of its own.
    """
    starts: dict[Graph, list[int]] = {}
    for transit, role in sorted(transits, key=_start):
        starts.setdefault((transit.start >= backward, role), []).append(transit.start)
    found: dict[int, int] = {}
    for transit, role in transits:
        until = completed.get(transit.start)
        if until is None:
            continue
        others = starts[transit.start >= backward, role]
        place = bisect_left(others, max(until, transit.start + 1))
        if place < len(others) and others[place] < transit.wait:
            found[transit.start] = others[place]
    return found


def awaited(
    transits: Sequence[tuple[Transit, int]], until: Mapping[int, int], holding: Iterable[Transit]
) -> dict[FlatKey, tuple[FlatKey, ...]]:
    """By what a collective makes, what those make that are to have completed before it starts.

    ``holding`` are the collectives that hold something for themselves, ``until`` as :func:`due` says.
    """
    first = {transit.start: _key(transit) for transit, _ in sorted(transits, key=_start, reverse=True)}
    waits: dict[FlatKey, list[FlatKey]] = {}
    for transit in holding:
        if transit.start in until:
            waits.setdefault(first[until[transit.start]], []).append(_key(transit))
    return {key: tuple(before) for key, before in waits.items()}


def _start(transit: tuple[Transit, int]) -> int:
    return transit[0].start


def _key(transit: Transit) -> FlatKey:
    return transit.step.tensor, transit.step.target
