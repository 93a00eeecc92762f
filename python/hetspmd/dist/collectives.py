"""Collectives over uneven shards, as pairs of start and wait, which lowered programs call.

``extents[r]`` is the number of elements that rank r holds along a dim, zeros allowed; shards are consecutive
in rank order. The implementations, the first two HAP 4.3's:

- padded: shards are padded to the largest, one equal-size collective runs, the padding is cut off;
- grouped: one broadcast (or reduce) per rank that holds anything, with exact sizes;
- ring: messages between neighbours, with exact sizes (:mod:`hetspmd.dist.ring`);
- exchange (of sums only): every rank is sent its slice by every other one, and sums.

Every function leaves its operand alone, but for one that the caller calls ``spare``: nobody reads that memory
any more, and the result may lie there. It returns a :class:`~hetspmd.dist.pending.Pending` at once, and all that
decides whether something is sent is the same on every rank. Types that a backend cannot move (bool, complex,
small integers) travel as bytes, or as real pairs where they are summed.

What follows from one rank's data alone is not gathered: where one rank holds everything, the padded kinds are a
broadcast and a reduce without padding, and an all-to-all from and to the same rank is nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import torch

from hetspmd.dist.coalesced import PendingBucket, start_all_gathers, start_all_reduces, start_reduce_scatters
from hetspmd.dist.communicator import Communicator, Member, Work
from hetspmd.dist.pending import Pending, PendingTensor
from hetspmd.dist.slices import (
    back,
    byte_factor,
    common,
    filled,
    is_alone,
    lone,
    movable,
    plain,
    ranges,
    summable,
    whole_numel,
    whole_slice,
)

def start_all_reduce(runtime: Member, tensor: torch.Tensor, *, spare: bool = False) -> PendingTensor:
    """partial to replicated: the sum over the ranks."""
    comm = runtime.communicator
    if comm.world == 1 or tensor.numel() == 0:
        return Pending((), lambda: tensor)
    comm.settle()
    own = spare and is_alone(tensor)
    total = tensor if own else tensor.clone(memory_format=torch.contiguous_format)
    return Pending((comm.all_reduce(summable(total)),), lambda: total, comm)


def start_reduce_scatter(
    runtime: Member, tensor: torch.Tensor, dim: int, extents: Sequence[int], *, spare: bool = False
) -> PendingTensor:
    """partial to shard(dim), padded: this rank's slice of the sum."""
    comm = runtime.communicator
    if comm.world == 1 or tensor.numel() == 0:
        return Pending((), lambda: whole_slice(tensor, dim, extents, comm.rank))
    if lone(extents) is not None:
        return start_grouped_reduce(runtime, tensor, dim, extents, spare=spare)
    comm.settle()
    front = plain(tensor).movedim(dim, 0)
    most, rest = max(extents), front.shape[1:]
    if min(extents) == most:
        buffer = front.contiguous()
    else:
        buffer = tensor.new_zeros((comm.world * most, *rest))
        for rank, (start, extent) in enumerate(ranges(extents)):
            buffer[rank * most : rank * most + extent] = front[start : start + extent]
    part = tensor.new_empty((most, *rest))
    spare = spare or buffer.data_ptr() != front.data_ptr()
    work = comm.reduce_scatter(summable(part), summable(buffer), spare=spare)
    extent = extents[comm.rank]

    def finish() -> torch.Tensor:
        mine = back(part[:extent], dim)
        padded = mine.untyped_storage().nbytes() > mine.numel() * mine.itemsize
        return mine.clone() if padded else mine

    return Pending((work,), finish, comm, early=extent < most)


def start_grouped_reduce(
    runtime: Member, tensor: torch.Tensor, dim: int, extents: Sequence[int], *, spare: bool = False
) -> PendingTensor:
    """partial to shard(dim), grouped: one reduce per rank that holds anything."""

    def issue(comm: Communicator, parts: Sequence[torch.Tensor]) -> list[Work]:
        return [comm.reduce(part, rank) for rank, part in enumerate(parts) if part.numel()]

    return _reduced(runtime, tensor, dim, extents, issue, spare)


def start_ring_reduce(
    runtime: Member, tensor: torch.Tensor, dim: int, extents: Sequence[int], *, spare: bool = False
) -> PendingTensor:
    """partial to shard(dim), around a ring."""
    return _reduced(runtime, tensor, dim, extents, lambda comm, parts: [comm.ring_reduce(parts)], spare)


