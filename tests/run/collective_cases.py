"""Every collective on uneven and empty shards, by brute force; run in simulation and over gloo."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from hetspmd.cluster.collective_kinds import kinds_between
from hetspmd.dist import coalesced as buckets
from hetspmd.dist import collectives
from hetspmd.dist.communicator import Communicator
from hetspmd.dist.random import Randomness
from hetspmd.dist.runtime import Runtime
from hetspmd.lower import calls

GATHERS = [collectives.STARTS[kind].one for kind in kinds_between("shard", "replicated")]
SCATTERS = [collectives.STARTS[kind].one for kind in kinds_between("partial", "shard")]
EXTENTS = {
    2: [(3, 1), (0, 4), (2, 2), (0, 0)],
    3: [(3, 1, 2), (0, 4, 1), (2, 2, 2), (0, 0, 5), (0, 0, 0)],
    4: [(1, 2, 3, 4), (0, 5, 0, 1), (4, 0, 6, 0), (0, 0, 7, 0)],
}
GATHERED = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32,
    torch.int16, torch.uint8, torch.bool, torch.complex64,
]  # fmt: skip
SUMMED = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.complex64]


def check_collectives(comm: Communicator) -> int:
    """Run all cases on this rank; returns how many. Raises AssertionError where one is wrong."""
    runtime = Runtime(comm, Randomness(0, comm.rank, torch.device("cpu")))
    count = 0
    for case in _cases(runtime):
        count += case
    return count


def _whole(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Small whole numbers: sums are exact in every dtype and order."""
    g = torch.Generator().manual_seed(seed)
    values = torch.randint(0, 4, shape, generator=g)
    return values.to(dtype) * (1 + 2j) if dtype.is_complex else values.to(dtype)


def _part(whole: torch.Tensor, dim: int, extents: tuple[int, ...], rank: int) -> torch.Tensor:
    return whole.narrow(dim, sum(extents[:rank]), extents[rank])


def _same(got: torch.Tensor, want: torch.Tensor, what: str) -> int:
    assert got.dtype == want.dtype, what
    assert got.shape == want.shape, f"{what}: {got.shape} {want.shape}"
    assert torch.equal(got, want), what
    return 1


def _cases(runtime: Runtime) -> Iterator[int]:
    comm = runtime.communicator
    world, rank = comm.world, comm.rank
    for extents in EXTENTS[world]:
        for dim, other in ((0, (2,)), (1, (2, 3)), (2, (1, 2)), (0, (0,)), (0, ())):
            shape = (*other[:dim], sum(extents), *other[dim:])
            for dtype in GATHERED if dim < 2 else GATHERED[:1]:
                whole = _whole(shape, dtype, 1)
                part = _part(whole, dim, extents, rank)
                before = part.clone()
                for start in GATHERS:
                    got = calls.wait(start(runtime, part, dim, extents))
                    yield _same(got, whole, f"{start.__name__} {shape} {extents} {dtype}")
                    yield _same(part, before, "out of place")
            for dtype in SUMMED if dim < 2 else SUMMED[:1]:
                summands = [_whole(shape, dtype, 10 + r) for r in range(world)]
                total = torch.stack(summands).sum(0).to(dtype)
                mine = summands[rank].clone()
                got = calls.wait(collectives.start_all_reduce(runtime, mine))
                yield _same(got, total, f"all_reduce {shape} {dtype}")
                for start in SCATTERS:
                    got = calls.wait(start(runtime, mine, dim, extents))
                    yield _same(
                        got, _part(total, dim, extents, rank), f"{start.__name__} {shape} {extents} {dtype}"
                    )
                yield _same(mine, summands[rank], "out of place")
                for start in (
                    collectives.start_reduce_scatter,
                    collectives.start_grouped_reduce,
                    collectives.start_ring_reduce,
                ):
                    got = calls.wait(start(runtime, summands[rank].clone(), dim, extents, spare=True))
                    yield _same(
                        got,
                        _part(total, dim, extents, rank),
                        f"{start.__name__} in place {shape} {extents} {dtype}",
                    )
                got = calls.wait(collectives.start_all_reduce(runtime, mine, spare=True))
                yield _same(got, total, f"all_reduce in place {shape} {dtype}")
        for source, target in ((0, 1), (1, 0), (0, 2), (2, 1)):
            for others in EXTENTS[world]:
                sizes = [2, 2, 2]
                sizes[source], sizes[target] = sum(extents), sum(others)
                for dtype in (torch.float32, torch.bool, torch.int16):
                    whole = _whole(tuple(sizes), dtype, 3)
                    part = _part(whole, source, extents, rank)
                    got = calls.wait(
                        collectives.start_all_to_all(runtime, part, source, target, extents, others)
                    )
                    yield _same(
                        got, _part(whole, target, others, rank), f"all_to_all {sizes} {extents} {others}"
                    )
    for extents in EXTENTS[world]:
        for others in EXTENTS[world]:
            if sum(extents) != sum(others):
                continue
            for dim, rest in ((0, (2,)), (1, (2, 3)), (2, (1, 2)), (0, (0,)), (0, ())):
                shape = (*rest[:dim], sum(extents), *rest[dim:])
                for dtype in GATHERED if dim == 1 else GATHERED[:1]:
                    whole = _whole(shape, dtype, 5)
                    part = _part(whole, dim, extents, rank)
                    before = part.clone()
                    got = calls.wait(collectives.start_rebalance(runtime, part, dim, extents, others))
                    want = _part(whole, dim, others, rank)
                    yield _same(got, want, f"rebalance {shape} {extents} {others} {dtype}")
                    yield _same(part, before, "out of place")
    yield from _buckets(runtime)
    # Several at once, waited for in another order; a non-contiguous operand; a scalar.
    whole = _whole((6, 4), torch.float32, 7)
    first = collectives.start_all_reduce(runtime, whole.t())
    second = collectives.start_all_gather(runtime, whole.t()[:, :1], 1, (1,) * world)
    third = collectives.start_all_reduce(runtime, whole.new_tensor(2.0))
    yield _same(third.wait(), whole.new_tensor(2.0 * world), "scalar")
    yield _same(second.wait(), whole.t()[:, :1].expand(4, world), "gather")
    yield _same(first.wait(), whole.t() * world, "non-contiguous")
    yield from _rings(runtime)


