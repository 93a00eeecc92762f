"""Trials in which one of four gloo ranks fails; ``python fault_worker.py FOLDER TRIALS`` (JSON) writes results.

The launcher imports and plans once, then forks four ranks for every trial. Each rank writes what it met to
``FOLDER/TRIAL-RANK.json`` and ends as a script does; the launcher kills or stops the victim from outside, and
writes down when each rank was gone.
"""

from __future__ import annotations

import copy
import json
import os
import signal
import socket
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from small_models import MLP, Case, case
from small_plans import cluster, random_plan

from hetspmd.errors import RankFailedError
from hetspmd.optimize.compiler import plan_for
from hetspmd.plan.plan import Plan
from hetspmd.run.module import HAP
from hetspmd.search.constraints import Constraints
from hetspmd.trace.compat.joint import exporter
from hetspmd.trace.compat.tensors import TorchDispatchMode

WORLD = 4
STEPS_BEFORE = 3
LONE = 1
"""The active rank of the trials whose plan leaves the others idle."""


class Broken(TorchDispatchMode):
    """Matrix products fail."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "mm" in func.__name__:
            raise RuntimeError("the device is broken")
        return func(*args, **(kwargs or {}))


def rank_main(rank: int, port: int, trial: dict[str, Any], c: Case, plan: Plan, out: Path) -> None:
    """Train until something happens; the victim of a trial of this kind does it to itself."""
    kind, mine = trial["kind"], rank == trial["victim"]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=WORLD)
    hap = HAP(copy.deepcopy(c.model), plan.cluster, plan=plan, timeout=trial["timeout"])
    optimizer = torch.optim.SGD(hap.parameters(), lr=1e-3)
    found: dict[str, Any] = {}
    try:
        for step in range(10**6):
            if step == STEPS_BEFORE:
                Path(f"{out}.ready").touch()
            if step > STEPS_BEFORE and mine and kind == "raise":
                raise ValueError("the loader is broken")
            if step > STEPS_BEFORE and mine and kind == "leave":
                return
            if step == STEPS_BEFORE + 1 and mine and kind == "elsewhere":
                time.sleep(4.0 * trial["timeout"])
            if step == STEPS_BEFORE + 1 and mine and kind == "busy":
                with hap.everyone.busy():
                    time.sleep(2.0 * trial["timeout"])
            if step == STEPS_BEFORE + 4 and kind == "busy":
                found = {"error": ""}
                return
            optimizer.zero_grad()
            broken = step > STEPS_BEFORE and mine and kind == "inside"
            with Broken() if broken else nullcontext():
                loss = hap(**c.batch)["loss"]
            if step > STEPS_BEFORE and mine and kind == "backward":
                hap.module.a.weight.register_hook(fail)
            loss.backward()
            optimizer.step()
    except RankFailedError as error:
        found = {
            "error": "RankFailedError", "ranks": error.ranks, "reason": error.reason, "where": error.where,
            "call": error.call, "text": str(error),
        }  # fmt: skip
        raise SystemExit(7) from error
    except RuntimeError as error:
        found = {"error": type(error).__name__, "text": str(error), "notes": getattr(error, "__notes__", [])}
        raise SystemExit(8) from error
    finally:
        out.write_text(json.dumps({**found, "time": time.time()}))


def fail(_gradient: torch.Tensor) -> None:
    raise ArithmeticError("of the backward")


def run_trial(index: int, trial: dict[str, Any], folder: Path, c: Case, plan: Plan) -> dict[str, Any] | None:
    """Fork the ranks and do it to the victim; None in a rank."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    children: dict[int, int] = {}
    for rank in range(WORLD):
        pid = os.fork()
        if pid == 0:
            rank_main(rank, port, trial, c, plan, folder / f"{index}-{rank}.json")
            return None
        children[rank] = pid
    began = time.time()
    while not all((folder / f"{index}-{rank}.json.ready").exists() for rank in range(WORLD)):
        time.sleep(0.01)
        if time.time() - began > 60:
            for pid in children.values():
                os.kill(pid, signal.SIGKILL)
            raise SystemExit("the ranks did not begin to train")
    time.sleep(trial.get("delay", 0.0))
    began = time.time()
    if trial["kind"] == "kill":
        os.kill(children[trial["victim"]], signal.SIGKILL)
    if trial["kind"] == "stop":
        os.kill(children[trial["victim"]], signal.SIGSTOP)
    status: dict[str, Any] = {}
    ended: dict[str, float] = {}
    stopped = trial["victim"] if trial["kind"] == "stop" else None
    while len(status) < WORLD - (stopped is not None) and time.time() - began < 60:
        for rank, pid in children.items():
            if rank != stopped and str(rank) not in status:
                done, code = os.waitpid(pid, os.WNOHANG)
                if done:
                    status[str(rank)] = os.waitstatus_to_exitcode(code)
                    ended[str(rank)] = time.time() - began
        time.sleep(0.01)
    for rank, pid in children.items():
        if str(rank) not in status:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    return {"began": began, "status": status, "ended": ended}


def main(folder: Path, trials: list[dict[str, Any]]) -> None:
    """All trials; ``FOLDER/trials.json``."""
    exporter()  # which no rank imports again then
    planner = os.fork()  # autograd, which a trace starts, must not run before a fork
    if planner == 0:
        small = case("mlp", torch.float32)
        random_plan(small, WORLD, 2).save(folder / "plan.json")
        speeds = cluster(*range(1, WORLD + 1))
        plan_for(small.theory, speeds, Constraints(), (1.0,), active=(LONE,)).save(folder / "lone.json")
        return
    assert os.waitpid(planner, 0)[1] == 0
    plans = [Plan.load(folder / f"{name}.json") for name in ("plan", "lone")]
    for plan in plans:
        _ = plan.theory, plan.digest
    torch.manual_seed(0)
    labels = torch.tensor([0, 1, -100, 3, 4, -100, 2, 2, 1])
    c = Case(MLP(), {"x": torch.randn(9, 6), "labels": labels}, plans[0].theory)
    results = []
    for index, trial in enumerate(trials):
        found = run_trial(index, trial, folder, c, plans[bool(trial.get("lone"))])
        if found is None:
            return
        results.append(found)
    (folder / "trials.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
