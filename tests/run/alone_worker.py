"""Trials in which one of three gloo ranks calls alone what all must call; ``python alone_worker.py FOLDER TRIALS``.

A trial (JSON) is the name of a call, a place in the loop and the rank. The launcher imports and plans once, then
forks the ranks of a few trials at a time. Each rank writes what it met to ``FOLDER/TRIAL-RANK.json`` and ends as a
script does; how it ended is in ``FOLDER/statuses.json``.
"""

from __future__ import annotations

import copy
import json
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from forked_ranks import WORLD, exit_statuses, planned
from small_models import MLP, Case

import hetspmd
from hetspmd.plan.plan import Plan
from hetspmd.run.module import HAP

TIMEOUT = 30.0
Batch = dict[str, Any]
PLACES = ("before", "between", "after", "evaluation")


class Ended(Exception):
    """The rank leaves the loop."""


def scaled(hap: HAP, optimizer: torch.optim.Optimizer) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    scaler.scale(torch.zeros(()))
    scaler.unscale_(optimizer)


def another(hap: HAP, batch: Batch) -> None:
    HAP(MLP(), hap.plan.cluster, plan=hap.plan, check_plan=False, timeout=TIMEOUT)


def evaluated(hap: HAP, batch: Batch) -> None:
    hap.eval()
    with torch.no_grad():
        hap(**batch)
    hap.train()


def recorded(hap: HAP) -> None:
    with hap.record():
        pass


def other_rate(optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups[0]["lr"] = 0.5


def leave() -> None:
    raise Ended


def weight(hap: HAP) -> torch.Tensor:
    """One that lies in shards."""
    shards = hap.parameter_shards()
    return next(p for n, p in hap.module.named_parameters() if shards[n].local_shape != shards[n].shape)


Act = Callable[[HAP, torch.optim.Optimizer, Batch], Any]
ACTS: dict[str, Act] = {
    "get_total_norm": lambda h, o, b: hetspmd.get_total_norm(h),
    "clip_grad_norm_": lambda h, o, b: torch.nn.utils.clip_grad_norm_(h.parameters(), 1.0),
    "GradScaler": lambda h, o, b: scaled(h, o),
    "full_state_dict": lambda h, o, b: h.full_state_dict(),
    "full_module": lambda h, o, b: h.full_module(),
    "full_tensors": lambda h, o, b: h.full_tensors(),
    "full_gradients": lambda h, o, b: h.full_gradients(),
    "gather": lambda h, o, b: h.gather({"a.weight": h.module.get_parameter("a.weight").detach()}),
    "state_dict": lambda h, o, b: h.state_dict(),
    "optimizer.state_dict": lambda h, o, b: o.state_dict(),
    "full_optimizer_state_dict": lambda h, o, b: hetspmd.full_optimizer_state_dict(h, o),
    "record": lambda h, o, b: recorded(h),
    "HAP": lambda h, o, b: another(h, b),
    "tune": lambda h, o, b: hetspmd.tune(MLP(), b, h.plan.cluster, plans={"one": h.plan}, steps=1),
    "first step": lambda h, o, b: torch.optim.Adam(h.parameters()).step(),
    "register_hook": lambda h, o, b: weight(h).register_hook(lambda g: g * 2),
    "on_full_gradient": lambda h, o, b: hetspmd.on_full_gradient(h, weight(h), lambda g: g * 2),
    "evaluation": lambda h, o, b: evaluated(h, b),
    "a step": lambda h, o, b: h(**b)["loss"].backward(),
    "forward": lambda h, o, b: h(**b),
    "load_state_dict": lambda h, o, b: h.load_state_dict(MLP().state_dict()),
    "lr": lambda h, o, b: other_rate(o),
    "freeze": lambda h, o, b: h.module.get_submodule("a").requires_grad_(False),
    "break": lambda h, o, b: leave(),
    "dist.barrier": lambda h, o, b: dist.barrier(),
    "dist.all_reduce": lambda h, o, b: dist.all_reduce(torch.ones(5)),
}
OWN = ("break", "dist.barrier", "dist.all_reduce")
"""What the rank itself is not told of by an error of HAP: it ends, or waits in torch."""


def train(hap: HAP, optimizer: torch.optim.Optimizer, batch: Batch, act: Callable[[str], None]) -> None:
    for step in range(4):
        now = act if step == 2 else (lambda place: None)
        now("before")
        loss = hap(**batch)["loss"]
        now("between")
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        now("after")
        hap.eval()
        with torch.no_grad():
            hap(**batch)
            now("evaluation")
            hap(**batch)
        hap.train()
    hap.full_state_dict()


def rank_main(rank: int, port: int, trial: list[Any], c: Case, plan: Plan, out: Path) -> None:
    name, where, odd = trial
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=WORLD)
    hap = HAP(copy.deepcopy(c.model), plan.cluster, plan=plan, gather_state=True, timeout=TIMEOUT)
    optimizer = torch.optim.SGD(hap.parameters(), lr=1e-3, momentum=0.9)

    def act(place: str) -> None:
        if rank == odd and place == where:
            ACTS[name](hap, optimizer, c.batch)

    began, found = time.time(), {"error": "", "text": ""}
    try:
        train(hap, optimizer, c.batch, act)
    except Ended:
        found = {"error": "", "text": "left"}
    except Exception as error:
        found = {"error": type(error).__name__, "text": str(error)}
        raise SystemExit(7) from error
    finally:
        out.write_text(json.dumps({**found, "seconds": time.time() - began}))


def main(folder: Path, trials: list[list[Any]]) -> None:
    made = planned(folder)
    if made is None:
        return
    c, plan = made

    def body(index: int, rank: int, port: int) -> None:
        rank_main(rank, port, trials[index], c, plan, folder / f"{index}-{rank}.json")

    statuses = exit_statuses(body, len(trials), 4 * TIMEOUT)
    if statuses is not None:
        (folder / "statuses.json").write_text(json.dumps(statuses))


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
