"""Gloo ranks of a small model, forked from a launcher that imports and plans once; they end as a script does."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path

import torch
from small_models import MLP, Case, case
from small_plans import random_plan

from hetspmd.plan.plan import Plan
from hetspmd.trace.compat.joint import exporter

__all__ = ["WORLD", "exit_statuses", "planned"]

WORLD, AT_ONCE = 3, 4


def planned(folder: Path) -> tuple[Case, Plan] | None:
    """A model with its batch, and a plan for all ranks; None in a process that has made the plan, which ends."""
    exporter()  # which no rank imports again then
    planner = os.fork()  # autograd, which a trace starts, must not run before a fork
    if planner == 0:
        random_plan(case("mlp", torch.float32), WORLD, 2).save(folder / "plan.json")
        return None
    assert os.waitpid(planner, 0)[1] == 0
    plan = Plan.load(folder / "plan.json")
    _ = plan.theory, plan.digest
    torch.manual_seed(0)
    labels = torch.tensor([0, 1, -100, 3, 4, -100, 2, 2, 1])
    return Case(MLP(), {"x": torch.randn(9, 6), "labels": labels}, plan.theory), plan


def exit_statuses(
    body: Callable[[int, int, int], None], runs: int, seconds: float
) -> list[int | None] | None:
    """Call ``body`` with a run, a rank and a free port in a process of each rank of each run, some runs at a time.

    Returns how the processes ended, None of those that had to be killed after ``seconds``. In such a process itself
    returns None instead: it ends.
    """
    statuses: list[int | None] = []
    for first in range(0, runs, AT_ONCE):
        children = []
        for run in range(first, min(first + AT_ONCE, runs)):
            port = _free_port()
            for rank in range(WORLD):
                pid = os.fork()
                if pid == 0:
                    body(run, rank, port)
                    return None
                children.append(pid)
        statuses += _ends(children, seconds)
    return statuses


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


def _ends(children: list[int], seconds: float) -> list[int | None]:
    ended: dict[int, int] = {}
    end = time.time() + seconds
    while len(ended) < len(children) and time.time() < end:
        for pid in children:
            if pid not in ended and (done := os.waitpid(pid, os.WNOHANG))[0]:
                ended[pid] = os.waitstatus_to_exitcode(done[1])
        time.sleep(0.05)
    for pid in children:
        if pid not in ended:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    return [ended.get(pid) for pid in children]
