"""The compiler: model, example and cluster become a plan.

The stages in the order of the data's way: trace, rules, then search and ratios in turns
(:mod:`hetspmd.optimize.alternation`), and the proof of the program that comes out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Unpack

from torch import nn

from hetspmd.cluster.cluster import Cluster
from hetspmd.cluster.machines import flat, has_machines
from hetspmd.errors import MemoryLimitError
from hetspmd.optimize.candidate import Candidate
from hetspmd.optimize.compile_options import CompileKeywords, CompileOptions, Segments, parted
from hetspmd.optimize.following import followed, warn_of_strays
from hetspmd.optimize.free_running import free_running, in_own_turns, own_turns_like
from hetspmd.optimize.hierarchy import Step, cheaper, inside_of, lacking, segments_across, step_across
from hetspmd.optimize.in_micro_batches import best_number, composed, in_micro_batches
from hetspmd.optimize.memory_bound import require_room
from hetspmd.optimize.partition import segmented, segments_like
from hetspmd.optimize.prefetch import further
from hetspmd.optimize.recomputation import fewest_recomputed
from hetspmd.optimize.segmentation import in_segments
from hetspmd.optimize.synthesis import Clock, Prepared, Synthesis
from hetspmd.optimize.synthesize import Outcome, candidate_at
from hetspmd.optimize.thresholds import QUICK, THRESHOLDS
from hetspmd.optimize.zero_levels import fits_leanest, loop_like, rereads_like, synthesize_step, zero_of
from hetspmd.placement import Placement
from hetspmd.plan.plan import Plan
from hetspmd.plan.reports import Inside, SearchReport
from hetspmd.plan.step_plan import Fragment, StepPlan, TimeSplit
from hetspmd.program.checker import check
from hetspmd.program.lengths import Matrix, Ratios, by_segment, lengths_for
from hetspmd.program.micro_batch_check import check_loop, check_own_turns, check_repeated
from hetspmd.program.micro_batches import MicroBatches, micro_batches
from hetspmd.program.schedule_check import check_schedule
from hetspmd.program.stored import as_stored
from hetspmd.rules.theory import Theory, derive
from hetspmd.search.conflict import naming_conflicts
from hetspmd.search.constraints import Constraints, resolve, spelling
from hetspmd.search.earlier_prices import EarlierPrices
from hetspmd.search.search import Limits, Searcher, SearchResult
from hetspmd.search.space import search_space
from hetspmd.trace.blocks import as_in
from hetspmd.trace.collector import collector_paused
from hetspmd.trace.graph import Graph
from hetspmd.trace.recompute import Block
from hetspmd.trace.trace import split_example, trace

_Constraints = Mapping[str, str | Placement] | None


def compile(
    model: nn.Module,
    example: Any,
    cluster: Cluster | Mapping[str, Any] | str,
    **options: Unpack[CompileKeywords],
) -> Plan:
    """Synthesize the distributed program of one training step.

    Args:
        model: An unchanged module. It may be on the meta device.
        example: A batch: a dict of keyword arguments or a tuple of positional arguments. Only shapes are
            read.
        cluster: A :class:`~hetspmd.Cluster`, a dict, or the path of a cluster file.
        options: The fields of :class:`~hetspmd.CompileOptions`, by name: ``loss``, ``strict``,
            ``constraints``, ``time_limit``, ``loss_only``, ``segments``, ``machines``, ``micro_batches``,
            ``zero``, ``recompute``, ``host_randomness``, ``timings``, ``progress``.

    Returns:
        The chosen plan. Its program is proved and fits the devices' memory.

    Raises:
        ClusterError: The cluster description is missing, malformed or impossible.
        ExampleError: The example does not fit the model.
        TraceError: The model does not trace to one static graph.
        ConstraintError: A constraint is malformed.
        InfeasibleError: No program satisfies the constraints.
        MemoryLimitError: No program was found that fits the devices' memory.
        MicroBatchError: The step cannot be computed in so many micro-batches.
        SearchError: A limit struck before any program was found.
        HetspmdError: Any other bad input; every error of hetspmd derives from it.
    """
    _, asked = parted(options, (), ("model", "example", "cluster"))
    args, kwargs = split_example(example)
    return compile_plan(model, args, kwargs, Cluster.load(cluster), asked)


def compile_plan(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    cluster: Cluster,
    options: CompileOptions | None = None,
    *,
    training: bool = True,
    like: Plan | None = None,
    traced: Graph | None = None,
) -> Plan:
    """:func:`compile` for a split example, also of the forward alone (``training=False``).

    ``like``: an earlier plan of the same model; parameters keep its stored forms and lengths on the
    same active devices, so that the same shards serve both plans (another batch shape, evaluation), and
    modules their segments. ``traced``: the graph, where the step has been traced already.
    """
    asked = options or CompileOptions()
    clock = asked.clock()
    blocks: list[Block] = []
    with clock("total"), collector_paused():
        with clock("trace"):
            graph = traced or trace(
                model,
                args,
                kwargs,
                loss=asked.find_loss,
                training=training,
                host_randomness=asked.host_randomness,
                recompute=as_in(like.graph) if like is not None else asked.recomputed(blocks),
            )
            if asked.loss_only and graph.loss is not None:
                graph = graph.without_outputs()
        with clock("rules"):
            theory = derive(graph, strict=asked.strict)
        divided = training and graph.loss is not None
        if like is not None:
            with clock("rules"):
                theory, batches = in_micro_batches(theory, like.micro_batches if divided else 1, fewer=True)
            return _like(theory, like, Limits(seconds=asked.time_limit), clock, batches)
        count = asked.micro_batches if divided else 1
        prices = EarlierPrices()
        prepared: list[Prepared] = []

        def planned(theory: Theory, batches: MicroBatches | None, quick: bool = False) -> Plan:
            return _in(_Compilation(theory, cluster, asked, clock, batches, prices, prepared, quick=quick))

        def lean(theory: Theory, batches: MicroBatches | None) -> bool:
            return _Compilation(theory, cluster, asked, clock, batches, prices, prepared).fits_leanest()

        quickly = partial(planned, quick=True)
        try:
            if divided and blocks:
                plan = fewest_recomputed(theory, blocks, cluster, count, planned, lean, quickly)
            else:
                plan = best_number(theory, count, planned, quickly)
        except MemoryLimitError as error:
            raise error.leave_out(asked.asked_of_memory) from error.__cause__
        warn_of_strays(plan)
        return plan


def _in(compilation: _Compilation) -> Plan:
    """The plan of a compilation."""
    cluster, asked = compilation.cluster, compilation.options
    if compilation.batches is not None or asked.zero is not None:
        return compilation.side_by_side(flat(cluster))
    if has_machines(cluster):
        return cheaper(cluster, asked.machines, compilation.side_by_side, compilation.across)
    return compilation.side_by_side(cluster)


class _Compilation:
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
        if self.options.zero not in (None, 3):
            return False
        cluster = flat(self.cluster)
        try:
            with self.clock("synth"):
                require_room(self.theory, cluster, self.batches, self.constraints, compare=False)
        except MemoryLimitError:
            return False
        return fits_leanest(self._context(cluster))

    def side_by_side(self, cluster: Cluster) -> Plan:
        """The plan of the single devices of a cluster."""
        asked = self.options.constraints
        with self.clock("synth"):
            compare = self.options.micro_batches != "auto"
            require_room(self.theory, cluster, self.batches, self.constraints, compare=compare)
        with naming_conflicts(self.theory, self.constraints):
            ctx = self._context(
                cluster,
                earlier_prices=self.prices,
                quick=self.quick,
                thresholds=QUICK if self.quick and self.batches is not None else THRESHOLDS,
            )
            ctx, outcome = synthesize_step(ctx, self.options.zero)
            segments = self._segments()
            waits = self.options.zero in (2, 3) or segments not in ("auto", 1)
            if self.options.micro_batches == "auto" and not waits:
                ctx, outcome = free_running(ctx, outcome)
        ctx, outcome = in_segments(ctx, outcome, segments, self._asked)
        return following_plan(ctx, outcome, asked) if self.batches is None else plan_of(ctx, outcome, asked)

    def _segments(self) -> Segments:
        """How many segments there may be. In micro-batches there is one unless more are asked for: what crosses a
        cut is exchanged in each of them."""
        asked = self.options.segments
        return 1 if asked == "auto" and self.batches is not None else asked

    def across(self) -> Plan:
        """The plan across the cluster's machines, as virtual devices."""
        asked = self.options.constraints
        with naming_conflicts(self.theory, self.constraints):
            ctx = Synthesis(self.theory, self.cluster, self.constraints, self.limits, self.clock)
            step = step_across(ctx)
        ctx, step = segments_across(ctx, step, self.options.segments, lambda cut: resolve(cut, asked))
        plan = _plan_across(ctx, step, asked)
        return followed(plan, self.limits, self.clock, partial(_plan_that_fits, asked=asked))


