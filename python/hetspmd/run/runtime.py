"""What a lowered program needs besides tensors: the communicator and the random numbers of its rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hetspmd.run import collectives
from hetspmd.run.communicator import Communicator
from hetspmd.run.random import Randomness


@dataclass
class Runtime:
    """The first input of every lowered graph.

    ``communicator`` joins the ranks that run the program, the active ones (on an idle rank: the idle ones).
    Where some are idle, ``everyone`` joins all, to share results from its rank ``source``.
    """

    communicator: Communicator
    randomness: Randomness
    everyone: Communicator | None = None
    source: int = 0
    idle: bool = False

    @classmethod
    def join(cls, everyone: Communicator, active: Sequence[int], randomness: Randomness) -> Runtime:
        """The runtime of this rank of ``everyone``; all ranks must call this."""
        idle = [rank for rank in range(everyone.world) if rank not in active]
        if not idle:
            return cls(everyone, randomness)
        own = everyone.split([active, idle])
        return cls(own, randomness, everyone, active[0], everyone.rank in idle)

    def share(self, value: torch.Tensor) -> torch.Tensor:
        """``value`` of the active ranks, all of which hold it whole, on every rank.

        An idle rank gives a tensor of the same shape and dtype.
        """
        if self.everyone is None or value.numel() == 0:
            return value
        if self.everyone.rank == self.source:
            buffer = value.detach().contiguous()
        else:
            buffer = torch.empty_like(value, memory_format=torch.contiguous_format, requires_grad=False)
        self.everyone.broadcast(collectives.movable(buffer), self.source).wait()
        return buffer if self.idle else value
