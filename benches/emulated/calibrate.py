"""Measuring an emulated cluster: what its devices and its network achieve, as a cluster file.

Every rank measures at its CPU share while the others do the same, as in a step:

    flops              2 k^3 per product of two k x k float32 matrices, over its seconds
    memory_bandwidth   12 bytes per element of a sum of two tensors too large for the nearest caches
    launch             seconds of an op on 16 elements

The network has one latency L and one bandwidth b in the cost model (:mod:`hetspmd.cost.model`), in which every
collective over n ranks of a tensor of E bytes, evenly divided, takes ``a L + c E / b``, with

    all_reduce a = 2, c = 2 (n - 1) / n;    all_gather, reduce_scatter a = 1, c = (n - 1) / n;
    grouped_broadcast, grouped_reduce a = n, c = 1;    all_to_all a = 1, c = (n - 1) / n^2

so the two follow from the measured seconds t of all of them by least squares in the relative error,
``min sum ((a L + c E / b) / t - 1)^2``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from emulated.launch import Workers
from emulated.worker import Context
from hetspmd.cluster.cluster import Cluster
from hetspmd.cluster.devices import Device, Network
from hetspmd.codec.files import write_atomically
from hetspmd.dist import collectives
from hetspmd.dist.pending import Pending
from hetspmd.dist.process_group import ProcessGroupCommunicator
from hetspmd.dist.random import Randomness
from hetspmd.dist.runtime import Runtime

KINDS = (
    "all_reduce", "all_gather", "reduce_scatter", "grouped_broadcast", "grouped_reduce", "all_to_all",
)  # fmt: skip
SIZES = (4 << 10, 64 << 10, 1 << 20, 4 << 20)
"""Bytes of the whole tensor."""


@dataclass(frozen=True, slots=True)
class Sample:
    """Seconds of one collective of a tensor of ``size`` bytes: from when the last rank starts it, after a barrier,
    to when the last rank has its result; the mean of several without the largest and the smallest."""

    kind: str
    size: int
    seconds: float


@dataclass(frozen=True)
class Calibration:
    """``cluster`` is what the cost model takes; ``samples`` are the collectives that its network was fitted to."""

    cluster: Cluster
    samples: tuple[Sample, ...]

    def text(self) -> str:
        """The cluster file, with the samples and what the fit makes of them as comments."""
        lines = ["# Measured on an emulated cluster.", self.cluster.to_text().rstrip()]
        network = self.cluster.network
        if network is not None:
            lines.append("# kind, bytes: measured seconds, those of the fit")
            for s in self.samples:
                a, c = coefficients(s.kind, self.cluster.world)
                fitted = a * network.latency + c * s.size / network.bandwidth
                lines.append(f"# {s.kind}, {s.size}: {s.seconds:.6f}, {fitted:.6f}")
        return "\n".join(lines) + "\n"

    def write(self, path: Path) -> None:
        """Write the cluster file (beside the target, then renamed)."""
        write_atomically(path, self.text())


def calibrate(
    workers: Workers, *, seconds: float = 0.5, sizes: Sequence[int] = SIZES, repeats: int = 7
) -> Calibration:
    """Measure the cluster on which the workers run; each local quantity for about ``seconds``."""
    world = workers.cluster.world
    local = workers.run("emulated.calibrate:local", seconds=seconds)
    devices = tuple(
        Device(
            f"rank{rank}", {"default": found["flops"]}, memory_bandwidth=found["memory_bandwidth"],
            launch=found["launch"],
        )
        for rank, found in enumerate(local)
    )  # fmt: skip
    if world == 1:
        return Calibration(Cluster(devices), ())
    stamps = workers.run("emulated.calibrate:network", sizes=list(sizes), repeats=repeats)
    samples = []
    for index, (kind, size) in enumerate((k, s) for k in KINDS for s in sizes):
        times = [max(of) for of in zip(*(rank[index] for rank in stamps), strict=True)]
        took = sorted(end - start for start, end in zip(times[::2], times[1::2], strict=True))
        samples.append(Sample(kind, size, fmean(took[1:-1] or took)))
    return Calibration(Cluster(devices, fitted(samples, world)), tuple(samples))


def coefficients(kind: str, world: int) -> tuple[float, float]:
    """``(a, c)`` of a collective of an evenly divided tensor. Raises KeyError for a kind that there is not."""
    part = (world - 1) / world
    return {
        "all_reduce": (2.0, 2 * part),
        "all_gather": (1.0, part),
        "reduce_scatter": (1.0, part),
        "grouped_broadcast": (float(world), 1.0),
        "grouped_reduce": (float(world), 1.0),
        "all_to_all": (1.0, part / world),
    }[kind]


def fitted(samples: Sequence[Sample], world: int) -> Network:
    """The network whose latency and bandwidth, both positive, fit the samples best."""
    table = np.array([(*coefficients(s.kind, world), s.size, s.seconds) for s in samples])
    columns = np.stack([table[:, 0] / table[:, 3], table[:, 1] * table[:, 2] / table[:, 3]], axis=1)
    ones = np.ones(len(columns))
    both = np.linalg.lstsq(columns, ones, rcond=None)[0]
    if both.min() > 0:
        latency, inverse = map(float, both)
    else:
        alone = (columns * ones[:, None]).sum(axis=0) / (columns**2).sum(axis=0)
        error = [((columns[:, i] * alone[i] - 1) ** 2).sum() for i in range(2)]
        least = (1e-7, 1e-12)
        latency, inverse = (float(alone[0]), least[1]) if error[0] < error[1] else (least[0], float(alone[1]))
    return Network(1 / inverse, latency)


def local(context: Context, *, seconds: float) -> dict[str, float]:
    """On each rank: FLOP/s, bytes/s and seconds per op at its CPU share."""
    k, large = 384, 4 << 20
    a, b, c = torch.randn(k, k), torch.randn(k, k), torch.empty(k, k)
    x, y, z = torch.ones(large), torch.ones(large), torch.ones(large)
    tiny = torch.ones(16)

    def small() -> None:
        for _ in range(100):
            torch.add(tiny, tiny)

    context.throttle(True)
    product = _seconds_of(lambda: torch.mm(a, b, out=c), seconds)
    total = _seconds_of(lambda: torch.add(x, y, out=z), seconds)
    launch = _seconds_of(small, seconds) / 100
    return {"flops": 2 * k**3 / product, "memory_bandwidth": 3 * 4 * large / total, "launch": launch}


def _seconds_of(call: Callable[[], object], seconds: float) -> float:
    """Mean seconds of a call, over ``seconds``: the mean, for a quota stops a rank for most of some calls."""
    call()
    start, calls = time.monotonic(), 0
    while True:
        call()
        calls += 1
        passed = time.monotonic() - start
        if passed >= seconds and calls >= 3:
            return passed / calls


def network(context: Context, *, sizes: Sequence[int], repeats: int) -> list[list[float]]:
    """On each rank: when each collective of each kind and size began and ended, in turns."""
    runtime = Runtime(ProcessGroupCommunicator(), Randomness(0, context.rank, torch.device("cpu")))
    context.throttle(True)
    found = []
    for kind in KINDS:
        for size in sizes:
            call = _collective(runtime, kind, size, context)
            call()
            stamps = []
            for _ in range(repeats):
                dist.barrier()
                stamps.append(time.monotonic())
                call()
                stamps.append(time.monotonic())
            found.append(stamps)
    return found


def _collective(runtime: Runtime, kind: str, size: int, context: Context) -> Callable[[], Any]:
    """A call of the runtime's own collective on an evenly divided tensor of about ``size`` bytes."""
    n, rank = context.world, context.rank
    columns = 8 * n
    rows = max(1, size // (4 * columns * n)) * n
    whole, extents = torch.ones(rows, columns), [rows // n] * n
    shard = whole[rank * extents[0] : (rank + 1) * extents[0]].clone()
    starts: dict[str, Callable[[], Pending]] = {
        "all_reduce": lambda: collectives.start_all_reduce(runtime, whole),
        "all_gather": lambda: collectives.start_all_gather(runtime, shard, 0, extents),
        "reduce_scatter": lambda: collectives.start_reduce_scatter(runtime, whole, 0, extents),
        "grouped_broadcast": lambda: collectives.start_grouped_broadcast(runtime, shard, 0, extents),
        "grouped_reduce": lambda: collectives.start_grouped_reduce(runtime, whole, 0, extents),
        "all_to_all": lambda: collectives.start_all_to_all(runtime, shard, 0, 1, extents, [columns // n] * n),
    }
    return lambda: starts[kind]().wait()
