"""What a model and its HAP on four unlike ranks are asked alike: steps and evaluations, with parameters in forced
shards."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from small_plans import cluster
from torch import nn

from hetspmd.cluster.cluster import Cluster
from hetspmd.dist.simulated_world import run_ranks
from hetspmd.optimize.compiler import plan_for
from hetspmd.placement import shard
from hetspmd.plan.plan import Plan
from hetspmd.rules.theory import Theory, derive
from hetspmd.run.module import HAP
from hetspmd.search.constraints import Constraints
from hetspmd.trace.compat.trees import flatten
from hetspmd.trace.losses import Loss
from hetspmd.trace.trace import split_example, trace

FOUR = cluster(4, 2, 1, 1)
SHARES = (0.5, 0.25, 0.125, 0.125)


@dataclass(frozen=True)
class Asked:
    """What the ranks answered beside one device: its answers, those of each rank, and the plans that were made."""

    want: list[torch.Tensor]
    ranks: list[list[torch.Tensor]]
    plans: list[Plan]

    def error(self) -> float:
        """The largest error, relative to the largest element of its tensor, and of no less than a thousandth of all
        tensors' (what is mathematically zero is noise)."""
        peak = max((float(t.double().abs().max()) for t in self.want if t.numel()), default=0.0)
        worst = 0.0
        for got in self.ranks:
            assert [t.shape for t in got] == [t.shape for t in self.want]
            for mine, one in zip(got, self.want, strict=True):
                if not one.numel():
                    continue
                assert torch.equal(mine.isnan(), one.isnan())
                scale = max(float(one.double().abs().nan_to_num().max()), peak * 1e-3, 1e-30)
                off = (mine.double() - one.double()).abs().nan_to_num()
                worst = max(worst, float(off.max()) / scale)
        return worst

    @property
    def apart(self) -> list[set[str]]:
        """The parameters that each plan stores apart from their use."""
        return [
            {p.name for p in plan.graph.parameters if p.tensor in plan.graph.stored_apart}
            for plan in self.plans
        ]


Body = Callable[[Any], list[torch.Tensor]]


def ask(
    model: nn.Module, body: Body, *, cluster: Cluster = FOUR, plan: Plan | None = None, loss: Loss | None = None,
    **options: Any,
) -> Asked:  # fmt: skip
    """``body`` of a copy of the model, and of its HAP on each rank, made by ``plan`` or by ``options``. A body
    calls what it is given with the batch, as a user would; ``loss`` is applied for it on one device."""
    models = [copy.deepcopy(model) for _ in range(cluster.ranks)]
    want = body(alone(model, loss))
    plans: list[Plan] = []
    if plan is not None:
        _ = plan.theory, plan.digest
        options["plan"] = plan

    def rank(communicator: Any) -> list[torch.Tensor]:
        hap = HAP(
            models[communicator.rank],
            cluster,
            process_group=communicator,
            gather_outputs=True,
            loss=loss,
            **options,
        )
        found = body(hap)
        if communicator.rank == 0:
            plans.extend(plan for plan, _ in hap._plans.runners())
        return found

    return Asked(want, run_ranks(cluster.ranks, rank), plans)


def alone(model: nn.Module, loss: Loss | None) -> nn.Module:
    """A copy of the model on one device, with its loss applied if it has one outside."""
    single = copy.deepcopy(model)
    return single if loss is None else _WithLoss(single, loss)


class _WithLoss(nn.Module):
    def __init__(self, module: nn.Module, loss: Loss) -> None:
        super().__init__()
        self.module, self._loss = module, loss

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._loss(self.module, *args, **kwargs)


def module_of(run: Any) -> nn.Module:
    """The user's model."""
    module: nn.Module = run.module if isinstance(run, (HAP, _WithLoss)) else run
    return module


def tensors(output: Any) -> list[torch.Tensor]:
    """Copies of the tensors of an output."""
    return [t.detach().clone() for t in flatten(output)[0] if isinstance(t, torch.Tensor)]


def call(run: Any, batch: Any) -> Any:
    return run(**batch) if isinstance(batch, Mapping) else run(*batch)


def evaluated(run: Any, batch: Any) -> list[torch.Tensor]:
    """The outputs of an evaluation; the model is left in the mode of training."""
    run.eval()
    with torch.no_grad():
        found = tensors(call(run, batch))
    run.train()
    return found


def inferred(run: Any, batch: Any) -> list[torch.Tensor]:
    """The same under ``inference_mode``."""
    run.eval()
    with torch.inference_mode():
        found = call(run, batch)
    run.train()
    return tensors(found)


def stepped(run: Any, batch: Any) -> list[torch.Tensor]:
    """The outputs of a step in the present mode, and all gradients whole, which are then removed."""
    output = call(run, batch)
    loss_of(output).backward()
    module = module_of(run)
    if isinstance(run, HAP):
        gradients = run.full_gradients()
    else:
        gradients = {n: p.grad.clone() for n, p in module.named_parameters() if p.grad is not None}
    for p in module.parameters():
        p.grad = None
    return tensors(output) + [gradients[name] for name in sorted(gradients)]


def loss_of(output: Any) -> torch.Tensor:
    found = (
        output["loss"] if isinstance(output, Mapping) else output[0] if isinstance(output, tuple) else output
    )
    assert isinstance(found, torch.Tensor)
    return found


def with_rows(batch: Any, rows: int) -> Any:
    """The batch with another number of rows: its own, again from the first one where there are no more."""
    values = list(batch.values()) if isinstance(batch, Mapping) else list(batch)
    of = next(t.shape[0] for t in values if isinstance(t, torch.Tensor) and t.ndim)

    def cut(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or not value.ndim or value.shape[0] != of:
            return value
        return value[torch.arange(rows) % of].clone()

    if isinstance(batch, Mapping):
        return {name: cut(value) for name, value in batch.items()}
    return tuple(map(cut, batch))


def all_sharded(theory: Theory, *dims: int) -> Constraints:
    """Every parameter that can be is stored in shards of the first of these dims along which it can be."""
    forms = {}
    for p in theory.graph.parameters:
        for dim in dims:
            axis = theory.axes.axis(p.tensor, dim)
            if axis is not None and axis.units >= 2:
                forms.setdefault(p.tensor, shard(dim))
    return Constraints(forms)


def sharded_plan(
    model: nn.Module, example: Any, dims: Sequence[int], loss: Loss | None = None, cluster: Cluster = FOUR,
    shares: Sequence[float] = SHARES,
) -> Plan:  # fmt: skip
    """A training plan with everything in shards along these dims."""
    args, kwargs = split_example(example)
    theory = derive(trace(model, args, kwargs, loss=loss), quiet=True)
    constraints = all_sharded(theory, *dims)
    assert constraints.forms
    return plan_for(theory, cluster, constraints, shares)
