"""What ranks have loaded into an optimizer, each for itself, is compared: every rank keeps its own part of it.

A rank that goes on from another checkpoint than the others (a file on its own disk, of another step) would train
with moments of two, and nothing would look odd: no rank has a copy of another one's part.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hetspmd.dist.communicator import Communicator
from hetspmd.dist.doings import Loaded
from hetspmd.dist.parting import ranks_text
from hetspmd.errors import OptimizerError


class LoadedStates:
    """Digests of whole state of the optimizers of a process, by names that all ranks have in common. There may be
    several of a name, of optimizers that are no longer used."""

    def __init__(self) -> None:
        self.digests: dict[str, list[int]] = {}

    def add(self, optimizer: torch.optim.Optimizer, name: str, entries: Mapping[str, Any]) -> None:
        """Whole state of the parameter ``name``."""
        loaded = Loaded()
        for key, value in entries.items():
            loaded.add(f"{key} of {type(optimizer).__name__} for {name}", value)
        for said, digest in loaded.digests.items():
            self.digests.setdefault(said, []).append(digest)


def unlike_states(told: Sequence[Mapping[str, Sequence[int]]]) -> str:
    """What to say where ranks have loaded unlike state; "" where they have not. ``told``: the digests of each rank.

    A rank that has nothing of a name says nothing: it holds a whole parameter, whose state may be its own.
    """
    for name in dict.fromkeys(name for digests in told for name in digests):
        said = {rank: set(digests[name]) for rank, digests in enumerate(told) if name in digests}
        first = min(said)
        others = [rank for rank, digests in said.items() if not digests & said[first]]
        if others:
            alike = [rank for rank in said if rank not in others]
            return (
                f"the optimizer's state is not the same on every rank: {ranks_text(others)} loaded another {name} "
                f"than {ranks_text(alike)}, and each rank takes its own part of what it has loaded. Load the same "
                "checkpoint on every rank"
            )
    return ""


def check_states(communicator: Communicator, states: LoadedStates) -> None:
    """Raise OptimizerError, on every rank, where these have loaded unlike state. Blocks."""
    if communicator.world > 1 and (text := unlike_states(communicator.exchange(states.digests))):
        raise OptimizerError(text)
