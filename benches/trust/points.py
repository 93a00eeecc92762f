"""Which (model, cluster, plan) points are measured: an incomplete product, so that a run ends within half an hour.

A plan is either what ``hetspmd.compile`` returns or the best program of a kind that is forced upon the search
(:mod:`hetspmd.search.constraints`) at fixed ratios.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import nn

import hetspmd
from emulated.spec import ClusterSpec
from hetspmd.optimize.compiler import plan_for
from hetspmd.plan.plan import Plan
from hetspmd.rules.theory import Theory, derive
from hetspmd.search import constraints as known
from hetspmd.search.constraints import Constraints
from hetspmd.search.search import Limits
from hetspmd.trace.trace import trace

CLUSTERS: Mapping[str, ClusterSpec] = {
    "2:1": ClusterSpec.of((2, 1), cores=0.9, rate="500Mbit/s"),
    "4:2:1:1": ClusterSpec.of((4, 2, 1, 1), cores=1.2, rate="200Mbit/s"),
    "6:1:1:1": ClusterSpec.of((6, 1, 1, 1), cores=0.9, rate="300Mbit/s"),
    "1:1:1": ClusterSpec.of((1, 1, 1), cores=1.2, rate="500Mbit/s"),
}
"""No rank has much more than half a core: one that had nearly a whole one could not catch up with what another
process takes of it now and then."""

MODELS: Mapping[str, tuple[str, ...]] = {
    "2:1": ("VGG19", "BERT", "Llama"),
    "4:2:1:1": ("ViT", "GPT-2"),
    "6:1:1:1": ("BERT-MoE",),
    "1:1:1": ("ResNet-50",),
}

LONGEST = 8.0
"""Seconds of a predicted step above which a plan is not worth its measurement."""

LIMITS = Limits(seconds=60.0)


def plans(
    model: nn.Module, batch: Mapping[str, Any], cluster: hetspmd.Cluster, dtype: str = "float32"
) -> Iterator[tuple[str, Plan]]:
    """The plans of a model on a cluster, each program once, under the name that it got first.

    ``dtype``: in whose measured FLOP/s rows are proportional.
    """
    rates = [d.rate(dtype) for d in cluster.devices]
    speeds = tuple(r / sum(rates) for r in rates)
    theory = derive(trace(model, (), dict(batch)))
    seen: list[tuple[object, ...]] = []
    for name, make in KINDS.items():
        plan = make(theory, model, dict(batch), cluster, speeds)
        same = (plan.program, plan.lengths, plan.active)
        if same not in seen and plan.cost.step_seconds <= LONGEST:
            seen.append(same)
            yield name, plan


Speeds = tuple[float, ...]
"""Of the devices, with the sum 1."""

Maker = Callable[[Theory, nn.Module, dict[str, Any], hetspmd.Cluster, Speeds], Plan]


def _compiled(
    theory: Theory, model: nn.Module, batch: dict[str, Any], cluster: hetspmd.Cluster, speeds: Speeds
) -> Plan:
    return hetspmd.compile(model, batch, cluster, time_limit=LIMITS.seconds)


def _forced(kind: Callable[[Theory], Constraints], *, even: bool = False) -> Maker:
    def make(
        theory: Theory, model: nn.Module, batch: dict[str, Any], cluster: hetspmd.Cluster, speeds: Speeds
    ) -> Plan:
        ratios = (1.0 / cluster.world,) * cluster.world if even else speeds
        return plan_for(theory, cluster, kind(theory), ratios, limits=LIMITS)

    return make


def _alone(
    theory: Theory, model: nn.Module, batch: dict[str, Any], cluster: hetspmd.Cluster, speeds: Speeds
) -> Plan:
    fastest = speeds.index(max(speeds))
    return plan_for(theory, cluster, Constraints(), (1.0,), limits=LIMITS, active=(fastest,))


KINDS: Mapping[str, Maker] = {
    "compiled": _compiled,
    "data parallel, proportional": _forced(known.data_parallel),
    "data parallel, even": _forced(known.data_parallel, even=True),
    "ZeRO, proportional": _forced(known.zero_like),
    "tensor parallel": _forced(known.tensor_parallel),
    "fastest alone": _alone,
}
"""Makers of plans, good and bad ones."""
