"""What runs on each rank: DDP's computation and communication apart, and all arms in turns.

A step is forward, backward and the optimizer's step. It lasts from the last rank's end of the step before to the
last rank's end of it; nothing but the arm's own collectives makes ranks wait for each other. The arms take turns,
so that what else the machine does meanwhile hits all alike. The first step of a turn is not timed, nor are those
in which a process takes memory that is new to it.
"""

from __future__ import annotations

import gc
import resource
import time
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from emulated.accumulation import Setting, micro_batches
from emulated.arms import Optimizer, build, stepper
from emulated.memory import give_back
from emulated.worker import Context
from versus.models import OPTIMIZERS, workload
from versus.points import CARRYING, CLOSER, LONGEST, MORE, MOST, SLOW, again, close, known, steps_of

BUCKET = 25 << 20
"""Bytes of DDP's buckets."""


def optimizer_of(model: str) -> Optimizer:
    """The optimizer of every arm."""
    return adamw if OPTIMIZERS[model] == "adamw" else momentum


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """AdamW; small steps, so that rounding does not grow."""
    return torch.optim.AdamW(parameters, lr=1e-4)


def momentum(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """SGD with momentum."""
    return torch.optim.SGD(parameters, lr=1e-3, momentum=0.9)


def hold(context: Context, *, nbytes: int) -> None:
    """Have the process hold that much memory from now on, which its allocator keeps when it is freed.

    Pages that the system has to provide first cost more than what is computed on them: on a virtual machine that
    gives free memory back to its host 4 to 15 us each, a hundred on a tenth of a core.
    """
    del context
    torch.empty(nbytes, dtype=torch.uint8).fill_(0)


LITTLE = 0.35
"""Part of the machine's memory below which an arm that is gone leaves nothing to the next."""

NEW_PAGES = 2048
"""Pages of new memory, of any rank, above which steps say how fast the kernel finds pages: 8 MB, at 75 us a page on
a third of a core ..."""
NEW_PAGES_A_SECOND = 130
"""... or as many for each second of the steps, a hundredth of them."""

STEADYING = 2
"""How often steps are timed again because they took such memory."""

WARM = 3
"""Steps after which a process holds all the memory that one takes; the pages of new memory take longer than VGG19's
arithmetic on a tenth of a core."""


def apart(
    context: Context, *, model: str, size: str, rows: list[int], repeats: int
) -> dict[str, list[float]]:
    """Seconds of a step on this rank's rows without communication, and of the all-reduces of its gradients."""
    work = workload(model, size)
    part = micro_batches(work, sum(rows[: context.rank]), rows[context.rank], 1)[0]
    step = stepper(work.model, part.batch, optimizer_of(model))
    return seconds_apart(context, step, work.model, repeats)


def seconds_apart(
    context: Context, step: Callable[[], Tensor], model: nn.Module, repeats: int
) -> dict[str, list[float]]:
    """Seconds of a step without communication, and of the all-reduces of a model's gradients."""
    for _ in range(WARM):
        step()
    total = sum(p.nbytes for p in model.parameters())
    device = next(model.parameters()).device
    sizes = [min(BUCKET, total - done) for done in range(0, total, BUCKET)]
    buckets = [torch.ones(size // 4, device=device) for size in sizes]

    def reduce() -> None:
        pending = [dist.all_reduce(bucket, async_op=True) for bucket in buckets]
        for one in pending:
            assert one is not None
            one.wait()
        synchronize(device)

    reduce()
    context.throttle(True)
    return {"computing": _times(step, repeats), "communicating": _times(reduce, repeats)}


def _times(call: Callable[[], object], repeats: int) -> list[float]:
    """Seconds of the calls; of one alone that takes longer than :data:`SLOW` on any rank."""
    found: list[float] = []
    while len(found) < repeats and (not found or _most(found[0]) <= SLOW):
        _meet()
        start = time.monotonic()
        call()
        found.append(time.monotonic() - start)
    return found


def synchronize(device: torch.device) -> None:
    """Wait until the device has done what it was asked; a CPU has."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def train(
    context: Context, *, model: str, size: str, arms: Mapping[str, Mapping[str, Any]], fastest: int,
    rounds: int, steps: int, keep: bool,
) -> dict[str, dict[str, Any]]:  # fmt: skip
    """What :func:`take_turns` finds of the arms of a model on the CPU."""

    def made(arm: Mapping[str, Any]) -> Callable[[], Tensor]:
        return build_arm(context, model, size, arm)

    return take_turns(context, arms, made, fastest=fastest, rounds=rounds, steps=steps, keep=keep)


def take_turns(
    context: Context, arms: Mapping[str, Mapping[str, Any]],
    make: Callable[[Mapping[str, Any]], Callable[[], Tensor]], *, fastest: int, rounds: int, steps: int,
    keep: bool, longest: float | None = None,
) -> dict[str, dict[str, Any]]:  # fmt: skip
    """Per arm: ``stamps`` of each turn (one before its timed steps, one after each) and the ``losses`` of its first
    two steps; both empty on a rank that has no part in it.

    ``arms``: name to ``arm`` (:mod:`emulated.arms`), ``rows``, ``plan``, and maybe ``setting``, of which ``make``
    makes a step. ``keep``: there is memory for all arms at once; otherwise an arm is made anew in each of its
    turns. ``longest``: seconds that all further turns may last (None: :data:`LONGEST`).
    """
    gc.collect()
    longest = LONGEST if longest is None else longest
    built: dict[str, Callable[[], Tensor] | None] = {}
    found: dict[str, dict[str, Any]] = {name: {"stamps": [], "losses": []} for name in arms}
    taken: dict[str, float] = {}
    paces: dict[str, list[float]] = {name: [] for name in arms}
    for turn in range(rounds + MORE + MOST):
        if turn < rounds:
            chosen = again(taken) if turn else frozenset(arms)
        elif turn == rounds:
            chosen = close({name: median(of) for name, of in paces.items()})
            since = time.monotonic()
        elif not chosen or _most(time.monotonic() - since) > longest:
            break
        elif turn >= rounds + MORE:
            if turn == rounds + MORE:
                chosen = close({name: median(of) for name, of in paces.items()}, CLOSER)
            if not chosen or known(*(paces[name] for name in chosen)):
                break
        for name, arm in arms.items():
            if name not in chosen:
                built.pop(name, None)
                continue
            losses = found[name]["losses"]
            if name not in built:
                context.throttle(False)
                alone = arm["arm"] == "alone" and context.rank != fastest
                built[name] = None if alone else make(arm)
                seconds = warm(built[name], losses)
                context.throttle(True)
            else:
                seconds = 0.0
            step = built[name]
            if seconds <= CARRYING:
                seconds = first(step, losses)
            taken.setdefault(name, seconds)
            stamps, pace = timed(step, steps_of(seconds, steps), losses)
            if step is not None:
                found[name]["stamps"].append(stamps)
            paces[name].append(pace)
            del step
            if not keep:
                del built[name]
                gc.collect()
                give_back(LITTLE)
    for of in found.values():
        of["losses"] = [float(loss) for loss in of["losses"][:2]]
    return found


def warm(step: Callable[[], Tensor] | None, losses: list[Tensor]) -> float:
    """Steps that are not timed: until one takes no memory that is new to any process, at most :data:`WARM`, and one
    of those that carry for long. The seconds of the last, the same on all ranks."""
    for _ in range(WARM):
        before = _pages()
        seconds = first(step, losses)
        if seconds > CARRYING or _most(_pages() - before) <= _allowed(seconds):
            break
    return seconds


def _allowed(seconds: float) -> float:
    """Pages that steps of so many seconds in all may take."""
    return max(NEW_PAGES, NEW_PAGES_A_SECOND * seconds)


def timed(
    step: Callable[[], Tensor] | None, count: int, losses: list[Tensor]
) -> tuple[list[float], float]:  # fmt: skip
    """Stamps of ``count`` steps, one more before them, and the slowest rank's seconds of a step, on all ranks.

    Where a rank took memory that was new to its process, the steps are made again, at most :data:`STEADYING` times:
    a month of steps takes such memory in the first few. ``step``: none on a rank that has no part in it.
    """
    left = STEADYING
    while True:
        _meet()
        before = _pages()
        stamps = [time.monotonic()]
        if step is not None:
            for _ in range(count):
                losses.append(step())
                stamps.append(time.monotonic())
        pace = _most(time.monotonic() - stamps[0]) / count
        if not left or _most(_pages() - before) <= _allowed(pace * count):
            return stamps, pace
        left -= 1


def choose(
    context: Context, *, model: str, size: str, plans: Mapping[str, str], steps: int
) -> tuple[str, dict[str, float]]:  # fmt: skip
    """Which of several plan files to take, and the seconds of a step by each, as :func:`hetspmd.tune` measures
    them; ranks are held to their shares while steps run, not while graphs are made."""
    from hetspmd.plan.plan import Plan
    from hetspmd.run.module import HAP
    from hetspmd.tune.compare import compare
    from hetspmd.tune.tune import step_seconds

    def measure(plan: Plan, best: float | None) -> list[float]:
        work = workload(model, size)
        hap = HAP(work.model, plan.cluster, plan=plan, sync_module_states=False)
        context.throttle(True)
        try:
            return step_seconds(hap, (), dict(work.batch), optimizer_of(model), steps, best)
        finally:
            context.throttle(False)
            del hap
            gc.collect()

    return compare({name: Plan.load(file) for name, file in plans.items()}, measure)


def build_arm(context: Context, model: str, size: str, arm: Mapping[str, Any]) -> Callable[[], Tensor]:
    work, setting = workload(model, size), Setting(**arm.get("setting", {}))
    return build(context, arm["arm"], work, arm["rows"], arm["plan"], optimizer_of(model), setting)


def first(step: Callable[[], Tensor] | None, losses: list[Tensor]) -> float:
    """The step that is not timed; its seconds on the slowest rank, the same on all ranks."""
    _meet()
    start = time.monotonic()
    if step is not None:
        losses.append(step())
    return _most(time.monotonic() - start)


def _pages() -> int:
    """How many pages of memory this process has taken so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


@lru_cache(maxsize=1)
def _hosts() -> dist.ProcessGroup | None:
    """The group over which hosts meet: on GPUs one of its own, so that no GPU waits for another meanwhile."""
    on_gpus = dist.is_initialized() and dist.get_backend() == "nccl"
    return dist.new_group(backend="gloo") if on_gpus else None


def _meet() -> None:
    """Wait for the hosts of all ranks."""
    group = _hosts()
    dist.barrier() if group is None else dist.barrier(group)


def _most(of: float) -> float:
    """The most of any rank, on all ranks."""
    found = torch.tensor([of], dtype=torch.float64)
    dist.all_reduce(found, op=dist.ReduceOp.MAX, group=_hosts())
    return float(found)
