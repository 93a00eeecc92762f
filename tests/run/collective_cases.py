"""Every collective on uneven and empty shards, by brute force; run in simulation and over gloo."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from hetspmd.run import collectives
from hetspmd.run.communicator import Communicator
from hetspmd.run.random import Randomness
from hetspmd.run.runtime import Runtime

EXTENTS = {
    2: [(3, 1), (0, 4), (2, 2), (0, 0)],
    3: [(3, 1, 2), (0, 4, 1), (2, 2, 2), (0, 0, 5), (0, 0, 0)],
    4: [(1, 2, 3, 4), (0, 5, 0, 1), (4, 0, 6, 0)],
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
                for start in (collectives.start_all_gather, collectives.start_grouped_broadcast):
                    got = collectives.wait(start(runtime, part, dim, extents))
                    yield _same(got, whole, f"{start.__name__} {shape} {extents} {dtype}")
                    yield _same(part, before, "out of place")
            for dtype in SUMMED if dim < 2 else SUMMED[:1]:
                summands = [_whole(shape, dtype, 10 + r) for r in range(world)]
                total = torch.stack(summands).sum(0).to(dtype)
                mine = summands[rank].clone()
                got = collectives.wait(collectives.start_all_reduce(runtime, mine))
                yield _same(got, total, f"all_reduce {shape} {dtype}")
                for start in (collectives.start_reduce_scatter, collectives.start_grouped_reduce):
                    got = collectives.wait(start(runtime, mine, dim, extents))
                    yield _same(
                        got, _part(total, dim, extents, rank), f"{start.__name__} {shape} {extents} {dtype}"
                    )
                yield _same(mine, summands[rank], "out of place")
        for source, target in ((0, 1), (1, 0), (0, 2), (2, 1)):
            for others in EXTENTS[world]:
                sizes = [2, 2, 2]
                sizes[source], sizes[target] = sum(extents), sum(others)
                for dtype in (torch.float32, torch.bool, torch.int16):
                    whole = _whole(tuple(sizes), dtype, 3)
                    part = _part(whole, source, extents, rank)
                    got = collectives.wait(
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
                    got = collectives.wait(collectives.start_rebalance(runtime, part, dim, extents, others))
                    want = _part(whole, dim, others, rank)
                    yield _same(got, want, f"rebalance {shape} {extents} {others} {dtype}")
                    yield _same(part, before, "out of place")
    # Several at once, waited for in another order; a non-contiguous operand; a scalar.
    whole = _whole((6, 4), torch.float32, 7)
    first = collectives.start_all_reduce(runtime, whole.t())
    second = collectives.start_all_gather(runtime, whole.t()[:, :1], 1, (1,) * world)
    third = collectives.start_all_reduce(runtime, whole.new_tensor(2.0))
    yield _same(third.wait(), whole.new_tensor(2.0 * world), "scalar")
    yield _same(second.wait(), whole.t()[:, :1].expand(4, world), "gather")
    yield _same(first.wait(), whole.t() * world, "non-contiguous")
