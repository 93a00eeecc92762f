"""Training with captures and without, compared bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from ranks import loss_of, on_ranks, own_gradient
from small_models import Case
from small_plans import cluster

from hetspmd.dist.random import Randomness
from hetspmd.optimize.compiler import plan_for
from hetspmd.plan.plan import Plan
from hetspmd.run.module import HAP
from hetspmd.run.simulated_capture import SimulatedCapturer
from hetspmd.search.constraints import Constraints

Body = Callable[[HAP, Case], Any]


def tensors_of(output: Any) -> list[torch.Tensor]:
    return [t for t in torch.utils._pytree.tree_leaves(output) if isinstance(t, torch.Tensor)]


def trained(hap: HAP, c: Case, steps: int = 4, **adamw: Any) -> Any:
    """What a loop finds that holds on to all that it is given: it must stay as it was."""
    optimizer = torch.optim.AdamW(hap.parameters(), lr=0.01, eps=1e-4, **adamw)
    found, held = [], []
    for _ in range(steps):
        optimizer.zero_grad()
        output = hap(**c.batch)
        loss = loss_of(output)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(hap.parameters(), 0.5)
        gradients = [g for p in hap.parameters() if (g := own_gradient(p)) is not None]
        mine = [*tensors_of(output), norm, *gradients]
        held.append(mine)
        found.append([t.detach().clone() for t in mine])
        optimizer.step()
    for now, then in zip(held, found, strict=True):
        equal([t.detach() for t in now], then)
    hap.eval()
    with torch.no_grad():
        last = [t.clone() for _ in range(3) for t in tensors_of(hap(**c.batch))]
    hap.train()
    return found, last, hap.full_tensors()


def equal(got: Any, want: Any) -> None:
    torch.testing.assert_close(got, want, rtol=0.0, atol=0.0, equal_nan=True)


def plan_of(c: Case) -> Plan:
    return plan_for(c.theory, cluster(1), Constraints(), (1.0,))


def both(c: Case, body: Body = trained, **options: Any) -> HAP:
    """``body`` on one device with captures, and without; the module with captures."""
    plan = options.pop("plan", None) or plan_of(c)
    haps = []
    for asked in (SimulatedCapturer(), False):
        model = copy.deepcopy(c.model)
        hap = HAP(model, plan.cluster, plan=plan, check_plan=False, cuda_graphs=asked, **options)
        hap.use_randomness(Randomness(1, 0, torch.device("cpu")))
        hap.run_lowered()
        haps.append(hap)
    got, want = (body(hap, c) for hap in haps)
    equal(got, want)
    return haps[0]


def steps_of(hap: HAP, plan: int = 0) -> dict[str, int]:
    return dict(hap.cuda_graphs_report().plans[plan].steps)


def all_captured(hap: HAP) -> bool:
    return all(p.captured == p.stretches > 0 for p in hap.cuda_graphs_report().plans)


def compared(c: Case, plan: Any, body: Body = trained, **options: Any) -> list[str]:
    """A plan on its ranks with captures and without; each rank's report."""

    def run(hap: HAP) -> Any:
        hap.use_randomness(Randomness(1, hap.rank, torch.device("cpu")))
        return body(hap, c), str(hap.cuda_graphs_report())

    got = on_ranks(c, plan, run, cuda_graphs=SimulatedCapturer(), **options)
    want = on_ranks(c, plan, run, **options)
    equal([result for result, _ in got], [result for result, _ in want])
    return [report for _, report in got]


def sgd(hap: HAP) -> torch.optim.Optimizer:
    return torch.optim.SGD(hap.parameters(), lr=0.1)


def gradients(hap: HAP) -> list[torch.Tensor | None]:
    found = [own_gradient(p) for p in hap.parameters()]
    return [None if g is None else g.clone() for g in found]


def accumulated(hap: HAP, c: Case) -> Any:
    """Gradients that accumulate over two steps, and a graph that is kept for a second backward."""
    optimizer, found = sgd(hap), []
    for number in range(5):
        if number != 2:
            hap.zero_grad(set_to_none=number % 2 == 0)
        for _ in range(2):
            loss = loss_of(hap(**c.batch))
            (loss / 2).backward(retain_graph=True)
            (loss * 3).backward()
            found += gradients(hap)
        optimizer.step()
    return found
