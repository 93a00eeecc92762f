"""Collectives of plans across machines: among the accelerators of each, and between machines in three steps.

A collective between machines (HAP 6) is the first accelerators' own. The others of a machine give them what
they hold before it (gathered or summed at the first one) and get the result after it (whole, or a slice each).
The first two steps are taken when it is started, and the last one when it is waited for, so that what is
between machines overlaps other work. All ranks take all steps in the same order. Of a bucket, what is summed and
what is handed out whole travels packed side by side inside a machine as well.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeAlias, TypeVar, cast

import torch

from hetspmd.cluster.cluster import Cluster
from hetspmd.cluster.machines import machine_of, ranks_of
from hetspmd.dist.coalesced import PendingBucket
from hetspmd.dist.communicator import Communicator
from hetspmd.dist.pending import Pending, PendingTensor
from hetspmd.dist.random import Randomness
from hetspmd.dist.runtime import Runtime
from hetspmd.dist.slices import is_alone, movable, summable
from hetspmd.program.level_layout import Leg, Part

Result = TypeVar("Result")


@dataclass
class MachineRuntime(Runtime):
    """The first input of an accelerator's graphs. ``communicator`` joins all accelerators of the active machines,
    ``inside`` those of this one, ``across`` the first ones (on others: the others, which do not use it)."""

    inside: Runtime | None = None
    across: Runtime | None = None

    def start_across(
        self, kind: str, tensor: torch.Tensor, args: Sequence[Any], leg: Leg, *, spare: bool = False
    ) -> PendingAcross[torch.Tensor]:
        """Start a collective of this kind, with the arguments of its start, between the machines. ``spare``: as of
        :meth:`start`, what is collected of the tensor included."""
        assert self.inside is not None
        assert self.across is not None
        held, shape, handed, result = leg
        comm = self.inside.communicator
        whole = tensor if comm.world == 1 else collect(comm, tensor, held, shape, spare=spare)
        if comm.rank == 0:
            pending = self.across.start(kind, whole, *args, spare=spare)
            return PendingAcross(lambda: hand_out(comm, pending.wait(), handed, result), pending)
        empty = tensor.new_empty(())
        return PendingAcross(lambda: hand_out(comm, empty, handed, result))

    def start_bucket_across(
        self, kind: str, tensors: Sequence[torch.Tensor], args: Sequence[Sequence[Any]], legs: Sequence[Leg]
    ) -> PendingBucket:
        """Start several collectives of this kind and one dtype as one; ``args`` and ``legs`` of each."""
        assert self.inside is not None
        assert self.across is not None
        comm = self.inside.communicator
        whole = list(tensors) if comm.world == 1 else _collect_all(comm, tensors, legs)
        if comm.rank:
            empty = [tensor.new_empty(()) for tensor in tensors]
            return PendingBucket(PendingAcross(lambda: _hand_out_all(comm, empty, legs)))
        carried = self.across.start_bucket(kind, whole, args)
        if comm.world == 1:
            return carried
        pending = cast(Pending[list[torch.Tensor]], carried.pending)
        return PendingBucket(PendingAcross(lambda: _hand_out_all(comm, pending.wait(), legs), pending))


def join_machines(
    everyone: Communicator, cluster: Cluster, active: Sequence[int], randomness: Randomness
) -> MachineRuntime:
    """The runtime of this rank; all ranks must call this. ``active``: machines."""
    base = Runtime.join(everyone, ranks_of(cluster, active), randomness)
    machines = machine_of(cluster)
    inside = everyone.split([ranks_of(cluster, (j,)) for j in range(cluster.world)])
    first = [machines.index(j) for j in active]
    others = [rank for rank in range(everyone.world) if rank not in first]
    across = everyone.split([part for part in (first, others) if part])
    return MachineRuntime(
        base.communicator,
        randomness,
        base.everyone,
        base.source,
        base.idle,
        Runtime(inside, randomness),
        Runtime(across, randomness),
    )


class PendingAcross(Generic[Result]):
    """A collective between machines on its way; ``carried``: as the first accelerator of a machine takes part in
    it."""

    def __init__(self, finish: Callable[[], Result], carried: Pending[Any] | None = None) -> None:
        self._finish: Callable[[], Result] | None = finish
        self.carried = carried

    def wait(self) -> Result:
        """Wait, have the result handed out inside, and give this accelerator's part."""
        assert self._finish is not None, "a collective is waited for once"
        finish, self._finish = self._finish, None
        return finish()


