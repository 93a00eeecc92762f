"""One compilation: a step on a cluster, in a number of micro-batches, and the plan that comes of it."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from hetspmd.cluster.cluster import Cluster
from hetspmd.cluster.machines import flat, has_machines
from hetspmd.errors import MemoryLimitError
from hetspmd.optimize.candidate import Candidate
from hetspmd.optimize.compile_options import CompileOptions, Machines, Segments
from hetspmd.optimize.following import followed
from hetspmd.optimize.free_running import free_running
from hetspmd.optimize.hierarchy import (
    Step,
    cheaper,
    inside_of,
    lacking,
    of_candidate,
    segments_across,
    step_across,
)
from hetspmd.optimize.in_micro_batches import StepDraft, composed
from hetspmd.optimize.memory_bound import require_room
from hetspmd.optimize.segmentation import in_segments
from hetspmd.optimize.synthesis import Clock, Prepared, Synthesis
from hetspmd.optimize.synthesize import Outcome
from hetspmd.optimize.thresholds import QUICK, THRESHOLDS
from hetspmd.optimize.zero_levels import Begun, begin_step, fits_leanest, synthesize_step, zero_of
from hetspmd.placement import Placement
from hetspmd.plan.plan import Plan
from hetspmd.plan.reports import Inside, SearchReport
from hetspmd.plan.step_plan import Fragment, StepPlan, TimeSplit
from hetspmd.program.checker import check
from hetspmd.program.micro_batch_check import check_loop, check_own_turns, check_repeated
from hetspmd.program.micro_batches import MicroBatches
from hetspmd.program.schedule_check import check_schedule
from hetspmd.rules.theory import Theory
from hetspmd.search.conflict import naming_conflicts
from hetspmd.search.constraints import Constraints, resolve, spelling
from hetspmd.search.earlier_prices import EarlierPrices
from hetspmd.search.search import Limits, SearchResult

_Constraints = Mapping[str, str | Placement] | None


def plan_in(compilation: Compilation) -> Plan:
    """The plan of a compilation."""
    cluster, asked = compilation.cluster, compilation.options
    if asked.zero is not None:
        return compilation.side_by_side(flat(cluster))
    if has_machines(cluster):
        return cheaper(cluster, asked.machines, compilation.side_by_side, compilation.across)
    return compilation.side_by_side(cluster)


class Compilation:
    """The ways to plan one step on one cluster."""

    def __init__(
        self,
        theory: Theory,
        cluster: Cluster,
        options: CompileOptions,
        clock: Clock,
        batches: MicroBatches | None,
        prices: EarlierPrices,
        prepared: list[Prepared],
        *,
        quick: bool = False,
    ) -> None:
        self.theory, self.cluster, self.options, self.clock = theory, cluster, options, clock
        self.batches, self.prices, self.prepared, self.quick = batches, prices, prepared, quick
        self.limits = Limits(seconds=options.time_limit)
        self.constraints = composed(theory, batches, self._asked(theory))

    def _asked(self, theory: Theory) -> Constraints:
        """The user's constraints."""
        asked, level = resolve(theory, self.options.constraints), self.options.zero
        return asked if level is None else zero_of(theory, asked, level)

    def _context(self, cluster: Cluster, **options: Any) -> Synthesis:
        """The context of the step on a cluster, with what was made for another number of micro-batches."""
        prepared = None
        if self.batches is not None:
            if not self.prepared or self.prepared[0].theory is not self.theory:
                with self.clock("synth"):
                    self.prepared[:] = [Prepared(self.theory, self.constraints)]
            (prepared,) = self.prepared
        asked = self.constraints, self.limits, self.clock
        return Synthesis(self.theory, cluster, *asked, batches=self.batches, prepared=prepared, **options)

    def fits_leanest(self) -> bool:
        """Whether ZeRO-3 fits the single devices, where it may be taken."""
        if self.options.zero not in (None, 3) or self._machines == "virtual":
            return False
        cluster = flat(self.cluster)
        try:
            with self.clock("synth"):
                require_room(self.theory, cluster, self.batches, self.constraints, compare=False)
        except MemoryLimitError:
            return False
        return fits_leanest(self._context(cluster))

    def draft(self) -> StepDraft:
        """What the first searches tell of the plan, which is made when it is asked for. Where machines may be
        planned in both ways these are of the single devices."""
        machines = self._machines
        if self.batches is None or self.options.zero is not None or machines == "virtual":
            return StepDraft.of(plan_in(self))
        cluster = flat(self.cluster)
        # The plan's own searches begin where those of the draft have ended, whatever is drafted in between.
        own = copy.copy(self.prices)
        ctx, begun = self._begun(cluster, own)
        assert begun is not None, "no level of ZeRO is asked for"
        self.prices.become(own)
        side_by_side = partial(self._finished, ctx, begun)

        def plan() -> Plan:
            if machines == "flat":
                return side_by_side()
            return cheaper(self.cluster, machines, lambda _: side_by_side(), self.across)

        return StepDraft.of(plan()) if begun.seconds is None else StepDraft(begun.seconds, True, plan)

    def side_by_side(self, cluster: Cluster) -> Plan:
        """The plan of the single devices of a cluster."""
        return self._finished(*self._begun(cluster, self.prices))

    def _begun(self, cluster: Cluster, prices: EarlierPrices) -> tuple[Synthesis, Begun | None]:
        with self.clock("synth"):
            compare = self.options.micro_batches != "auto"
            bound = require_room(self.theory, cluster, self.batches, self.constraints, compare=compare)
        with naming_conflicts(self.theory, self.constraints):
            ctx = self._context(
                cluster,
                earlier_prices=prices,
                quick=self.quick,
                bound=bound,
                thresholds=QUICK if self.quick and self.batches is not None else THRESHOLDS,
            )
            return ctx, None if self.options.zero is not None else begin_step(ctx)

    def _finished(self, ctx: Synthesis, begun: Begun | None) -> Plan:
        asked = self.options.constraints
        with naming_conflicts(self.theory, self.constraints):
            ctx, outcome = synthesize_step(ctx, begun or self.options.zero)
            segments = self._segments()
            waits = self.options.zero in (2, 3) or segments not in ("auto", 1)
            if self.options.micro_batches == "auto" and not waits:
                ctx, outcome = free_running(ctx, outcome)
        ctx, outcome = in_segments(ctx, outcome, segments, self._asked)
        return following_plan(ctx, outcome, asked) if self.batches is None else plan_of(ctx, outcome, asked)

    @property
    def _machines(self) -> Machines:
        """How machines are planned; without any there are single devices alone."""
        return self.options.machines if has_machines(self.cluster) else "flat"

    def _segments(self) -> Segments:
        """How many segments there may be. In micro-batches there is one unless more are asked for: what crosses a
        cut is exchanged in each of them."""
        asked = self.options.segments
        return 1 if asked == "auto" and self.batches is not None else asked

    def across(self) -> Plan:
        """The plan across the cluster's machines, as virtual devices."""
        asked = self.options.constraints
        with naming_conflicts(self.theory, self.constraints):
            # Where memory is short depends on the devices: what was found of single ones does not hold here.
            asked_of_all = self.constraints, self.limits, self.clock
            ctx = Synthesis(self.theory, self.cluster, *asked_of_all, batches=self.batches, quick=self.quick)
            step = step_across(ctx)
        ctx, step = segments_across(ctx, step, self._segments(), lambda cut: resolve(cut, asked))
        plan = plan_across(of_candidate(ctx, step[0].best), step, asked)
        if self.batches is not None:
            return plan
        return followed(plan, self.limits, self.clock, partial(_plan_that_fits, asked=asked))


