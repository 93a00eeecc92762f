"""Choosing among plans by measured steps.

A plan is chosen by predicted seconds, which are wrong by some per cent, and now and then by more: where two plans
are close, or a cost model knows an op or a link badly, the real cluster has the last word.
"""

from __future__ import annotations

import copy
import gc
import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Unpack

import torch
import torch.distributed as dist
from torch import nn

from hetspmd.cluster.cluster import Cluster
from hetspmd.dist.agreement import agreed_plans
from hetspmd.dist.communicator import Communicator
from hetspmd.dist.process_group import communicator_for
from hetspmd.errors import ExampleError, OptionError
from hetspmd.optimize.compile_options import CompileKeywords, parted
from hetspmd.plan.plan import Plan
from hetspmd.run.guard import check_same_batch
from hetspmd.run.module import HAP
from hetspmd.run.run_options import HapKeywords
from hetspmd.trace.compat.trees import flatten_with_names
from hetspmd.trace.losses import find_loss
from hetspmd.trace.trace import leaf_path, split_example
from hetspmd.tune.alternatives import alternatives
from hetspmd.tune.compare import compare
from hetspmd.tune.tune_thresholds import THRESHOLDS

Optimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


@dataclass(frozen=True)
class Tuned:
    """What :func:`tune` chose, and what it measured.

    Attributes:
        plan: The plan with the fewest seconds as measured; on a tie, the one that uses fewer devices.
        name: The name of that plan in ``seconds``.
        seconds: Name of each plan to the mean over its turns of the median seconds of a step.
        predicted: Name of each plan to the seconds of a step that it predicts.
    """

    plan: Plan
    name: str
    seconds: Mapping[str, float]
    predicted: Mapping[str, float]

    def __str__(self) -> str:
        width = max(len(name) for name in self.seconds)
        lines = [f"  {'plan':<{width}}  measured  predicted, seconds a step"]
        for name, seconds in self.seconds.items():
            chosen = "  chosen" if name == self.name else ""
            lines.append(f"  {name:<{width}}  {seconds:8.4f}  {self.predicted[name]:9.4f}{chosen}")
        return "\n".join(lines)


class TuneKeywords(CompileKeywords, total=False):
    """The options of :func:`tune` as keyword arguments, for type checkers and editors."""

    process_group: dist.ProcessGroup | Communicator | None
    device: torch.device | str | None
    timeout: float


def tune(
    model: nn.Module,
    example: Any,
    cluster: Cluster | Mapping[str, Any] | str | os.PathLike[str],
    *,
    optimizer: Optimizer = torch.optim.AdamW,
    steps: int = 5,
    plans: Mapping[str, Plan] | None = None,
    **options: Unpack[TuneKeywords],
) -> Tuned:
    """Train ``model`` by each of several plans and choose the fastest. Every rank must call this.

    Each plan works on a copy of the model, one after the other; the model and torch's random numbers stay as they
    are. A copy of a model on the meta device takes only the memory of its shards, which are zeros.

    A step is forward, backward and the optimizer's step, and lasts until the last rank has ended it. The
    first steps of a plan, two to five, do not count: timing starts when steps get no shorter. Plans that are
    close to the fastest have further turns, until one leads by twice the standard error of the difference, or
    they are equal to 1 %, or each has had six turns.

    Args:
        model: An unchanged module.
        example: The same batch on every rank, as for :func:`hetspmd.compile`.
        cluster: A :class:`~hetspmd.Cluster`, a dict, or the path of a cluster file.
        process_group: As of :class:`~hetspmd.HAP`.
        device: As of :class:`~hetspmd.HAP`.
        optimizer: Makes an optimizer of parameters.
        steps: How many steps a turn times.
        plans: Plans by name; by default those that hetspmd finds promising.
        timeout: Seconds, as of :class:`~hetspmd.HAP`.
        options: Further arguments of :func:`hetspmd.compile`, for the plans that hetspmd finds.

    Returns:
        The chosen plan with all measurements. On a tie it is the plan that uses fewer devices.

    Raises:
        OptionError: An option does not exist, ``steps`` is no whole number from 1, or ``plans`` is empty.
        HetspmdError: What :class:`~hetspmd.HAP` raises, on every rank alike.
    """
    named = ("model", "example", "cluster", "optimizer", "steps", "plans")
    own, compilation = parted(options, ("process_group", "device", "timeout"), named)
    _check(steps, plans)
    devices = Cluster.load(cluster)
    communicator = _joined(own.get("process_group"), devices)
    batch, timeout = split_example(example), float(own.get("timeout", 600.0))
    communicator.guard(timeout)
    _check_example(communicator, *batch)
    if plans is None:
        with communicator.busy():
            plans = agreed_plans(communicator, lambda: alternatives(model, *batch, devices, compilation))
    run = HapKeywords(
        loss=compilation.loss,
        process_group=communicator,
        device=own.get("device"),
        timeout=timeout,
        host_randomness=compilation.host_randomness,
    )

    seconds = partial(step_seconds, args=batch[0], kwargs=batch[1], optimizer=optimizer, steps=steps)
    return _fastest(plans, lambda plan: _trial(model, devices, plan, run), seconds)


