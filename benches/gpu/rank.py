"""What runs on each rank of a shared GPU: plans, DDP's computation and communication apart, and all arms."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import hetspmd
from emulated.accumulation import Setting, micro_batches
from emulated.arms import autocast_to, build, stepper
from emulated.worker import Context
from emulated.workloads import Workload
from fits.report import plan_words
from gpu.machine import described
from gpu.one import free
from gpu.points import AUTOCAST
from trust.models import build as build_model
from trust.points import plans
from versus.models import workload_of
from versus.points import COMPILED
from versus.rank import optimizer_of, seconds_apart, synchronize, take_turns

Case = Mapping[str, Any]
"""``model``, its ``size``, the ``precision`` and the ``device``."""


def machine(context: Context, *, device: str) -> dict[str, str]:
    """The machine of this rank."""
    del context
    return described(device)


def autocast_of(case: Case) -> AbstractContextManager[object]:
    """What surrounds a forward of the case."""
    return autocast_to("bfloat16" if case["precision"] == AUTOCAST else "", case["device"])


@lru_cache(maxsize=1)
def _on_host(model: str, size: tuple[tuple[str, int], ...]) -> Workload:
    """Made on the CPU: what a GPU draws depends on how many multiprocessors a rank has."""
    return workload_of(*build_model(model, **dict(size)))


def workload(case: Case) -> Workload:
    """A copy of the case's model, and its batch, on the device."""
    work = _on_host(case["model"], tuple(case["size"].items()))
    network = copy.deepcopy(work.model).to(case["device"])
    batch = {name: value.to(case["device"]) for name, value in work.batch.items()}
    return Workload(network, batch, work.weights, work.blocks)


def apart(context: Context, *, case: Case, rows: list[int], repeats: int) -> dict[str, list[float]]:
    """Seconds of a step on this rank's rows without communication, and of the all-reduces of its gradients."""
    free()
    work = workload(case)
    part = micro_batches(work, sum(rows[: context.rank]), rows[context.rank], 1)[0]
    step = stepper(work.model, part.batch, optimizer_of(case["model"]), partial(autocast_of, case))
    return seconds_apart(context, _waited(step, case["device"]), work.model, repeats)


def plan(context: Context, *, case: Case, cluster: str, folder: str, forced: bool) -> dict[str, Any]:
    """hetspmd's plan of a case, or (``forced``) all those of :mod:`trust.points`.

    ``plans`` has by name the ``file`` of each, the ``predicted`` seconds and the plan's ``words``; ``rows`` are the
    batch's, ``parameters`` the bytes of the model's.
    """
    del context
    free()
    work = workload(case)
    devices = hetspmd.Cluster.load(cluster)
    dtype = "bfloat16" if case["precision"] == AUTOCAST else "float32"
    with autocast_of(case):
        if forced:
            made = dict(plans(work.model, work.batch, devices, dtype))
        else:
            made = {COMPILED: hetspmd.compile(work.model, dict(work.batch), devices)}
    found = {}
    for name, of in made.items():
        file = Path(folder) / f"{name}.json"
        of.save(file)
        words = plan_words(of, work.rows)
        found[name] = {"file": str(file), "predicted": of.cost.step_seconds, "words": words}
    parameters = sum(p.nbytes for p in work.model.parameters())
    return {"plans": found, "rows": work.rows, "parameters": parameters}


def train(
    context: Context, *, case: Case, arms: Mapping[str, Mapping[str, Any]], fastest: int, rounds: int, steps: int,
    keep: bool, longest: float,
) -> dict[str, dict[str, Any]]:  # fmt: skip
    """All arms in turns, as :func:`versus.rank.take_turns` has it."""

    def made(arm: Mapping[str, Any]) -> Callable[[], Tensor]:
        free()
        step = build(
            context, arm["arm"], workload(case), arm["rows"], arm["plan"], optimizer_of(case["model"]),
            Setting(), partial(autocast_of, case),
        )  # fmt: skip
        return _waited(step, case["device"])

    return take_turns(
        context, arms, made, fastest=fastest, rounds=rounds, steps=steps, keep=keep, longest=longest
    )


def _waited(step: Callable[[], Tensor], device: str) -> Callable[[], Tensor]:
    """The step, with the wait until the device has done it."""
    place = torch.device(device)

    def waited() -> Tensor:
        loss = step()
        synchronize(place)
        return loss

    return waited
