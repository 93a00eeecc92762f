"""Programs that no plan is of, with the schedule that a plan of them would have."""

from __future__ import annotations

from typing import Any

import torch

from hetspmd.cost.memory import Holdings
from hetspmd.cost.model import CostModel
from hetspmd.cost.simulator import TwoStreams
from hetspmd.cost.step import StepModel
from hetspmd.lower import LocalProgram, lower_place
from hetspmd.plan.plan import Plan
from hetspmd.plan.reports import Inside
from hetspmd.plan.step_plan import Fragment, StepPlan
from hetspmd.program.lengths import Lengths, Matrix
from hetspmd.program.level_layout import LevelLayout, RankPlace
from hetspmd.program.levels import Nested, one_level
from hetspmd.program.nesting import nest
from hetspmd.program.program import Program
from hetspmd.program.schedule import LocalOrder, Schedule, make_schedule
from hetspmd.rules.theory import Theory


def order_of(
    theory: Theory, program: Program, bucket_bytes: int = 0, *, prefetch_distance: int = 1
) -> LocalOrder:
    """The steps of the two local graphs, in order."""
    schedule = make_schedule(theory, program, bucket_bytes, prefetch_distance=prefetch_distance)
    return schedule.steps(program)


def streams_of(model: CostModel, program: Program, *, idle: float = 0.0) -> TwoStreams:
    """The simulation of a program's step."""
    return StepModel(model, program, idle=idle).streams


def simulated_seconds(
    model: CostModel, program: Program, lengths: Lengths, *, idle: float = 0.0, prefetch_distance: int = 1
) -> float:
    """Simulated seconds of a program's step at integer lengths."""
    step = StepModel(model, program, idle=idle, prefetch_distance=prefetch_distance)
    return step.streams.seconds(model.shares(lengths))


def holdings_of(theory: Theory, program: Program, bucket_bytes: int = 0, **options: Any) -> Holdings:
    """What a program holds from when to when."""
    return Holdings(theory, program, make_schedule(theory, program, bucket_bytes), **options)


def lower(
    theory: Theory,
    program: Program,
    lengths: Lengths,
    rank: int,
    device: torch.device,
    *,
    bucket_bytes: int = 0,
    schedule: Schedule | None = None,
) -> LocalProgram:
    """The local program of one of the ranks that run a program."""
    schedule = schedule or make_schedule(theory, program, bucket_bytes)
    steps = one_level(theory, program, schedule)
    return lower_place(steps, LevelLayout(theory, lengths), RankPlace(rank), device)


def nested_steps(
    theory: Theory,
    outer: Program,
    inner: Program,
    bucket_bytes: int = 0,
    inside_bytes: int = 0,
    *,
    prefetch_distance: int = 1,
) -> Nested:
    """The steps of ``outer`` over machines and of ``inner`` within them."""
    schedule = make_schedule(theory, outer, bucket_bytes, prefetch_distance=prefetch_distance)
    return nest(theory, outer, schedule, inner, inside_bytes)


def rescheduled(plan: Plan, prefetch_distance: int) -> Schedule:
    """The schedule of a plan with gathers so many groups ahead."""
    size = plan.schedule.bucket_bytes
    return make_schedule(plan.theory, plan.program, size, prefetch_distance=prefetch_distance)


def one_fragment(
    program: Program,
    schedule: Schedule,
    ratios: Matrix,
    lengths: Lengths,
    *,
    active: tuple[int, ...] | None = None,
    inside: Inside | None = None,
) -> StepPlan:
    """A step of one micro-batch and one fragment, on all devices of the cluster, unless ``active`` says which."""
    active = tuple(range(lengths.world)) if active is None else active
    fragment = Fragment(
        program=program, schedule=schedule, ratios=ratios, lengths=lengths, active=active, inside=inside
    )
    return StepPlan(fragments=(fragment,))
