"""The compiler: model, example and cluster become a plan.

The stages in the order of the data's way: trace, rules, then search and ratios in turns
(:mod:`hetspmd.optimize.alternation`), and the proof of the program that comes out.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Unpack

from torch import nn

from hetspmd.cluster.cluster import Cluster
from hetspmd.cluster.machines import flat, has_machines
from hetspmd.errors import MemoryLimitError
from hetspmd.optimize.candidate import Candidate
from hetspmd.optimize.compilation import Compilation, plan_across, plan_in, plan_of
from hetspmd.optimize.compile_options import CompileKeywords, CompileOptions, parted
from hetspmd.optimize.following import warn_of_strays
from hetspmd.optimize.free_running import in_own_turns, own_turns_like
from hetspmd.optimize.hierarchy import inside_of
from hetspmd.optimize.in_micro_batches import StepDraft, best_number, composed, in_micro_batches
from hetspmd.optimize.memory_bound import lasting_part
from hetspmd.optimize.partition import segmented, segments_like
from hetspmd.optimize.prefetch import further
from hetspmd.optimize.recomputation import fewest_recomputed
from hetspmd.optimize.synthesis import Clock, Prepared, Synthesis, is_large
from hetspmd.optimize.synthesize import Outcome, candidate_at
from hetspmd.optimize.zero_levels import loop_like, rereads_like
from hetspmd.placement import Placement
from hetspmd.plan.plan import Plan
from hetspmd.program.lengths import Matrix, Ratios, by_segment, lengths_for
from hetspmd.program.micro_batches import MicroBatches, micro_batches
from hetspmd.program.stored import as_stored
from hetspmd.rules.theory import Theory, derive
from hetspmd.search.constraints import Constraints, resolve
from hetspmd.search.earlier_prices import EarlierPrices
from hetspmd.search.search import Limits, Searcher
from hetspmd.search.space import search_space
from hetspmd.trace.blocks import as_in
from hetspmd.trace.collector import collector_paused
from hetspmd.trace.graph import Graph
from hetspmd.trace.recompute import Block, Chooser
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
            recompute = as_in(like.graph) if like is not None else asked.recomputed(blocks)
            graph = traced or _traced(model, args, kwargs, asked, training, recompute)
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
            return plan_in(Compilation(theory, cluster, asked, clock, batches, prices, prepared, quick=quick))

        def lean(theory: Theory, batches: MicroBatches | None) -> bool:
            return Compilation(theory, cluster, asked, clock, batches, prices, prepared).fits_leanest()

        def drafted(theory: Theory, batches: MicroBatches | None) -> StepDraft:
            return Compilation(theory, cluster, asked, clock, batches, prices, prepared, quick=True).draft()

        quickly = partial(planned, quick=True)
        try:
            if divided and blocks:
                plan = fewest_recomputed(theory, blocks, cluster, count, planned, lean, quickly)
            else:
                begun = (drafted, lasting_part(theory, flat(cluster))) if is_large(theory) else ()
                plan = best_number(theory, count, planned, quickly, *begun)
        except MemoryLimitError as error:
            raise error.leave_out(asked.asked_of_memory) from error.__cause__
        warn_of_strays(plan)
        return plan


def _traced(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    asked: CompileOptions,
    training: bool,
    recompute: Chooser,
) -> Graph:
    return trace(
        model,
        args,
        kwargs,
        loss=asked.find_loss,
        training=training,
        host_randomness=asked.host_randomness,
        recompute=recompute,
    )


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
        return plan_across(ctx, (Outcome(candidate, {}, ()), inside_of(ctx, candidate)))
    return plan_of(ctx, Outcome(candidate, {}, ()))


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
