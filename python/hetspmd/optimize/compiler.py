"""The compiler: model, example and cluster become a plan.

The stages in the order of the data's way: trace, rules, then search and ratios in turns
(:mod:`hetspmd.optimize.alternation`), and the proof of the program that comes out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, MutableMapping
from dataclasses import replace
from inspect import signature
from typing import Any

from torch import nn

from hetspmd.cluster.cluster import Cluster
from hetspmd.cluster.machines import has_machines
from hetspmd.errors import OptionError
from hetspmd.optimize.alternation import Alternation, Clock, Outcome
from hetspmd.optimize.candidate import Pair
from hetspmd.optimize.following import followed, warn_of_strays
from hetspmd.optimize.hierarchy import (
    Machines,
    Step,
    cheaper,
    check_machines,
    inside_of,
    lacking,
    step_across,
)
from hetspmd.optimize.partition import segmented, segments_like
from hetspmd.optimize.segmentation import Segments, check_segments, in_segments
from hetspmd.placement import Placement
from hetspmd.plan.plan import Plan
from hetspmd.plan.reports import Inside, SearchReport
from hetspmd.program.checker import check
from hetspmd.program.lengths import Lengths, Matrix, Ratios, by_segment, lengths_for
from hetspmd.program.stored import as_stored
from hetspmd.rules.theory import Theory, derive
from hetspmd.search.conflict import naming_conflicts
from hetspmd.search.constraints import Constraints, nearest, resolve, spelling
from hetspmd.search.search import Found, Limits, Searcher
from hetspmd.search.space import search_space
from hetspmd.trace.collector import collector_paused
from hetspmd.trace.graph import Graph
from hetspmd.trace.host.watch import HostRandomness, check_randomness
from hetspmd.trace.losses import Loss, as_loss
from hetspmd.trace.trace import split_example, trace


def compile(
    model: nn.Module,
    example: Any,
    cluster: Cluster | Mapping[str, Any] | str,
    *,
    loss: Loss | str | int | None = None,
    strict: bool = False,
    constraints: Mapping[str, str | Placement] | None = None,
    time_limit: float = 600.0,
    loss_only: bool = False,
    segments: Segments = "auto",
    machines: Machines = "auto",
    host_randomness: HostRandomness = "refuse",
    timings: MutableMapping[str, float] | None = None,
    progress: Callable[[str], object] | None = None,
) -> Plan:
    """Synthesize the distributed program of one training step.

    Args:
        model: An unchanged module. It may be on the meta device.
        example: A batch: a dict of keyword arguments or a tuple of positional arguments. Only shapes are
            read.
        cluster: A :class:`~hetspmd.Cluster`, a dict, or the path of a cluster file.
        loss: Where the loss is in the model's output, by name or index (``"losses.total"``, ``1``), or a
            function ``loss(model, *args, **kwargs)``. By default the loss is the output, its ``.loss`` or its
            first item.
        strict: Raise MissingRuleError, instead of a warning, where an op has no rule.
        constraints: Globs over parameter names, input paths and ``output[i]`` to ``"replicated"`` or
            ``"shard(d)"``.
        time_limit: Seconds for one search.
        loss_only: Leave the other outputs out; they come back as None.
        segments: How many parts of the model have sharding ratios of their own; ``"auto"`` for as many as
            gain.
        machines: How machines with several accelerators are planned: each as one ``"virtual"`` device, all
            accelerators individually (``"flat"``), or ``"auto"`` for the cheaper of the two. Across virtual
            devices there is one segment.
        host_randomness: What becomes of random numbers that the model's Python code draws (random, numpy,
            generators): ``"refuse"`` them; ``"freeze"`` them, so that a plan keeps the outcome of its trace;
            or ``"trace_each_step"``, so that HAP traces anew in every step.
        timings: Is filled with wall seconds of the stages: ``trace``, ``rules``, ``synth``, ``balance``,
            ``total``.
        progress: Is called with the name of each of these stages as it begins.

    Returns:
        The chosen plan. Its program is proved and fits the devices' memory.

    Raises:
        ClusterError: The cluster description is missing, malformed or impossible.
        ExampleError: The example does not fit the model.
        TraceError: The model does not trace to one static graph.
        ConstraintError: A constraint is malformed.
        InfeasibleError: No program satisfies the constraints.
        MemoryLimitError: No program was found that fits the devices' memory.
        SearchError: A limit struck before any program was found.
        HetspmdError: Any other bad input; every error of hetspmd derives from it.
    """
    args, kwargs = split_example(example)
    return compile_plan(
        model, args, kwargs, Cluster.load(cluster), loss=as_loss(loss), constraints=constraints, strict=strict,
        time_limit=time_limit, loss_only=loss_only, segments=segments, machines=machines,
        host_randomness=host_randomness, timings=timings, progress=progress,
    )  # fmt: skip


def check_options(given: Iterable[str], own: Iterable[str]) -> None:
    """Raise OptionError, with the nearest name, unless all are arguments that go to :func:`compile` for a caller
    who has the arguments ``own`` as well."""
    known = sorted(set(signature(compile).parameters) - {"model", "example", "cluster"})
    for name in given:
        if name not in known:
            raise OptionError(f"there is no argument {name!r}{nearest(name, {*known, *own})}")


def compile_plan(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], cluster: Cluster, *,
    loss: Loss | None = None, training: bool = True, constraints: Mapping[str, str | Placement] | None = None,
    strict: bool = False, time_limit: float = 600.0, loss_only: bool = False, segments: Segments = "auto",
    machines: Machines = "auto", like: Plan | None = None, host_randomness: HostRandomness = "refuse",
    traced: Graph | None = None, timings: MutableMapping[str, float] | None = None,
    progress: Callable[[str], object] | None = None,
) -> Plan:  # fmt: skip
    """:func:`compile` for a split example, also of the forward alone (``training=False``).

    ``like``: an earlier plan of the same model; parameters keep its stored forms and lengths on the
    same active devices, so that the same shards serve both plans (another batch shape, evaluation), and
    modules their segments. ``traced``: the graph, where the step has been traced already.
    """
    check_segments(segments)
    check_randomness(host_randomness)
    check_machines(machines)
    clock = Clock(timings if timings is not None else {}, progress)
    with clock("total"), collector_paused():
        with clock("trace"):
            graph = traced or trace(
                model, args, kwargs, loss=loss, training=training, host_randomness=host_randomness
            )
            if loss_only and graph.loss is not None:
                graph = graph.without_outputs()
        with clock("rules"):
            theory = derive(graph, strict=strict)
        limits = Limits(seconds=time_limit)
        if like is not None:
            return _like(theory, like.cluster, like, limits, clock)
        fixed = resolve(theory, constraints)

        def side_by_side(devices: Cluster) -> Plan:
            with naming_conflicts(theory, fixed):
                outcome = Alternation(theory, devices, fixed, limits, clock).run()
            found, outcome = in_segments(
                theory,
                devices,
                outcome,
                segments,
                lambda cut: resolve(cut, constraints),
                limits,
                clock,
            )
            return following_plan(found, devices, outcome, constraints, limits, clock)

        def across() -> Plan:
            with naming_conflicts(theory, fixed):
                step = step_across(theory, cluster, fixed, limits, clock)
            return followed(
                _across(theory, cluster, step, constraints),
                limits,
                clock,
                lambda stored, pair: _across_at(stored, cluster, pair, constraints, limits),
            )

        plan = (
            cheaper(cluster, machines, side_by_side, across)
            if has_machines(cluster)
            else side_by_side(cluster)
        )
        warn_of_strays(plan)
        return plan


def _like(theory: Theory, cluster: Cluster, like: Plan, limits: Limits, clock: Clock) -> Plan:
    with clock("rules"):
        if like.graph.segments:
            theory = segmented(theory, segments_like(theory.graph, like.graph))
        theory, forms, lengths = as_stored(theory, like.parameter_layout(), like.ratios)
    ratios = like.ratios[: theory.axes.segments]
    with clock("synth"):
        return _fixed_plan(theory, cluster, Constraints(forms), ratios, lengths, limits, like.active)


def _fixed_plan(
    theory: Theory,
    cluster: Cluster,
    fixed: Constraints,
    ratios: Matrix,
    lengths: Lengths,
    limits: Limits,
    active: tuple[int, ...],
) -> Plan:
    """The best program at given lengths."""
    pair = Alternation(theory, cluster, fixed, limits, Clock()).at(ratios, lengths, active)
    if has_machines(cluster):
        inside = inside_of(theory, cluster, pair, limits, Clock())
        return _across(theory, cluster, (Outcome(pair, {}, ()), inside))
    return plan_of(theory, cluster, Outcome(pair, {}, ()))


def following_plan(
    theory: Theory,
    cluster: Cluster,
    outcome: Outcome,
    constraints: Mapping[str, str | Placement] | None,
    limits: Limits,
    clock: Clock,
) -> Plan:
    """The plan of an outcome, with modules that follow others in their shards if that can be."""
    return followed(
        plan_of(theory, cluster, outcome, constraints),
        limits,
        clock,
        lambda stored, pair: plan_of(stored, cluster, replace(outcome, pair=pair), constraints),
    )


def plan_of(
    theory: Theory,
    cluster: Cluster,
    outcome: Outcome,
    constraints: Mapping[str, str | Placement] | None = None,
    inside: Inside | None = None,
) -> Plan:
    pair = outcome.pair
    check(theory, pair.program)
    asked = {
        glob: form if isinstance(form, str) else spelling(form) for glob, form in (constraints or {}).items()
    }
    return Plan(
        theory.graph, pair.program, pair.ratios, pair.lengths, cluster, pair.cost, _report(pair.found),
        outcome.baselines, outcome.iterations, pair.active, asked, outcome.over_memory,
        inside,
    )  # fmt: skip


def _across(
    theory: Theory, cluster: Cluster, step: Step, constraints: Mapping[str, str | Placement] | None = None
) -> Plan:
    """The plan of a step across virtual devices. Its baselines are those of single accelerators, if there are
    any."""
    outcome, inside = step
    plan = plan_of(theory, cluster, replace(outcome, baselines={}, over_memory=()), constraints, inside)
    cost, more = plan.cost, inside.seconds
    memory = tuple(k * n for k, n in zip(cluster.accelerators, inside.memory_bytes, strict=True))
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


def _across_at(
    theory: Theory,
    cluster: Cluster,
    pair: Pair,
    constraints: Mapping[str, str | Placement] | None,
    limits: Limits,
) -> Plan | None:
    """The plan of a pair of machines; None where it does not fit their accelerators."""
    inside = inside_of(theory, cluster, pair, limits, Clock())
    return (
        None
        if lacking(cluster, inside)
        else _across(theory, cluster, (Outcome(pair, {}, ()), inside), constraints)
    )


def _report(found: Found) -> SearchReport:
    return SearchReport(found.cost, found.lower_bound, found.gap, found.stop_reason, found.expansions)


def plan_for(
    theory: Theory,
    cluster: Cluster,
    constraints: Constraints,
    ratios: Ratios | Matrix,
    *,
    limits: Limits | None = None,
    active: tuple[int, ...] | None = None,
) -> Plan:
    """The best program under ``constraints`` at fixed ratios: forced programs for tests and comparisons.

    ``active``: ranks of the devices that take part (default: all), to which the ratios belong, of all segments or
    by segment.
    """
    active = tuple(range(cluster.world)) if active is None else active
    matrix = by_segment(ratios, theory.axes.segments)
    lengths = lengths_for(theory.axes, matrix)
    return _fixed_plan(theory, cluster, constraints, matrix, lengths, limits or Limits(), active)


def problem_text(plan: Plan, constraints: Mapping[str, str | Placement] | None = None) -> str:
    """The search problem at the plan's lengths, as a self-contained file for ``hetspmd solve``."""
    space = search_space(plan.theory, resolve(plan.theory, constraints))
    return Searcher(space).problem(plan.costs, plan.lengths)
