"""Whether a plan that was read from a file may be run: its parts fit, and its program is proved again."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from hetspmd.cluster.cluster import Cluster
from hetspmd.cluster.machines import has_machines
from hetspmd.cost.step import StepCost
from hetspmd.errors import HetspmdError, PlanError
from hetspmd.placement import parse_placement
from hetspmd.plan.graph_check import check_graph
from hetspmd.plan.ops_check import check_calls, check_schemas
from hetspmd.plan.reports import VERDICTS, Considered, Inside, Iteration, SearchReport
from hetspmd.plan.step_plan import StepPlan
from hetspmd.program.checker import check
from hetspmd.program.lengths import Lengths, Matrix
from hetspmd.program.micro_batch_check import check_loop, check_own_turns, check_repeated
from hetspmd.program.micro_batches import micro_batches
from hetspmd.program.nested_turns import nest_turns
from hetspmd.program.nested_turns_check import check_nested_turns
from hetspmd.program.nesting import nest
from hetspmd.program.program import Program
from hetspmd.program.schedule import Schedule
from hetspmd.program.schedule_check import check_schedule
from hetspmd.program.turn_steps import turn_steps
from hetspmd.rules.theory import Theory, derive
from hetspmd.trace.graph import Graph

_CLOSE = 1e-6


class Unchecked(Protocol):
    """A plan (:class:`hetspmd.plan.plan.Plan`) as it was read from a file."""

    @property
    def graph(self) -> Graph: ...
    @property
    def program(self) -> Program: ...
    @property
    def schedule(self) -> Schedule: ...
    @property
    def ratios(self) -> Matrix: ...
    @property
    def lengths(self) -> Lengths: ...
    @property
    def cluster(self) -> Cluster: ...
    @property
    def cost(self) -> StepCost: ...
    @property
    def search(self) -> SearchReport: ...
    @property
    def baselines(self) -> Mapping[str, float]: ...
    @property
    def iterations(self) -> tuple[Iteration, ...]: ...
    @property
    def considered(self) -> tuple[Considered, ...]: ...
    @property
    def constraints(self) -> Mapping[str, str]: ...
    @property
    def inside(self) -> Inside | None: ...
    @property
    def micro_batches(self) -> int: ...
    @property
    def repeated(self) -> tuple[int, ...]: ...
    @property
    def own_turns(self) -> tuple[int, ...]: ...
    @property
    def step_plan(self) -> StepPlan: ...
    @property
    def world(self) -> int: ...


def _fail(problem: str) -> PlanError:
    return PlanError(f"the plan is damaged: {problem}; compile it again")


def checked_theory(plan: Unchecked, *, trial: bool) -> Theory:
    """The theory of a plan's graph, by which its program was proved.

    ``trial``: whether each op is to be tried, without data, and must make what the graph says.
    Raises PlanError if the plan is damaged, or made with ops or rules that are not those of this process.
    """
    check_graph(plan.graph)
    check_step(plan.step_plan)
    _check_numbers(plan)
    check_schemas(plan.graph)
    try:
        theory = derive(plan.graph, quiet=True)
    except HetspmdError as error:
        raise _fail(f"no rules fit its graph ({error})") from error
    except Exception as error:  # a rule that is given a call that cannot be
        raise _fail(f"no rules fit its graph ({type(error).__name__}: {error})") from error
    if trial:
        check_calls(theory)
    _check_lengths(plan, theory)
    _prove(theory, plan.program, "its program")
    check_schedule(plan.graph, plan.program, plan.schedule)
    if plan.micro_batches > 1 or plan.repeated or plan.own_turns:
        _check_micro_batches(plan, theory)
    if plan.inside is not None:
        inside = plan.inside
        _prove(theory, inside.program, "the program inside its machines")
        try:
            if plan.micro_batches > 1:
                _check_nested_turns(plan, theory, inside)
            else:
                nest(theory, plan.program, plan.schedule, inside.program, inside.bucket_bytes)
        except PlanError:
            raise
        except Exception as error:
            raise _fail(f"the program inside its machines does not fit ({type(error).__name__})") from error
    return theory


def check_step(step: StepPlan) -> None:
    """Raise PlanError for a step that this release does not run: of several fragments, or in another order than one
    micro-batch after the other, each forward and at once backward."""
    if len(step.fragments) > 1 or step.order:
        for rank in step.active:
            step.turns(rank)


def _check_nested_turns(plan: Unchecked, theory: Theory, inside: Inside) -> None:
    """The loop of machines is proved before, and what is inside of them."""
    batches = micro_batches(theory, plan.micro_batches, frozenset(plan.repeated), plan.own_turns)
    outer = plan.program, plan.schedule
    steps = nest_turns(theory, outer, batches, inside.program, inside.bucket_bytes)
    check_nested_turns(theory, batches.loop, plan.program, inside.program, steps)


def _check_micro_batches(plan: Unchecked, theory: Theory) -> None:
    try:
        batches = micro_batches(theory, plan.micro_batches, frozenset(plan.repeated), plan.own_turns)
        check_loop(theory, batches.loop)
        check_repeated(theory, batches.loop, plan.repeated)
        check_own_turns(theory, batches, plan.program, plan.lengths.world)
        turn_steps(theory, plan.program, plan.schedule, batches)
    except HetspmdError as error:
        raise _fail(f"its step does not run in {plan.micro_batches} micro-batches ({error})") from error


def _prove(theory: Theory, program: Program, what: str) -> None:
    try:
        check(theory, program)
    except HetspmdError as error:
        raise PlanError(
            f"{what} cannot be proved ({error}): the plan is damaged, or made with other rules; compile it again"
        ) from error


def _check_lengths(plan: Unchecked, theory: Theory) -> None:
    axes, units = theory.axes.axes, plan.lengths.units
    if len(units) != len(axes):
        raise _fail(f"it has lengths of {len(units)} axes, the graph has {len(axes)}")
    for axis, lengths in zip(axes, units, strict=True):
        if len(lengths) != plan.lengths.world or min(lengths) < 0 or sum(lengths) != axis.units:
            raise _fail(f"the lengths {list(lengths)} do not divide the {axis.units} units of axis {axis.id}")


def _check_numbers(plan: Unchecked) -> None:
    for row in plan.ratios:
        if not all(0 <= r <= 1 for r in row) or abs(sum(row) - 1) > _CLOSE:
            raise _fail(f"the ratios {list(row)} are not positive parts of 1")
    if plan.inside is not None and not has_machines(plan.cluster):
        raise _fail("it says what accelerators inside machines do, and its cluster has no machines")
    cost, search = plan.cost, plan.search
    _per_device("cost.memory_bytes", cost.memory_bytes, plan)
    _per_device("cost.per_device_compute", cost.per_device_compute, plan)
    if plan.inside is not None:
        _per_device("inside.memory_bytes", plan.inside.memory_bytes, plan)
        _seconds("inside.seconds", [plan.inside.seconds])
        _seconds("inside.bucket_bytes", [plan.inside.bucket_bytes])
    _seconds("cost", [cost.step_seconds, cost.stage_seconds, cost.compute_seconds])
    _seconds("cost", [cost.communication_seconds, cost.stages])
    _seconds("search", [search.cost, search.lower_bound, search.gap, search.expansions])
    _seconds("baselines", plan.baselines.values())
    for iteration in plan.iterations:
        _seconds("iterations", [iteration.search_seconds, iteration.step_seconds])
        _seconds("iterations", [r for row in iteration.ratios for r in row])
    _check_considered(plan)
    for name, text in plan.constraints.items():
        try:
            parse_placement(text)
        except ValueError as error:
            raise _fail(f"constraint {name!r}: {error}") from error


def _per_device(name: str, values: Sequence[float], plan: Unchecked) -> None:
    if len(values) != plan.world:
        raise _fail(f"{name} is of {len(values)} devices, the cluster has {plan.world}")
    _seconds(name, values)


def _seconds(name: str, values: Iterable[float]) -> None:
    for value in values:
        if not 0 <= value < math.inf:
            raise _fail(f"{name} has {value}, which must be finite and not negative")


def _check_considered(plan: Unchecked) -> None:
    for candidate in plan.considered:
        _seconds("considered", [candidate.seconds, *(amount for _, amount in candidate.lacking)])
        if candidate.verdict not in VERDICTS:
            raise _fail(f"{candidate.verdict!r:.40} is no reason why a candidate was not taken")
        # Accelerators of machines have ranks of their own where they are planned one by one.
        if not all(rank >= 0 for rank in (*candidate.active, *(rank for rank, _ in candidate.lacking))):
            raise _fail("a candidate has ranks that there cannot be")
    if sum(candidate.verdict == "taken" for candidate in plan.considered) > 1:
        raise _fail("more than one of its candidates was taken")
