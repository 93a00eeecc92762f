"""Plan x rank -> :class:`~hetspmd.lower.local_program.LocalProgram`, by the passes of
:mod:`hetspmd.lower.passes`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from hetspmd.cluster.machines import machine_of, ranks_of
from hetspmd.lower.idle import IdleEmitter
from hetspmd.lower.local import ActiveEmitter
from hetspmd.lower.local_program import LocalProgram
from hetspmd.lower.passes import Emitter, Observer, run_passes
from hetspmd.lower.turns import TurnEmitter
from hetspmd.placement import REPLICATE, shard
from hetspmd.plan.check import check_step
from hetspmd.program.level_layout import LevelLayout, RankPlace
from hetspmd.program.levels import LocalSteps, Nested, one_level
from hetspmd.program.machine_turn_layout import MachineTurnLayout
from hetspmd.program.micro_batches import MicroBatches
from hetspmd.program.nested_turns import nest_turns
from hetspmd.program.nesting import nest
from hetspmd.program.program import Program, Result
from hetspmd.program.schedule_check import check_schedule
from hetspmd.program.turn_layout import TurnLayout
from hetspmd.program.turn_steps import TurnSteps, turn_steps

if TYPE_CHECKING:
    from hetspmd.plan.plan import Plan


def active_ranks(plan: Plan) -> tuple[int, ...]:
    """The ranks that run the program, ascending; the others of the cluster are idle."""
    return ranks_of(plan.cluster, plan.active)


def lower_plan(
    plan: Plan, rank: int, device: torch.device, observer: Observer | None = None, *, compiled: bool = False
) -> LocalProgram:
    """The local program of a rank of the plan's cluster, be it idle, on ``device``.

    ``observer`` is shown the graphs after each pass. ``compiled``: what lies between communications will be
    compiled. Raises PlanError if the program cannot run by its schedule, or if the rows of an instruction cannot be
    had at once on two levels.
    """
    emitter = emitter_of(plan, rank, device)
    if plan.batches is None or not isinstance(emitter, ActiveEmitter):
        return run_passes(emitter, observer, compiled=compiled)
    steps, layout = turns_of(plan, plan.batches)
    turns = TurnEmitter(steps, layout, emitter, numbers_of_turns(plan, rank))
    return run_passes(turns, observer, compiled=compiled)


def lower_place(
    steps: LocalSteps[Any, Any], layout: LevelLayout, at: RankPlace, device: torch.device
) -> LocalProgram:
    """The local program of the rank at a place. Raises PlanError if the rows of an instruction cannot be had at
    once."""
    return run_passes(ActiveEmitter(steps, layout, at, device))


def nested_of(plan: Plan) -> Nested:
    """What each accelerator does by a plan across machines."""
    assert plan.inside is not None
    return nest(plan.theory, plan.program, plan.schedule, plan.inside.program, plan.inside.bucket_bytes)


def turns_of(plan: Plan, batches: MicroBatches) -> tuple[TurnSteps, TurnLayout]:
    """What each rank does before, in and after the loop of a plan in micro-batches, and where the parts lie."""
    theory, lengths, inside = plan.theory, plan.lengths, plan.inside
    if inside is None:
        return turn_steps(theory, plan.program, plan.schedule, batches), TurnLayout(theory, batches, lengths)
    outer = plan.program, plan.schedule
    steps = nest_turns(theory, outer, batches, inside.program, inside.bucket_bytes)
    return steps, MachineTurnLayout(
        theory, batches, lengths, [plan.cluster.accelerators[j] for j in plan.active]
    )


def numbers_of_turns(plan: Plan, rank: int) -> tuple[int, ...]:
    """The micro-batches that an active rank takes: those of its device."""
    return plan.step_plan.turns(rank if plan.inside is None else machine_of(plan.cluster)[rank])


def emitter_of(plan: Plan, rank: int, device: torch.device) -> Emitter:
    """What writes the graphs of a rank of the plan's cluster, be it idle. Raises PlanError for a plan whose
    program was exchanged without its schedule, and for a step that this release does not run."""
    check_step(plan.step_plan)
    check_schedule(plan.graph, plan.program, plan.schedule)
    theory, cluster, ranks = plan.theory, plan.cluster, active_ranks(plan)
    if rank not in ranks:
        return IdleEmitter(theory, _left_to_idle(plan), plan.lengths, device)
    if plan.inside is None:
        steps = one_level(theory, plan.program, plan.schedule)
        layout, at = LevelLayout(theory, plan.lengths), RankPlace(ranks.index(rank))
        awaited = plan.step.awaited(plan.lengths, at.machine)
        return ActiveEmitter(steps, layout, at, device, plan.active, ranks, awaited)
    machine = machine_of(cluster)[rank]
    layout = LevelLayout(theory, plan.lengths, [cluster.accelerators[j] for j in plan.active])
    at = RankPlace(plan.active.index(machine), rank - machine_of(cluster).index(machine))
    return ActiveEmitter(nested_of(plan), layout, at, device, plan.active, ranks)


def _left_to_idle(plan: Plan) -> Program:
    """The program as an idle rank knows it: across machines, an output that is not each rank's own is whole."""
    program = plan.program
    if plan.inside is None:
        return program
    outputs = tuple(r if r.form == shard(0) else Result(r.tensor, REPLICATE) for r in program.outputs)
    return Program(program.steps, program.loss, outputs, program.gradients, program.buffers)
