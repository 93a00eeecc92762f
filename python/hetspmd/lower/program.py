"""The local program of one rank: what lowering returns and the runtime executes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from hetspmd.placement import Placement
from hetspmd.program.layout import Region


@dataclass(frozen=True)
class LocalTensor:
    """A tensor that outlives a step: its whole shape and what this rank holds of it.

    ``extents`` are the elements per rank of the program along the sharded dim (empty where the form is not
    sharded); ``region`` is this rank's part, None for the whole. An idle rank's part has no elements,
    whatever the form; of a scalar it is the shape (0,).
    """

    tensor: int
    form: Placement
    shape: tuple[int, ...]
    dtype: str
    extents: tuple[int, ...]
    region: Region | None

    @property
    def local_shape(self) -> tuple[int, ...]:
        """This rank's shape."""
        if self.region is None:
            return self.shape
        return (*self.shape[: self.region.dim], self.region.extent, *self.shape[self.region.dim + 1 :])

    def slice(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's part of the whole tensor, a view."""
        if self.region is None:
            return whole
        return whole.reshape(self.shape or (1,)).narrow(
            self.region.dim, self.region.start, self.region.extent
        )


@dataclass(frozen=True)
class LocalProgram:
    """One rank's graphs.

    ``forward(runtime, *parameters, *buffers, *inputs)`` returns ``(loss, outputs, buffers, saved)``, the last
    three lists: outputs of ``outputs``, the new values of the buffers that change (``updated`` holds their
    positions) and then of the parameters that the forward changes (``written``; whole, whatever this rank
    stores), and what backward reads. ``backward(runtime, tangent, saved)`` returns the gradients of
    ``differentiable`` (positions among the parameters) and empties ``saved`` as it goes. ``rank`` is the place
    among the ``world`` ranks that run the program, None for an idle device.
    """

    rank: int | None
    world: int
    device: torch.device
    parameters: tuple[LocalTensor, ...]
    buffers: tuple[LocalTensor, ...]
    inputs: tuple[LocalTensor, ...]
    outputs: tuple[LocalTensor, ...]
    updated: tuple[int, ...]
    written: tuple[int, ...]
    differentiable: tuple[int, ...]
    forward: fx.GraphModule
    backward: fx.GraphModule | None

    def __str__(self) -> str:
        who = "idle" if self.rank is None else f"rank {self.rank} of {self.world}"
        texts = [f"# {who}, forward", str(self.forward.code).strip()]
        if self.backward is not None:
            texts += [f"# {who}, backward", str(self.backward.code).strip()]
        return "\n".join(texts) + "\n"
