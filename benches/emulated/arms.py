"""What runs on each rank: a training step done by hetspmd's plan, by DDP, by FSDP2, or on one device alone.

A data-parallel rank r takes some of the batch's rows. Its model returns the mean over them, so with W_r the weight
of its rows (images, or labelled tokens), W that of all, n ranks, and the mean over ranks that DDP and FSDP take,

    scale_r = n W_r / W

times its loss has the gradient of the global loss, and the sum of ``loss_r W_r / W`` is that loss.

Ranks stamp the end of every step with the machine's monotonic clock, which they share. A step's seconds are from
the last rank's end of the step before to the last rank's end of it, in the steady state of a training run:
nothing but the arm's own collectives makes ranks wait for each other.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from emulated.accumulation import Part, Setting, begin, fully_sharded, micro_batches, recompute_blocks
from emulated.cluster import EmulatedCluster
from emulated.launch import Workers
from emulated.memory import LiveBytes, ResidentPeak
from emulated.spec import EmulationError
from emulated.worker import Context, find
from emulated.workloads import Workload

Arm = Literal["hetspmd", "ddp", "fsdp", "alone"]

COUNTED = 2
"""Steps under the memory counter: one that makes gradients and the optimizer's state, one that is counted."""

TOLERANCE = 1e-3
"""Relative difference of losses that rounding in float32 may make over a few steps."""

PLAIN = Setting()

Optimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
Autocast = Callable[[], AbstractContextManager[object]]


def autocast_to(dtype: str, device: str) -> AbstractContextManager[object]:
    """Autocast to a dtype such as ``bfloat16`` on devices of a kind; none where the dtype is ""."""
    kind = torch.device(device).type
    return torch.autocast(kind, getattr(torch, dtype)) if dtype else nullcontext()


def momentum(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """SGD with momentum: the optimizer of these arms unless another is named."""
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)


@dataclass(frozen=True)
class Measured:
    """One arm on one cluster.

    seconds         of each timed step
    losses          of every step, counted and warming ones too: the global loss
    peak_bytes      per rank: storages of all tensors at the step's peak (parameters, gradients, optimizer's
                    state, activations, buffers of collectives)
    resident_bytes  per rank: the largest resident set during the same step, over that before the arm was built
    """

    seconds: tuple[float, ...]
    losses: tuple[float, ...]
    peak_bytes: tuple[int, ...]
    resident_bytes: tuple[int, ...]

    @property
    def median(self) -> float:
        """Seconds."""
        return median(self.seconds)


def measure(
    workers: Workers, arm: Arm, workload: str, options: Mapping[str, Any] | None = None, *,
    rows: Sequence[int] | None = None, plan: str | None = None, steps: int = 5, warmup: int = 2,
) -> Measured:  # fmt: skip
    """Run an arm; the ranks of ``alone`` are the fastest one.

    ``workload`` names a function (``module:name``) that returns a Workload for ``options``. ``rows`` is how many
    rows of the batch each rank takes (ddp, fsdp), ``plan`` a plan file (hetspmd).
    """
    spec = cast(EmulatedCluster, workers.cluster).spec
    ranks = [spec.fastest] if arm == "alone" else list(range(workers.cluster.world))
    found = workers.run(
        "emulated.arms:train", ranks=ranks, arm=arm, workload=workload, options=dict(options or {}),
        rows=None if rows is None else list(rows), plan=plan, steps=steps, warmup=warmup,
    )  # fmt: skip
    ends = [max(stamps) for stamps in zip(*(f["stamps"] for f in found), strict=True)]
    if arm in ("ddp", "fsdp"):
        losses = tuple(map(sum, zip(*(f["losses"] for f in found), strict=True)))
    else:
        losses = tuple(found[0]["losses"])
    return Measured(
        tuple(after - before for before, after in pairwise(ends))[warmup:], losses,
        tuple(f["peak_bytes"] for f in found), tuple(f["resident_bytes"] for f in found),
    )  # fmt: skip


def check_losses(arms: Mapping[str, Measured], tolerance: float = TOLERANCE) -> float:
    """The largest relative difference between any arm's losses and the first's.

    Raises EmulationError if it is above the tolerance, or the arms' steps are not the same number: then at least
    one of the arms does not compute the training step.
    """
    (name, first), *others = arms.items()
    worst = 0.0
    for other, measured in others:
        if len(measured.losses) != len(first.losses):
            raise EmulationError(f"{name} made {len(first.losses)} steps, {other} {len(measured.losses)}")
        for step, (a, b) in enumerate(zip(first.losses, measured.losses, strict=True)):
            difference = abs(a - b) / max(abs(a), 1e-12)
            if not difference <= tolerance:
                raise EmulationError(f"step {step}: the loss is {a} with {name} and {b} with {other}")
            worst = max(worst, difference)
    return worst


