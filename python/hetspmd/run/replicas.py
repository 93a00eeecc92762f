"""Which replicated tensors are compared between the ranks, and how nearly they must agree.

Every step compares some pieces, in turn, so that each tensor is compared about once in :data:`ROUND_STEPS` steps
and what parts all of them is seen in the next step. Copies are equal bit for bit where devices of one kind
have computed them in the same way: parameters whose gradient is the result of a collective, which is the
same everywhere, and those that have none; whole numbers always. Other copies come from sums that each rank
or each machine has taken itself, or from unlike devices, so that rounding drives them apart: of these a random
projection must agree to the square root of the dtype's precision, relative to the tensor's norm.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch
from torch import fx

from hetspmd.dist.digest import digest, projection
from hetspmd.dist.parting import FACTOR
from hetspmd.lower import calls
from hetspmd.run.store import Store, slot

if TYPE_CHECKING:
    from hetspmd.dist.runtime import Runtime
    from hetspmd.lower.local_program import LocalProgram
    from hetspmd.trace.graph import Graph

ROUND_STEPS: Final = 100
"""Steps in which all replicated tensors are compared once, or twice as many where some of them are large."""

_LEAST_BYTES: Final = 1 << 16
"""Bytes of a step's pieces, however small the model: to compare fewer takes as long."""
_LEAST_TENSORS: Final = 2
"""Tensors of which a step compares pieces, however few there are."""


@dataclass(frozen=True)
class Replica:
    """A tensor of which every active rank holds a whole copy; ``tolerance`` as in
    :class:`hetspmd.dist.roll.RollCall`."""

    name: str
    tensor: Callable[[], torch.Tensor]
    tolerance: float


@dataclass(frozen=True)
class Piece:
    """A part of a replicated tensor, as it is now. ``single``: it is one number, which in parts of its own norm is
    like any other: its bits are its digest."""

    name: str
    content: torch.Tensor
    tolerance: float
    single: bool = False

    def values(self) -> Iterator[torch.Tensor]:
        """Its digest, projection and square, as int64 scalars of these bits; the digest alone of exact ones, and
        none of others unless they are ``single``."""
        if self.single:
            number = self.content.double()
            yield from (bits.view(torch.int64) for bits in (number, number, number * number))
            return
        none = torch.zeros((), dtype=torch.int64, device=self.content.device)
        if self.tolerance == 0.0:
            yield from (digest(self.content, whole=True), none, none)
        else:
            yield from (none, *(value.view(torch.int64) for value in projection(self.content)))


def factor_of_loss(tangent: torch.Tensor) -> Piece:
    """What a backward multiplies the gradients of the loss by, one real number, as it is now."""
    content = tangent.detach().reshape(()).clone()
    return Piece(FACTOR, content, _tolerance(content.dtype, same=False), single=True)


class Replicas:
    """The replicated tensors of a HAP module, taken in turn. The same on every rank that holds any."""

    def __init__(self, held: Sequence[Replica]) -> None:
        self.held = tuple(held)
        self._index = self._start = 0
        sizes = [t.numel() * t.element_size() for t in (h.tensor() for h in self.held)]
        self._bytes = max(_LEAST_BYTES, -(-sum(sizes) // ROUND_STEPS))
        self._tensors = min(len(self.held), max(_LEAST_TENSORS, -(-len(self.held) // ROUND_STEPS)))

    def take(self) -> list[Piece]:
        """The next pieces."""
        pieces: list[Piece] = []
        room = self._bytes
        while len(pieces) < self._tensors and room > 0:
            held = self.held[self._index]
            flat = held.tensor().detach().reshape(-1)
            count = min(flat.numel() - self._start, max(1, room // max(1, flat.element_size())))
            part = flat[self._start : self._start + count]
            pieces.append(Piece(held.name, part, held.tolerance))
            room -= count * flat.element_size()
            self._start += count
            if self._start >= flat.numel():
                self._index, self._start = (self._index + 1) % len(self.held), 0
        return pieces


def replicas_of(
    store: Store, graph: Graph, program: LocalProgram, runtime: Callable[[], Runtime], *, alike: bool
) -> Replicas | None:
    """What this rank holds whole copies of; None on an idle rank and on one that is alone.

    ``alike``: all ranks' devices are of one kind, and none of them is one of a machine's accelerators.
    """
    if runtime().idle or runtime().communicator.world == 1:
        return None
    exact = _summed(program)
    held: list[Replica] = []
    for position, (parameter, layout) in enumerate(zip(graph.parameters, program.parameters, strict=True)):
        if layout.region is None:
            owner, leaf = slot(store.module, parameter.name)
            tensor = _parameter(owner._parameters, leaf)
            same = alike and (position in exact or position not in program.differentiable)
            held.append(Replica(parameter.name, tensor, _tolerance(tensor().dtype, same)))
    for buffer in graph.buffers:
        owner, leaf = slot(store.module, buffer.name)
        tensor = _parameter(owner._buffers, leaf)
        held.append(Replica(buffer.name, tensor, _tolerance(tensor().dtype, same=False)))
    held.append(
        Replica("state of the shared random generator", lambda: runtime().randomness.shared_state(), 0.0)
    )
    return Replicas([h for h in held if h.tensor().numel()])


def _parameter(slots: object, leaf: str) -> Callable[[], torch.Tensor]:
    """What hangs there when it is asked for."""
    return lambda: slots[leaf]  # type: ignore[index]  # a module's dict of tensors


def _tolerance(dtype: torch.dtype, same: bool) -> float:
    if same or not (dtype.is_floating_point or dtype.is_complex):
        return 0.0
    return math.sqrt(torch.finfo(dtype).eps)


def _summed(program: LocalProgram) -> set[int]:
    """The parameters whose gradient is the result of a collective, as positions."""
    if program.backward is None:
        return set()
    (gradients,) = next(n for n in program.backward.graph.nodes if n.op == "output").args
    return {
        position
        for position, node in zip(program.differentiable, gradients, strict=True)
        if isinstance(node, fx.Node) and node.target in (calls.wait, calls.take)
    }


def device_kind(device: torch.device) -> str:
    """What a device is: those of the same kind round alike."""
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)} {torch.version.cuda} {torch.__version__}"
    return f"{device.type} {torch.backends.cpu.get_cpu_capability()} {torch.__version__}"
