"""The turns of a loop over micro-batches as the simulation of a step passes over them.

What stands before the loop runs with a device's first turn, what stands after it with its last one
(:mod:`hetspmd.lower.turns`), so that only these two hide it. A step is simulated in three passes: the first turn,
those between, as one, and the last turn; or in as many as there are turns. A device with fewer turns than others
has its last one in the last pass, and the others in the first passes; of a single one the forward is in the first
pass and the backward in the last.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from hetspmd.cost.signatures import Array
from hetspmd.program.micro_batches import MicroBatches
from hetspmd.program.time_split import Phase


@dataclass(frozen=True)
class TurnPass:
    """Steps that are simulated one after the other.

    Attributes:
        phases: Of which steps.
        turns: How many turns of the loop the pass stands for.
        forward: Of each device the part of its turns that it has in the pass, of the forward.
        backward: The same of the backward.
    """

    phases: frozenset[Phase]
    turns: int
    forward: Array
    backward: Array


def passes(batches: MicroBatches, world: int, *, each: bool = False) -> Iterator[TurnPass]:
    """The passes of a step on so many devices; ``each``: one for every turn."""
    own, last = np.array(batches.turns_of(world)), batches.count - 1
    bounds = list(range(batches.count + 1)) if each else sorted({0, 1, last, last + 1})
    for start, stop in pairwise(bounds):
        phases: set[Phase] = {"in"}
        phases |= {"before"} if start == 0 else set()
        phases |= {"after"} if stop > last else set()
        parts = (np.clip(own - 1 - start, 0, stop - start) if stop <= last else np.ones(world)) / own
        single = own == 1
        forward = np.where(single, float(start == 0), parts)
        backward = np.where(single, float(stop > last), parts)
        yield TurnPass(frozenset(phases), stop - start, forward, backward)
