"""The local program of one rank: what passes rewrite, what lowering returns and the runtime executes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields

import torch
from torch import fx

from hetspmd.placement import Placement
from hetspmd.program.layout import Region
from hetspmd.trace.graph import Graph


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
class LocalInterface:
    """What one rank's graphs are given and what they return, of whatever the graphs consist.

    ``rank`` is the place among the ``world`` ranks that run the program, None for an idle device. ``updated`` are
    the positions of the buffers that change, ``written`` those of the parameters that the forward changes,
    ``differentiable`` those of the parameters that have gradients.
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


@dataclass(frozen=True)
class LocalProgram(LocalInterface):
    """One rank's graphs.

    ``forward(runtime, *parameters, *buffers, *inputs)`` returns ``(loss, outputs, buffers, saved)``, the last
    three lists: outputs of ``outputs``, the new values of the buffers that change (``updated``) and then of the
    parameters that the forward changes (``written``; whole, whatever this rank stores), and what backward reads.
    ``backward(runtime, tangent, saved)`` returns the gradients of ``differentiable`` and empties ``saved`` as it
    goes.
    """

    forward: fx.GraphModule
    backward: fx.GraphModule | None

    def __str__(self) -> str:
        who = "idle" if self.rank is None else f"rank {self.rank} of {self.world}"
        texts = [f"# {who}, forward", str(self.forward.code).strip()]
        if self.backward is not None:
            texts += [f"# {who}, backward", str(self.backward.code).strip()]
        return "\n".join(texts) + "\n"


def numbered(what: str, numbers: Sequence[int]) -> str:
    """Ascending numbers in words: ``rank 3``, ``ranks 0-2, 5``."""
    runs: list[list[int]] = []
    for n in numbers:
        if runs and n == runs[-1][-1] + 1:
            runs[-1].append(n)
        else:
            runs.append([n])
    text = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    return f"{what}{'s' if len(numbers) > 1 else ''} {text}"


@dataclass(frozen=True)
class Groups:
    """Who takes part in a rank's collectives, in words: ``own``, those of :func:`hetspmd.lower.calls.start`, and
    ``across``, those between machines."""

    own: str
    across: str = ""


@dataclass(frozen=True)
class LocalGraphs(LocalInterface):
    """One rank's graphs while passes rewrite them, and what a reader has to know of them.

    ``constants`` are the attributes that the graphs read, by name. ``reference`` is the graph of the single device,
    ``local_shape`` the shape that a value of the local graphs has on this rank: the value's key is
    ``(tensor, form)``, or ``(tensor, outer form, inner form)`` of an accelerator of a machine.
    """

    forward: fx.Graph
    backward: fx.Graph | None
    constants: Mapping[str, torch.Tensor]
    reference: Graph
    local_shape: Callable[[tuple[int, ...]], tuple[int, ...]]
    groups: Groups

    @property
    def graphs(self) -> tuple[fx.Graph, ...]:
        """The forward and, if there is one, the backward."""
        return (self.forward,) if self.backward is None else (self.forward, self.backward)

    def program(self) -> LocalProgram:
        """The program that a rank runs: the graphs as code."""
        interface = {f.name: getattr(self, f.name) for f in fields(LocalInterface)}
        backward = None if self.backward is None else self._module(self.backward, "Backward")
        return LocalProgram(**interface, forward=self._module(self.forward, "Forward"), backward=backward)

    def _module(self, graph: fx.Graph, name: str) -> fx.GraphModule:
        wanted = {str(n.target) for n in graph.nodes if n.op == "get_attr"}
        return fx.GraphModule({k: v for k, v in self.constants.items() if k in wanted}, graph, name)