def _reduced(
    runtime: Member,
    tensor: torch.Tensor,
    dim: int,
    extents: Sequence[int],
    issue: Callable[[Communicator, Sequence[torch.Tensor]], list[Work]],
    spare: bool,
) -> PendingTensor:
    """What ``issue`` makes of the ranks' slices, or of copies of them: sums, each on its rank."""
    comm = runtime.communicator
    if comm.world == 1 or tensor.numel() == 0:
        return Pending((), lambda: whole_slice(tensor, dim, extents, comm.rank))
    comm.settle()
    parts = torch.split(tensor, list(extents), dim)
    own = spare and dim == 0 and is_alone(tensor)
    if not own:
        parts = tuple(part.clone(memory_format=torch.contiguous_format) for part in parts)
    works = issue(comm, [summable(part) for part in parts])
    result = parts[comm.rank]
    # The other slices are not held on to by what is a view.
    view = own and result.numel() < tensor.numel()
    return Pending(works, lambda: result.clone() if view else result, comm, early=view)


def start_exchange_reduce(
    runtime: Member, tensor: torch.Tensor, dim: int, extents: Sequence[int]
) -> PendingTensor:
    """partial to shard(dim), by exchange: an all-to-all of slices, which their rank sums in rank order."""
    comm = runtime.communicator
    if comm.world == 1 or tensor.numel() == 0:
        return Pending((), lambda: whole_slice(tensor, dim, extents, comm.rank))
    comm.settle()
    front = plain(tensor).movedim(dim, 0).contiguous()
    own, row = extents[comm.rank], front.shape[1:].numel() * byte_factor(tensor.dtype)
    parts = tensor.new_empty((comm.world, own, *front.shape[1:]))
    splits = [extent * row for extent in extents]
    work = comm.all_to_all(movable(parts), movable(front), [own * row] * comm.world, splits)
    return Pending((work,), lambda: back(parts.sum(0, dtype=parts.dtype), dim), comm, early=True)


def start_all_gather(
    runtime: Member, tensor: torch.Tensor, dim: int, extents: Sequence[int]
) -> PendingTensor:
    """shard(dim) to replicated, padded."""
    comm = runtime.communicator
    if comm.world == 1 or whole_numel(tensor, dim, extents) == 0:
        return Pending((), lambda: filled(tensor, dim, extents))
    if lone(extents) is not None:
        return start_grouped_broadcast(runtime, tensor, dim, extents)
    comm.settle()
    front = plain(tensor).movedim(dim, 0)
    most = max(extents)
    gathered = tensor.new_empty((comm.world * most, *front.shape[1:]))
    # A rank's own part is sent from its place in what is gathered.
    own = gathered.narrow(0, comm.rank * most, most)
    own[: front.shape[0]].copy_(front)
    own[front.shape[0] :].zero_()
    work = comm.all_gather(movable(gathered), movable(own))
    del own
    even = min(extents) == most

    def finish() -> torch.Tensor:
        if dim == 0 and even:
            return gathered
        parts = [
            gathered[rank * most : rank * most + extent].movedim(0, dim)
            for rank, extent in enumerate(extents)
            if extent
        ]
        return torch.cat(parts, dim)

    return Pending((work,), finish, comm, early=not even)


def start_grouped_broadcast(
    runtime: Member, tensor: torch.Tensor, dim: int, extents: Sequence[int]
) -> PendingTensor:
    """shard(dim) to replicated, grouped: one broadcast per rank that holds anything."""

    def issue(comm: Communicator, parts: Sequence[torch.Tensor]) -> list[Work]:
        return [comm.broadcast(part, rank) for rank, part in enumerate(parts) if part.numel()]

    return _gathered(runtime, tensor, dim, extents, issue)


def start_ring_gather(
    runtime: Member, tensor: torch.Tensor, dim: int, extents: Sequence[int]
) -> PendingTensor:
    """shard(dim) to replicated, around a ring."""
    return _gathered(runtime, tensor, dim, extents, lambda comm, parts: [comm.ring_gather(parts)])


def _gathered(
    runtime: Member,
    tensor: torch.Tensor,
    dim: int,
    extents: Sequence[int],
    issue: Callable[[Communicator, Sequence[torch.Tensor]], list[Work]],
) -> PendingTensor:
    """What ``issue`` makes of the parts of the result, of which a rank has its own."""
    comm = runtime.communicator
    if comm.world == 1 or whole_numel(tensor, dim, extents) == 0:
        return Pending((), lambda: filled(tensor, dim, extents))
    comm.settle()
    front = plain(tensor).movedim(dim, 0)
    gathered = tensor.new_empty((sum(extents), *front.shape[1:]))
    parts = torch.split(gathered, list(extents))
    parts[comm.rank].copy_(front)
    works = issue(comm, [movable(part) for part in parts])
    return Pending(works, lambda: back(gathered, dim), comm)