def proportional_rows(rows: int, shares: Sequence[float]) -> list[int]:
    """``rows`` divided in proportion to the shares, by largest remainder, at least one each.

    Raises EmulationError if there are fewer rows than ranks.
    """
    if rows < len(shares):
        raise EmulationError(f"{rows} rows for {len(shares)} ranks; data parallelism needs one each")
    total = sum(shares)
    exact = [rows * s / total for s in shares]
    found = [max(1, int(e)) for e in exact]
    while sum(found) < rows:
        found[max(range(len(found)), key=lambda i: (exact[i] - found[i], -i))] += 1
    while sum(found) > rows:
        able = [i for i in range(len(found)) if found[i] > 1]
        found[min(able, key=lambda i: (exact[i] - found[i], i))] -= 1
    return found


def train(
    context: Context, *, arm: Arm, workload: str, options: dict[str, Any], rows: list[int] | None,
    plan: str | None, steps: int, warmup: int,
) -> dict[str, Any]:  # fmt: skip
    """On each rank: build the arm, count memory, then time steps at the rank's CPU share."""
    gc.collect()
    resident = ResidentPeak()
    losses: list[Tensor] = []
    with LiveBytes() as counter:
        step = build(context, arm, find(workload)(**options), rows, plan)
        for _ in range(COUNTED):
            gc.collect()
            counter.reset_peak()
            resident.reset()
            losses.append(step())
        peak, most = counter.peak, resident.peak
    context.throttle(True)
    if arm != "alone" and context.world > 1:
        dist.barrier()
    stamps = [time.monotonic()]
    for _ in range(warmup + steps):
        losses.append(step())
        stamps.append(time.monotonic())
    return {
        "stamps": stamps,
        "losses": [float(loss) for loss in losses],
        "peak_bytes": peak,
        "resident_bytes": most,
    }


def build(
    context: Context, arm: Arm, work: Workload, rows: Sequence[int] | None, plan: str | None,
    optimizer: Optimizer = momentum, setting: Setting = PLAIN, autocast: Autocast = nullcontext,
) -> Callable[[], Tensor]:  # fmt: skip
    """A function that makes one step, under ``autocast``, and returns this rank's part of the global loss, or all
    of it.

    Raises EmulationError where the rank's rows weigh nothing.
    """
    if arm == "hetspmd":
        from hetspmd.plan.plan import Plan
        from hetspmd.run.module import HAP

        assert plan is not None
        made = Plan.load(plan)
        with autocast():
            hap = HAP(work.model, made.cluster, plan=made, sync_module_states=False)
        return stepper(hap, work.batch, optimizer, autocast)
    if arm == "alone":
        return stepper(work.model, work.batch, optimizer, autocast)
    assert rows is not None
    start, count = sum(rows[: context.rank]), rows[context.rank]
    parts = micro_batches(work, start, count, setting.micro_batches)
    if not sum(part.share for part in parts) > 0:
        raise EmulationError(f"the rows of rank {context.rank} weigh nothing: its loss would be 0 / 0")
    if setting.recompute:
        recompute_blocks(work)
    parallel = _ddp(work.model) if arm == "ddp" else fully_sharded(work, context.world, setting)
    return accumulating(parallel, parts, context.world, optimizer, setting, autocast)


def _ddp(model: nn.Module) -> nn.Module:
    from torch.nn.parallel import DistributedDataParallel

    return DistributedDataParallel(model, gradient_as_bucket_view=True)


def stepper(
    model: nn.Module, batch: Mapping[str, Tensor], optimizer: Optimizer = momentum,
    autocast: Autocast = nullcontext,
) -> Callable[[], Tensor]:  # fmt: skip
    """A function that makes one step on ``batch`` and returns its loss."""
    return accumulating(model, [Part(dict(batch), 1.0)], 1.0, optimizer, PLAIN, autocast)


def accumulating(
    model: nn.Module, parts: Sequence[Part], scale: float, optimizer: Optimizer, setting: Setting,
    autocast: Autocast = nullcontext,
) -> Callable[[], Tensor]:  # fmt: skip
    """A function that makes one step on ``parts``, one after the other, each with ``scale`` times its share of the
    loss, and returns the sum of these shares."""
    updates = optimizer(model.parameters())

    def step() -> Tensor:
        updates.zero_grad()
        losses = []
        for part in parts:
            begin(model, setting, part is parts[-1])
            with autocast():
                loss: Tensor = model(**part.batch)
            factor = scale * part.share
            torch.autograd.backward(loss * factor if factor != 1.0 else loss)
            losses.append(loss.detach() * part.share)
            del loss
        updates.step()
        return torch.stack(losses).sum()

    return step
