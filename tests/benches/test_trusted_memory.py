"""What a rank holds is never more than its predicted peak, however slow the links are, and hardly less.

Ranks are threads, and their links are of the two kinds of :mod:`counted_ranks`: on a prompt one each collective is
complete whenever a rank looks, on a late one none is until a rank waits for it. Between them lies what a network
does.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from counted_ranks import Late, Prompt, counted_bytes

from hetspmd.optimize.compiler import plan_for
from hetspmd.optimize.in_micro_batches import in_micro_batches
from hetspmd.plan.plan import Plan
from hetspmd.rules.theory import derive
from hetspmd.search import constraints as known
from hetspmd.trace.blocks import chooser
from hetspmd.trace.trace import trace
from trust.models import MODELS, Built
from workbench import cluster

OWN = 1 << 14
"""Bytes that a process holds whatever its plan is: coefficients of digests, results of checks, counts of steps."""
TIGHT = 0.95
"""The part of the predicted peak that is held at least."""
SIZES: dict[str, dict[str, int]] = {
    "GPT-2": {"batch": 33, "tokens": 16, "layers": 2, "vocabulary": 600},
    "Llama": {"batch": 33, "tokens": 16, "layers": 2, "vocabulary": 600},
    "BERT": {"batch": 33, "tokens": 16, "layers": 2, "vocabulary": 600},
    "BERT-MoE": {"batch": 33, "tokens": 16, "layers": 2, "vocabulary": 600},
}
SPEEDS = {"2:1": (2.0, 1.0), "4:2:1:1": (4.0, 2.0, 1.0, 1.0), "8:1:1:1": (8.0, 1.0, 1.0, 1.0)}
KINDS = {
    "data parallel": known.data_parallel,
    "ZeRO": known.zero_like,
    "tensor parallel": known.tensor_parallel,
}
QUICK = (
    ("GPT-2", "2:1", "ZeRO", 3, "all"),
    ("BERT", "8:1:1:1", "ZeRO", 1, "all"),
    ("Llama", "2:1", "tensor parallel", 1, "none"),
)


@cache
def built(name: str) -> Built:
    torch.manual_seed(0)
    model, batch = MODELS[name](**SIZES[name])
    return model.train(), batch


def plan_of(name: str, speeds: tuple[float, ...], kind: str, count: int, recompute: str) -> Plan:
    model, batch = built(name)
    traced = trace(model, (), batch, recompute=chooser(recompute))
    theory, batches = in_micro_batches(derive(traced), count)
    shares = tuple(s / sum(speeds) for s in speeds)
    roomy = cluster(*speeds)
    plan = plan_for(theory, roomy, KINDS[kind](theory), shares, batches=batches)
    # Devices that have no more memory than that see to it that they hold no more.
    memory = zip(roomy.devices, plan.cost.memory_bytes, strict=True)
    tight = replace(roomy, devices=tuple(replace(device, memory=float(n)) for device, n in memory))
    return plan_for(theory, tight, KINDS[kind](theory), shares, batches=batches)


def cases() -> list[object]:
    """All combinations; those that are not quick are slow."""
    found: list[object] = []
    for name in SIZES:
        for speeds in SPEEDS:
            for kind in KINDS:
                for count in (1, 3):
                    for recompute in ("none", "all"):
                        case = (name, speeds, kind, count, recompute)
                        marks = () if case in QUICK else pytest.mark.slow
                        found.append(pytest.param(*case, marks=marks))
    return found


@pytest.mark.parametrize(("name", "speeds", "kind", "count", "recompute"), cases())
def test_no_rank_holds_more_than_predicted(
    name: str, speeds: str, kind: str, count: int, recompute: str
) -> None:
    plan = plan_of(name, SPEEDS[speeds], kind, count, recompute)
    prompt, late = (counted_bytes(plan, built(name), link) for link in (Prompt, Late))
    for rank, predicted in enumerate(plan.cost.memory_bytes):
        held = prompt[rank], late[rank]
        assert max(held) <= predicted + OWN, (rank, held, predicted)
        assert max(held) >= TIGHT * predicted, (rank, held, predicted)