def _like(
    theory: Theory, like: Plan, limits: Limits, clock: Clock, batches: MicroBatches | None = None
) -> Plan:
    """The best program with the storage of an earlier plan, its gathers as far ahead as is best."""
    with clock("rules"):
        if like.graph.segments:
            theory = segmented(theory, segments_like(theory.graph, like.graph))
        theory, forms, lengths = as_stored(theory, like.parameter_layout(), like.ratios)
        batches = None if batches is None else micro_batches(theory, batches.count)
    ratios = like.ratios[: theory.axes.segments]
    with clock("synth"):
        constraints = composed(theory, batches, Constraints(forms, rereads_like(theory, forms, like)))
        loop = None if batches is None else loop_like(theory, batches, like)
        ctx = Synthesis(theory, like.cluster, constraints, limits, batches=loop)
        candidate = candidate_at(ctx, ratios, lengths, like.active)
        candidate = further(ctx, ctx.costs(like.active), candidate) or candidate
        turns = None if loop is None else own_turns_like(theory, loop, like, candidate)
        if turns is not None:
            candidate = in_own_turns(candidate, turns)
            ctx = candidate.evaluator.ctx
        return _plan_at(ctx, candidate)


def _plan_at(ctx: Synthesis, candidate: Candidate) -> Plan:
    """The plan of one candidate, with nothing beside it."""
    if has_machines(ctx.cluster):
        return _plan_across(ctx, (Outcome(candidate, {}, ()), inside_of(ctx, candidate)))
    return plan_of(ctx, Outcome(candidate, {}, ()))


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


