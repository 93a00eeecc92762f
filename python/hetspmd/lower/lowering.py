"""Plan x rank -> :class:`~hetspmd.lower.program.LocalProgram`, by the passes of :mod:`hetspmd.lower.passes`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from hetspmd.cluster.machines import machine_of, ranks_of
from hetspmd.cost.coalesce import bucket_bytes as bucket_bytes_of
from hetspmd.lower.idle import IdleEmitter
from hetspmd.lower.levels import MachineEmitter, nested_of
from hetspmd.lower.local import FlatEmitter
from hetspmd.lower.passes import Emitter, Watch, run_passes
from hetspmd.lower.program import LocalProgram
from hetspmd.placement import REPLICATE, shard
from hetspmd.program.lengths import Lengths
from hetspmd.program.level_layout import AcceleratorPlace, NestedLayout
from hetspmd.program.levels import Nested
from hetspmd.program.program import Program, Result
from hetspmd.rules.theory import Theory

if TYPE_CHECKING:
    from hetspmd.plan.plan import Plan

__all__ = ["active_ranks", "lower", "lower_place", "lower_plan"]


def active_ranks(plan: Plan) -> tuple[int, ...]:
    """The ranks that run the program, ascending; the others of the cluster are idle."""
    return ranks_of(plan.cluster, plan.active)


def lower_plan(plan: Plan, rank: int, device: torch.device, watch: Watch | None = None) -> LocalProgram:
    """The local program of a rank of the plan's cluster, be it idle, on ``device``.

    ``watch`` is shown the graphs after each pass. Raises PlanError if the program reads what it has not produced,
    or if the rows of an instruction cannot be had at once on two levels.
    """
    return run_passes(_emitter(plan, rank, device), watch)


def lower(
    theory: Theory,
    program: Program,
    lengths: Lengths,
    rank: int,
    device: torch.device,
    *,
    bucket_bytes: int = 0,
) -> LocalProgram:
    """The local program of ``rank``, among those that run the program, on ``device``.

    Small collectives share buckets of at most ``bucket_bytes`` bytes, the same on every rank.
    Constants are computed here. Raises PlanError if the program reads what it has not produced.
    """
    return run_passes(FlatEmitter(theory, program, lengths, rank, device, bucket_bytes))


def lower_place(
    theory: Theory, nested: Nested, layout: NestedLayout, at: AcceleratorPlace, device: torch.device
) -> LocalProgram:
    """The local program of one accelerator. Raises PlanError if the rows of an instruction cannot be had at
    once."""
    return run_passes(MachineEmitter(theory, nested, layout, at, device))


def _emitter(plan: Plan, rank: int, device: torch.device) -> Emitter:
    """What writes the graphs of a rank of the plan's cluster."""
    theory, cluster, ranks = plan.theory, plan.cluster, active_ranks(plan)
    if rank not in ranks:
        return IdleEmitter(theory, _left_to_idle(plan), plan.lengths, device)
    if plan.inside is None:
        size = bucket_bytes_of(cluster.part(plan.active))
        return FlatEmitter(theory, plan.program, plan.lengths, ranks.index(rank), device, size, ranks)
    machine = machine_of(cluster)[rank]
    layout = NestedLayout(theory, plan.lengths, [cluster.accelerators[j] for j in plan.active])
    at = AcceleratorPlace(plan.active.index(machine), rank - machine_of(cluster).index(machine))
    return MachineEmitter(theory, nested_of(plan), layout, at, device, plan.active, ranks)


def _left_to_idle(plan: Plan) -> Program:
    """The program as an idle rank knows it: across machines, an output that is not each rank's own is whole."""
    made = plan.program
    if plan.inside is None:
        return made
    outputs = tuple(r if r.form == shard(0) else Result(r.tensor, REPLICATE) for r in made.outputs)
    return Program(made.steps, made.loss, outputs, made.gradients, made.buffers)