def _joined(group: dist.ProcessGroup | Communicator | None, devices: Cluster) -> Communicator:
    return group if isinstance(group, Communicator) else communicator_for(group, devices.ranks)


def _fastest(
    plans: Mapping[str, Plan],
    trial: Callable[[Plan], HAP],
    seconds: Callable[..., list[float]],
) -> Tuned:
    """The fastest plan; ``seconds`` are those of a trial's steps, given the best of the others."""

    def measure(plan: Plan, best: float | None) -> list[float]:
        hap = trial(plan)
        try:
            return seconds(hap, best=best)
        finally:
            del hap
            gc.collect()

    with torch.random.fork_rng():
        chosen, measured_seconds = compare(plans, measure)
    return Tuned(
        plans[chosen], chosen, measured_seconds, {name: p.cost.step_seconds for name, p in plans.items()}
    )


def _check(steps: object, plans: Mapping[str, Plan] | None) -> None:
    """Raise OptionError for no number of steps, and for plans of which there is none."""
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise OptionError(f"steps is {steps!r}; take a whole number from 1")
    if plans is not None and not plans:
        raise OptionError("plans is empty; give at least one, or none for those that hetspmd finds")


def _trial(model: nn.Module, devices: Cluster, plan: Plan, run: HapKeywords) -> HAP:
    """A copy of the model under the plan, whose steps are only timed."""
    unchecked: HapKeywords = {"check_plan": False, "check_batches": False, "sync_module_states": False}
    hap = HAP(copy.deepcopy(model), devices, plan=plan, **(run | unchecked))
    if any(p.is_meta for p in model.parameters()):
        _zero(hap)
    return hap


def _check_example(communicator: Communicator, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Raise BatchMismatchError on every rank unless all have the same example.

    Of steps that are only timed nothing else is compared: every rank may have random parameters of its own.
    """
    leaves = flatten_with_names((args, dict(kwargs)))
    tensors = {leaf_path(name): leaf for name, leaf in leaves if isinstance(leaf, torch.Tensor)}
    check_same_batch(communicator, list(tensors.values()), list(tensors))


@torch.no_grad()
def _zero(hap: HAP) -> None:
    """Nothing is known of memory that nobody wrote: buffers may be indices."""
    for tensor in (*hap.parameters(), *hap.buffers()):
        tensor.zero_()


def step_seconds(
    hap: HAP,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    optimizer: Optimizer,
    steps: int,
    best: float | None,
) -> list[float]:
    """The slowest rank's seconds of each timed step, the same on every rank; of a plan that takes
    ``hopeless_part`` times as long as ``best``, those of the first alone."""
    updates = optimizer(list(hap.parameters()))

    def step() -> float:
        hap.everyone.exchange(None)
        began = time.perf_counter()
        updates.zero_grad()
        value = find_loss(hap(*args, **kwargs), hap.loss_function)
        if value is None:
            raise ExampleError("the model's output holds no loss to train with; give loss=")
        torch.autograd.backward(value)
        updates.step()
        if hap.device.type == "cuda":
            torch.cuda.synchronize(hap.device)
        slowest: float = max(hap.everyone.exchange(time.perf_counter() - began))
        return slowest

    return timed(step, steps, best)


def timed(step: Callable[[], float], count: int, best: float | None) -> list[float]:
    """The seconds of ``count`` steps from the first that counts on, or of that alone (see :func:`step_seconds`).
    ``step`` makes one and gives its seconds."""
    seconds = [step() for _ in range(THRESHOLDS.warm_steps)]
    while True:
        seconds.append(step())
        if (
            seconds[-1] >= THRESHOLDS.settled_part * seconds[-2]
            or len(seconds) == THRESHOLDS.latest_first_step
        ):
            break
    if best is not None and seconds[-1] > THRESHOLDS.hopeless_part * best:
        return seconds[-1:]
    return [seconds[-1], *(step() for _ in range(count - 1))]
