"""Bytes that a collective holds for itself: of what they depend, and where and when they are held.

Each kind of collective has a function from :class:`Carried` to :class:`Buffers` in its record
(:mod:`hetspmd.cluster.collective_kinds`); :mod:`hetspmd.cost.memory` and :mod:`hetspmd.cost.level_memory` add up
what it says.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple


class Carried(NamedTuple):
    """A collective of one tensor at given shares, as far as its buffers depend on them.

    world    devices that take part (n)
    nbytes   of the whole tensor (E)
    largest  bytes of the largest share (M E)
    several  whether several devices hold a part
    moved    whether slices lie along another dim than the first, so that a start or an end copies them
    bucket   whether the collective shares a bucket with others
    spare    whether it may work in the memory of its operand
    """

    world: int
    nbytes: int
    largest: int
    several: bool = True
    moved: bool = False
    bucket: bool = False
    spare: bool = False


class HeldBytes(NamedTuple):
    """Bytes: ``whole`` on each device; ``sharded`` and ``target`` over all devices, of which one has its share of
    the axis along which the tensor is sharded, and, where both ends of a kind are sharded, of the result's."""

    whole: int = 0
    sharded: int = 0
    target: int = 0


NOTHING: Final = HeldBytes()


class Buffers(NamedTuple):
    """What a collective holds for itself, besides its operand and its result.

    flight   from its start until it has completed
    end      while its result is made of that
    early    whether the result is made when it has completed, rather than when it is waited for
    freed    bytes of a spare operand that are the collective's own from its start on
    """

    flight: HeldBytes = NOTHING
    end: HeldBytes = NOTHING
    early: bool = False
    freed: int = 0


def over_time(buffers: Buffers, start: int, wait: int, until: int) -> Iterator[tuple[int, int, HeldBytes]]:
    """(first step, step behind the last, bytes) of what a collective holds that starts at step ``start``, has
    completed before step ``until`` and is waited for at step ``wait``."""
    if buffers.freed:
        yield start, start + 1, HeldBytes(-buffers.freed)
    if buffers.flight is not NOTHING:
        yield start, max(until, start + 1), buffers.flight
    if buffers.end is not NOTHING:
        # What is made early is made on completion, the rest when it is waited for.
        last = max(start, (until if buffers.early else wait) - 1)
        yield last, last + 1, buffers.end