def start_all_to_all(
    runtime: Member,
    tensor: torch.Tensor,
    source: int,
    target: int,
    source_extents: Sequence[int],
    target_extents: Sequence[int],
) -> PendingTensor:
    """All-Gather(source) to All-Gather(target)."""
    comm = runtime.communicator
    me = comm.rank
    rest = 1
    for d, extent in enumerate(tensor.shape):
        rest *= 1 if d in (source, target) else extent
    shape = list(tensor.shape)
    shape[source], shape[target] = sum(source_extents), target_extents[me]
    if rest * sum(source_extents) * sum(target_extents) == 0 and comm.world > 1:
        return Pending((), lambda: tensor.new_empty(shape))
    holder = lone(source_extents)
    if holder is not None and holder == lone(target_extents):
        return Pending((), lambda: tensor if holder == me else tensor.new_empty(shape))
    comm.settle()
    parts = [plain(tensor).narrow(target, s, n).reshape(-1) for s, n in ranges(target_extents)]
    buffer = torch.cat(parts)
    splits = [part.numel() for part in parts]
    del parts  # copies, as a rule
    output_splits = [extent * target_extents[me] * rest for extent in source_extents]
    received = tensor.new_empty(sum(output_splits))
    scale = byte_factor(tensor.dtype)
    work = comm.all_to_all(
        movable(received), movable(buffer), [n * scale for n in output_splits], [n * scale for n in splits]
    )

    def finish() -> torch.Tensor:
        pieces = []
        for extent, piece in zip(source_extents, torch.split(received, output_splits), strict=True):
            shape[source] = extent
            pieces.append(piece.view(shape))
        return torch.cat(pieces, source)

    return Pending((work,), finish, comm)


def start_rebalance(
    runtime: Member,
    tensor: torch.Tensor,
    dim: int,
    source_extents: Sequence[int],
    target_extents: Sequence[int],
) -> PendingTensor:
    """shard(dim) in other extents: slices stay in rank order, so that each rank sends to its neighbours what
    its new slice has no part of, and keeps what both have."""
    comm = runtime.communicator
    if comm.world == 1 or whole_numel(tensor, dim, source_extents) == 0:
        shape = (*tensor.shape[:dim], target_extents[comm.rank], *tensor.shape[dim + 1 :])
        return Pending((), lambda: tensor if comm.world == 1 else tensor.new_empty(shape))
    comm.settle()
    front = plain(tensor).movedim(dim, 0).contiguous()
    row = front.shape[1:].numel() * byte_factor(tensor.dtype)
    before, after = ranges(source_extents), ranges(target_extents)
    splits = [common(before[comm.rank], place) * row for place in after]
    output_splits = [common(place, after[comm.rank]) * row for place in before]
    received = tensor.new_empty((target_extents[comm.rank], *front.shape[1:]))
    work = comm.all_to_all(movable(received), movable(front), output_splits, splits)
    return Pending((work,), lambda: back(received, dim), comm)


@dataclass(frozen=True, slots=True)
class Start:
    """What starts the collectives of a kind.

    one      takes the runtime, the tensor, and the arguments that the kind's record gives; where the kind works in
             place, ``spare``
    several  of one dtype, as one collective: takes the runtime, the tensors, and the arguments of each; None for a
             kind that does not coalesce
    """

    one: Callable[..., PendingTensor]
    several: Callable[..., PendingBucket] | None = None


STARTS: Final[dict[str, Start]] = {
    "all_reduce": Start(start_all_reduce, start_all_reduces),
    "reduce_scatter": Start(start_reduce_scatter, start_reduce_scatters),
    "grouped_reduce": Start(start_grouped_reduce),
    "ring_reduce": Start(start_ring_reduce),
    "exchange_reduce": Start(start_exchange_reduce),
    "all_gather": Start(start_all_gather, start_all_gathers),
    "grouped_broadcast": Start(start_grouped_broadcast),
    "ring_gather": Start(start_ring_gather),
    "all_to_all": Start(start_all_to_all),
    "rebalance": Start(start_rebalance),
}
"""By kind: the same kinds as :data:`hetspmd.cluster.collective_kinds.KINDS`."""