def _collect_all(
    comm: Communicator, tensors: Sequence[torch.Tensor], legs: Sequence[Leg]
) -> list[torch.Tensor]:
    """Of each :func:`collect`; what is summed is summed as one tensor."""
    wholes = [
        tensor if held == "sum" else collect(comm, tensor, held, shape)
        for tensor, (held, shape, _, _) in zip(tensors, legs, strict=True)
    ]
    summed = [i for i, leg in enumerate(legs) if leg[0] == "sum"]
    if summed:
        packed = torch.cat([tensors[i].reshape(-1) for i in summed])
        if packed.numel():
            comm.reduce(summable(packed), 0).wait()
        for i, part in zip(summed, torch.split(packed, [tensors[i].numel() for i in summed]), strict=True):
            wholes[i] = part.view(tensors[i].shape)
    return wholes


def _hand_out_all(
    comm: Communicator, whole: Sequence[torch.Tensor], legs: Sequence[Leg]
) -> list[torch.Tensor]:
    """Of each :func:`hand_out`; what everyone gets all of is handed out as one tensor."""
    shares = [
        tensor if handed is None else hand_out(comm, tensor, handed, shape)
        for tensor, (_, _, handed, shape) in zip(whole, legs, strict=True)
    ]
    alike = [i for i, leg in enumerate(legs) if leg[2] is None]
    sizes = [_numel(legs[i][3]) for i in alike]
    if alike:
        first = comm.rank == 0
        packed = torch.cat([whole[i].reshape(-1) for i in alike]) if first else whole[0].new_empty(sum(sizes))
        if packed.numel():
            comm.broadcast(movable(packed), 0).wait()
        for i, part in zip(alike, torch.split(packed, sizes), strict=True):
            shares[i] = part.view(list(legs[i][3]))
    return shares


def collect(
    comm: Communicator, tensor: torch.Tensor, held: Part, shape: Sequence[int], *, spare: bool = False
) -> torch.Tensor:
    """The machine's tensor of ``shape`` on its first accelerator; on the others a tensor of no use. Sums may lie in
    the memory of a ``spare`` tensor."""
    if held is None or _numel(shape) == 0:
        return tensor if held is None or comm.rank else tensor.new_zeros(list(shape))
    if held == "sum":
        own = spare and is_alone(tensor)
        total = tensor if own else tensor.clone(memory_format=torch.contiguous_format)
        comm.reduce(summable(total), 0).wait()
        return total
    dim, extents = cast(tuple[int, Sequence[int]], held)
    rest = _numel(shape) // shape[dim]
    front = movable(tensor.movedim(dim, 0).contiguous())
    row = _row(front, tensor, rest)
    at_first = comm.rank == 0
    received = tensor.new_empty([*((sum(extents),) if at_first else (0,)), *_others(shape, dim)])
    splits = [front.numel() if r == 0 else 0 for r in range(comm.world)]
    output_splits = [n * row if at_first else 0 for n in extents]
    comm.all_to_all(movable(received), front, output_splits, splits).wait()
    return received.movedim(0, dim).contiguous() if at_first else tensor


def hand_out(comm: Communicator, whole: torch.Tensor, handed: Part, shape: Sequence[int]) -> torch.Tensor:
    """From the first accelerator's tensor of ``shape`` everyone's part of it: all of it, or a slice."""
    if comm.world == 1:
        return whole
    at_first = comm.rank == 0
    if handed is None:
        buffer = whole.contiguous() if at_first else whole.new_empty(list(shape))
        if _numel(shape):
            comm.broadcast(movable(buffer), 0).wait()
        return buffer
    dim, extents = cast(tuple[int, Sequence[int]], handed)
    mine = [extents[comm.rank], *_others(shape, dim)]
    if _numel(shape) == 0:
        return whole.new_empty(mine).movedim(0, dim)
    received = whole.new_empty(mine)
    target = movable(received)
    rest = _numel(shape) // shape[dim]
    row = _row(target, whole, rest)
    sent = movable(whole.movedim(dim, 0).contiguous() if at_first else whole.new_empty((0,)))
    splits = [n * row if at_first else 0 for n in extents]
    output_splits = [target.numel() if r == 0 else 0 for r in range(comm.world)]
    comm.all_to_all(target, sent, output_splits, splits).wait()
    return received.movedim(0, dim).contiguous()


def _row(flat: torch.Tensor, tensor: torch.Tensor, rest: int) -> int:
    """Elements, as they travel, of one slice along the dim that is cut."""
    return rest if flat.dtype == tensor.dtype else rest * tensor.element_size()


def _numel(shape: Sequence[int]) -> int:
    count = 1
    for extent in shape:
        count *= extent
    return count


def _others(shape: Sequence[int], dim: int) -> list[int]:
    return [extent for d, extent in enumerate(shape) if d != dim]