def _plan_across(ctx: Synthesis, step: Step, asked: _Constraints = None) -> Plan:
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
    return _plan_across(ctx, (Outcome(candidate, {}, ()), inside), asked)


def _report(result: SearchResult) -> SearchReport:
    return SearchReport(
        cost=result.cost,
        lower_bound=result.lower_bound,
        gap=result.gap,
        stop_reason=result.stop_reason,
        expansions=result.expansions,
    )


def plan_for(
    theory: Theory,
    cluster: Cluster,
    constraints: Constraints,
    ratios: Ratios | Matrix,
    *,
    limits: Limits | None = None,
    active: tuple[int, ...] | None = None,
    batches: MicroBatches | None = None,
) -> Plan:
    """The best program under ``constraints`` at fixed ratios: forced programs for tests and comparisons.

    ``active``: ranks of the devices that take part (default: all), to which the ratios belong, of all segments or
    by segment. ``batches``: the step runs in micro-batches, of the same theory.
    """
    active = tuple(range(cluster.world)) if active is None else active
    matrix = by_segment(ratios, theory.axes.segments)
    lengths = lengths_for(theory.axes, matrix)
    ctx = Synthesis(theory, cluster, constraints, limits or Limits(), batches=batches)
    return _plan_at(ctx, candidate_at(ctx, matrix, lengths, active))


def problem_text(plan: Plan, constraints: _Constraints = None) -> str:
    """The search problem at the plan's lengths, as a self-contained file for ``hetspmd solve``."""
    space = search_space(plan.theory, resolve(plan.theory, constraints))
    return Searcher(space).problem(plan.costs, plan.lengths)