def following_plan(ctx: Synthesis, outcome: Outcome, asked: _Constraints) -> Plan:
    """The plan of an outcome, with modules that follow others in their shards if that can be. ``asked``: the user's
    constraints."""

    def planned(other: Synthesis, candidate: Candidate) -> Plan:
        return plan_of(other, replace(outcome, best=candidate), asked)

    return followed(plan_of(ctx, outcome, asked), ctx.limits, ctx.clock, planned)


def plan_of(
    ctx: Synthesis, outcome: Outcome, asked: _Constraints = None, inside: Inside | None = None
) -> Plan:
    """The plan of an outcome, whose program is proved here. ``asked``: the user's constraints."""
    best = outcome.best
    check(ctx.theory, best.program)
    check_schedule(ctx.theory.graph, best.program, best.schedule)
    if ctx.batches is not None:
        check_loop(ctx.theory, ctx.batches.loop)
        check_repeated(ctx.theory, ctx.batches.loop, ctx.batches.repeated)
        check_own_turns(ctx.theory, ctx.batches, best.program, best.lengths.world)
    fragment = Fragment(
        program=best.program,
        schedule=best.schedule,
        ratios=best.ratios,
        lengths=best.lengths,
        active=best.active,
        inside=inside,
    )
    return Plan(
        graph=ctx.theory.graph,
        step_plan=StepPlan(fragments=(fragment,), split=_split_of(ctx.batches)),
        cluster=ctx.cluster,
        cost=best.measured_cost,
        search=_report(best.result),
        baselines=outcome.baselines,
        iterations=outcome.iterations,
        constraints={
            glob: form if isinstance(form, str) else spelling(form) for glob, form in (asked or {}).items()
        },
        over_memory=outcome.over_memory,
        considered=outcome.considered,
    )


def _split_of(batches: MicroBatches | None) -> TimeSplit:
    if batches is None:
        return TimeSplit()
    return TimeSplit(batches.count, tuple(sorted(batches.repeated)), batches.own_turns)


def plan_across(ctx: Synthesis, step: Step, asked: _Constraints = None) -> Plan:
    """The plan of a step across virtual devices. Its baselines are those of single accelerators, if there are
    any, and one segment where it has several."""
    outcome, inside = step
    baselines = {name: seconds for name, seconds in outcome.baselines.items() if name == "one_segment"}
    plan = plan_of(ctx, replace(outcome, baselines=baselines, over_memory=()), asked, inside)
    cost, more = plan.cost, inside.seconds
    memory = tuple(k * n for k, n in zip(ctx.cluster.accelerators, inside.memory_bytes, strict=True))
    return replace(
        plan,
        cost=replace(
            cost,
            step_seconds=cost.step_seconds + more,
            stage_seconds=cost.stage_seconds + more,
            communication_seconds=cost.communication_seconds + more,
            memory_bytes=memory,
        ),
    )


def _plan_that_fits(ctx: Synthesis, candidate: Candidate, asked: _Constraints) -> Plan | None:
    """The plan of a candidate of machines; None where it does not fit their accelerators."""
    inside = inside_of(ctx, candidate)
    if lacking(ctx.cluster, inside):
        return None
    return plan_across(ctx, (Outcome(candidate, {}, ()), inside), asked)


def _report(result: SearchResult) -> SearchReport:
    return SearchReport(
        cost=result.cost,
        lower_bound=result.lower_bound,
        gap=result.gap,
        stop_reason=result.stop_reason,
        expansions=result.expansions,
    )
