"""What runs on each rank: the profile of its device and links, and training steps of several plans in turns.

A step's seconds are from the last rank's end of the step before to the last rank's end of it, in the steady state
of a training run: nothing but the plan's own collectives makes ranks wait for each other. The optimizer's step is
part of it. The plans take turns, a few steps each, so that what else the machine does meanwhile hits all alike.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from emulated.arms import autocast_to
from emulated.memory import LiveBytes, ResidentPeak
from emulated.worker import Context
from hetspmd.dist.process_group import ProcessGroupCommunicator
from hetspmd.plan.plan import Plan
from hetspmd.profile.cases import OpCase, together
from hetspmd.profile.measure import Options, Profile, measure, with_ops
from hetspmd.profile.session import Session
from hetspmd.rules.theory import derive
from hetspmd.run.module import HAP
from hetspmd.trace.trace import trace
from trust.models import build

COUNTED = 2
"""Steps under the memory counter: one that makes gradients and the optimizer's state, one that is counted."""


def profile(
    context: Context, *, budget: float, memory: float | None = None, device: str = "cpu",
    dtypes: Sequence[str] = ("float32",),
) -> str:  # fmt: skip
    """The cluster file that ``hetspmd profile`` writes, measured at the ranks' shares.

    ``memory``: bytes of each device, where they are not what the machine has left beside what its processes hold.
    """
    session = _session(device)
    session.communicator.exchange(None)
    context.throttle(True)
    found = measure(session, Options(budget, dtypes=tuple(dtypes)))
    if memory is not None:
        devices = tuple(replace(device, memory=memory) for device in found.cluster.devices)
        found = replace(found, cluster=replace(found.cluster, devices=devices))
    return found.to_text()


def profile_ops(
    context: Context, *, file: str, model: str, cache: str, budget: float,
    options: Mapping[str, int] | None = None, optimizer: str = "adamw", device: str = "cpu",
    autocast: str = "",
) -> str:  # fmt: skip
    """The cluster file with the times of the ops of a model (made with ``options``), as ``hetspmd profile --model
    --optimizer`` measures them. ``autocast``: the dtype to which the model is autocast, if it is."""
    os.environ["HETSPMD_CACHE"] = cache
    session = _session(device)
    before = Profile.open(file)

    def cases() -> list[OpCase]:
        if session.rank:
            return []
        network, batch = build(model, **(options or {}))
        batch = {name: value.to(session.device) for name, value in batch.items()}
        with autocast_to(autocast, session.device.type):
            return together([derive(trace(network.to(session.device), (), batch))], before.cluster)

    found = session.together("tracing the model", cases)[0]
    context.throttle(True)
    return with_ops(session, before, found, Options(budget, optimizer=optimizer)).to_text()


def _session(device: str) -> Session:
    """That of all ranks."""
    place = torch.device("cuda", torch.cuda.current_device()) if device == "cuda" else torch.device(device)
    backend = "nccl" if place.type == "cuda" else "gloo"
    return Session(ProcessGroupCommunicator(), place, backend, start=time.perf_counter())


def train(
    context: Context, *, model: str, plans: Mapping[str, str], rounds: int, steps: int
) -> dict[str, dict[str, Any]]:
    """Per plan (a plan file each): ``stamps`` of each round, one per step and one before; ``losses``; the step's
    ``peak_bytes`` and ``resident_bytes``; ``main`` and ``other``, CPU seconds of its main thread and its others."""
    steppers: dict[str, Callable[[], Tensor]] = {}
    found: dict[str, dict[str, Any]] = {}
    for name, path in plans.items():
        gc.collect()
        resident = ResidentPeak()
        losses: list[Tensor] = []
        with LiveBytes() as counter:
            steppers[name] = step = _stepper(model, path)
            for _ in range(COUNTED):
                gc.collect()
                counter.reset_peak()
                resident.reset()
                losses.append(step())
            found[name] = {"peak_bytes": counter.peak, "resident_bytes": resident.peak}
        found[name] |= {"stamps": [], "losses": losses, "main": [], "other": []}
    context.throttle(True)
    for _ in range(rounds):
        for name, step in steppers.items():
            of = found[name]
            dist.barrier()
            of["stamps"].append([time.monotonic()])
            of["losses"].append(step())
            of["stamps"][-1].append(time.monotonic())
            main, whole = time.thread_time(), time.process_time()
            for _ in range(steps):
                of["losses"].append(step())
                of["stamps"][-1].append(time.monotonic())
            main, whole = time.thread_time() - main, time.process_time() - whole
            of["main"].append(main / steps)
            of["other"].append((whole - main) / steps)
    for of in found.values():
        of["losses"] = [float(loss) for loss in of["losses"]]
    return found


def _stepper(model: str, path: str) -> Callable[[], Tensor]:
    """A function that makes one training step of a plan and returns its loss."""
    plan = Plan.load(path)
    network, batch = build(model)
    hap = HAP(network, plan.cluster, plan=plan, sync_module_states=False)
    optimizer = torch.optim.AdamW(hap.parameters(), lr=1e-4)

    def step() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = hap(**batch)
        torch.autograd.backward(loss)
        optimizer.step()
        return loss.detach()

    return step
