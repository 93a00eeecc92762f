"""What a lowered program needs besides tensors: the communicator and the random numbers of its rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from hetspmd.dist import collectives
from hetspmd.dist.coalesced import PendingBucket
from hetspmd.dist.communicator import Communicator
from hetspmd.dist.pending import PendingTensor
from hetspmd.dist.random import Draw, Randomness, Region, drawn_inside, drawn_noise, random_op
from hetspmd.dist.slices import movable
from hetspmd.program.noise import NOISE


class LossScale(Protocol):
    """Tells by what a loss will be scaled (:class:`hetspmd.run.scaler.ExpectedScale`)."""

    def expected(self, device: torch.device) -> torch.Tensor:
        """The scale, a scalar."""

    def check(self, tangent: torch.Tensor) -> None:
        """Raises GradientError for a gradient of the loss that was not to be expected."""


@dataclass
class Runtime:
    """The first input of every lowered graph.

    ``communicator`` joins the ranks that run the program, the active ones (on an idle rank: the idle ones).
    Where some are idle, ``everyone`` joins all, to share results from its rank ``source``. ``loss_scale``
    tells by what the loss of the step that runs will be scaled, for gradients that are computed before it is.
    """

    communicator: Communicator
    randomness: Randomness
    everyone: Communicator | None = None
    source: int = 0
    idle: bool = False
    loss_scale: LossScale | None = field(default=None, kw_only=True)

    @classmethod
    def join(cls, everyone: Communicator, active: Sequence[int], randomness: Randomness) -> Runtime:
        """The runtime of this rank of ``everyone``; all ranks must call this."""
        idle = [rank for rank in range(everyone.world) if rank not in active]
        if not idle:
            return cls(everyone, randomness)
        own = everyone.split([active, idle])
        return cls(own, randomness, everyone, active[0], everyone.rank in idle)

    def start(self, kind: str, tensor: torch.Tensor, *args: Any, spare: bool = False) -> PendingTensor:
        """Start a collective of this kind, with the dims and extents that it needs."""
        own = {"spare": True} if spare else {}
        return collectives.STARTS[kind].one(self, tensor, *args, **own)

    def start_bucket(
        self, kind: str, tensors: Sequence[torch.Tensor], args: Sequence[Sequence[Any]]
    ) -> PendingBucket:
        """Start several collectives of one kind and dtype as one; ``args`` are those of each."""
        several = collectives.STARTS[kind].several
        assert several is not None, "only kinds that coalesce share buckets"
        return several(self, tensors, args)

    def draw(
        self,
        instruction: int,
        shape: Sequence[int],
        regions: Sequence[Region],
        alike: bool,
        op: Any,
        args: Sequence[Any],
        kwargs: dict[str, Any],
    ) -> Any:
        """What a random op draws (:func:`hetspmd.lower.calls.draw`)."""
        return random_op(self.randomness, _draw(instruction, shape, regions, alike), op, args, kwargs)

    def noise(
        self,
        instruction: int,
        shape: Sequence[int],
        regions: Sequence[Region],
        alike: bool,
        op: Any,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        dtype: torch.dtype,
    ) -> torch.Tensor:
        """The noise of it (:func:`hetspmd.lower.calls.noise`)."""
        draw = _draw(instruction, shape, regions, alike)
        return drawn_noise(self.randomness, draw, NOISE[str(op)], args, kwargs, dtype)

    def attend(self, kernel: Any, op: Any, args: tuple[Any, ...]) -> Any:
        """An attention with dropout (:func:`hetspmd.lower.calls.attend`)."""
        return op(*args) if self.randomness.reference else drawn_inside(self.randomness, kernel, args)

    def expected_tangent(
        self, shape: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """The gradient that the loss is expected to get."""
        if self.loss_scale is None:
            return torch.ones(shape, dtype=dtype, device=device)
        return self.loss_scale.expected(device).to(dtype).expand(shape)

    def relative_tangent(self, tangent: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
        """The gradient that the loss has got, by the expected one. Raises GradientError where so much more came than
        was expected that gradients may have vanished."""
        if self.loss_scale is not None:
            self.loss_scale.check(tangent)
        return tangent / expected

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
        self.everyone.broadcast(movable(buffer), self.source).wait()
        return buffer if self.idle else value


def _draw(instruction: int, shape: Sequence[int], regions: Sequence[Region], alike: bool) -> Draw:
    cut = [(dim, start, extent) for dim, start, extent in regions]
    return Draw(instruction, tuple(shape), cut[0] if cut else None, tuple(cut[1:]), alike)