def _rings(runtime: Runtime) -> Iterator[int]:
    """Rings of several chunks and of one, with other collectives between them, all on their way at a time."""
    world, rank = runtime.communicator.world, runtime.communicator.rank
    started = []
    for turn in range(9):
        extents = EXTENTS[world][turn % len(EXTENTS[world])]
        width = (100_000, 3)[turn % 2]
        summands = [_whole((sum(extents), width), torch.float32, 10 * turn + r) for r in range(world)]
        total = torch.stack(summands).sum(0)
        own = _part(total, 0, extents, rank)
        start = (collectives.start_ring_reduce, collectives.start_ring_gather, collectives.start_all_reduce)[
            turn % 3
        ]
        if start is collectives.start_all_reduce:
            started.append((start(runtime, summands[rank]), total))
        elif start is collectives.start_ring_gather:
            started.append((start(runtime, own, 0, extents), total))
        else:
            spare = {"spare": True} if turn == 3 else {}
            started.append((start(runtime, summands[rank], 0, extents, **spare), own))
    for turn, (pending, want) in enumerate(started):
        yield _same(pending.wait(), want, f"one of several rings and others, number {turn}")


def _buckets(runtime: Runtime) -> Iterator[int]:
    """Tensors of several shapes, cut along several dims at several extents, in one bucket each."""
    comm = runtime.communicator
    world, rank = comm.world, comm.rank
    filled = [extents for extents in EXTENTS[world] if sum(extents)]
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
        for first in range(len(filled)):
            places = [(dim, filled[(first + k) % len(filled)]) for k, dim in enumerate((0, 1, 2, 0))]
            shapes = [
                (*rest[:dim], sum(extents), *rest[dim:])
                for (dim, extents), rest in zip(places, ((2,), (2, 3), (1, 2), ()), strict=True)
            ]
            summands = [
                [_whole(s, dtype, 20 + 9 * r + k) for k, s in enumerate(shapes)] for r in range(world)
            ]
            totals = [torch.stack(same).sum(0).to(dtype) for same in zip(*summands, strict=True)]
            mine = [tensor.clone() for tensor in summands[rank]]
            sent = [mine[0].t().contiguous().t(), *mine[1:]]
            parts = [_part(t, dim, extents, rank) for t, (dim, extents) in zip(mine, places, strict=True)]
            gathered = [
                torch.cat([_part(summands[r][k], *place, r) for r in range(world)], place[0])
                for k, place in enumerate(places)
            ]
            reduced = buckets.start_all_reduces(runtime, [*sent, mine[0].new_tensor(2.0)])
            scattered = buckets.start_reduce_scatters(runtime, sent, places)
            whole = buckets.start_all_gathers(runtime, parts, places)
            for k in (2, 0, 3, 1):
                dim, extents = places[k]
                what = f"of a bucket: {shapes[k]} {places[k]} {dtype}"
                yield _same(calls.take(whole, k), gathered[k], f"all_gather {what}")
                yield _same(calls.take(reduced, k), totals[k], f"all_reduce {what}")
                want = _part(totals[k], dim, extents, rank)
                yield _same(calls.take(scattered, k), want, f"reduce_scatter {what}")
                yield _same(mine[k], summands[rank][k], "out of place")
            yield _same(calls.take(reduced, 4), mine[0].new_tensor(2.0 * world), "scalar of a bucket")
