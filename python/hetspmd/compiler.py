"""The compiler: model, example and cluster become a plan (design 2).

Search and ratios alternate (HAP 3.1): from each starting ratio B the search gives the best program Q at the
lengths of B, the linear program the best B for Q, and so on until the pair repeats. The pair with the least
step time in the stage model is kept, with the lengths that belong to it. Data parallel programs are always
among the candidates, so a plan is never worse than those in the same model.

The same is done for subsets of the devices, the fastest one alone among them; the devices of a better subset's
plan are its active ones, the others idle. A subset whose bound :meth:`CostModel.floor` is no better than the
best so far is left out, and so is one that does not fit into memory where the best so far does.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from hetspmd.balance.lengths import Lengths, lengths_for
from hetspmd.balance.ratios import optimise_ratios
from hetspmd.balance.starts import even, proportional, starting_ratios, teams
from hetspmd.cost.cluster import Cluster
from hetspmd.cost.model import CostModel
from hetspmd.cost.step import StepCost, idle_seconds, on_cluster, step_cost
from hetspmd.errors import InfeasibleError, PlanError, SearchError
from hetspmd.forms import IDENTITY, Form, all_gather, is_sharded, sharded_dim
from hetspmd.plan import Iteration, Plan, SearchReport
from hetspmd.rules.theory import Theory, derive
from hetspmd.synth import constraints as known
from hetspmd.synth.checker import check
from hetspmd.synth.constraints import Constraints, resolve
from hetspmd.synth.program import Result
from hetspmd.synth.search import Found, Limits, Progress, Searcher, search
from hetspmd.synth.space import Space, search_space
from hetspmd.trace.step import Loss
from hetspmd.trace.trace import split_example, trace

MAX_ITERATIONS = 4
"""Alternations of search and ratios from one start; pairs repeat after two or three in practice."""


@dataclass(frozen=True)
class _Pair:
    """A program with the lengths it is judged at."""

    program_of: Found
    ratios: tuple[float, ...]
    lengths: Lengths
    cost: StepCost


@dataclass
class _Clock:
    """Wall seconds per stage."""

    seconds: MutableMapping[str, float] = field(default_factory=dict)

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[stage] = self.seconds.get(stage, 0.0) + time.perf_counter() - start


def compile(
    model: nn.Module, example: Any, cluster: Cluster | Mapping[str, Any] | str, *, loss: Loss | None = None,
    strict: bool = False, constraints: Mapping[str, str | Form] | None = None, time_limit: float = 600.0,
    loss_only: bool = False, timings: MutableMapping[str, float] | None = None,
    progress: Progress | None = None,
) -> Plan:  # fmt: skip
    """Synthesize the distributed program of one training step.

    model        an unchanged module; it may be on the meta device
    example      a batch: a dict of keyword arguments or a tuple of positional ones; only shapes are read
    cluster      a :class:`Cluster`, a dict, or the path of a cluster file
    loss         ``loss(model, *args, **kwargs)`` if the model's output does not hold the loss
    strict       raise MissingRuleError instead of warning where an op has no rule
    constraints  globs over parameter names, input paths and ``output[i]`` to ``"replicated"``, ``"shard(d)"``
    time_limit   seconds for one search
    loss_only    the other outputs are not needed (they come back as None)
    timings      filled with wall seconds: trace, rules, synth, balance, total

    Raises a :class:`~hetspmd.errors.HetspmdError` for bad input.
    """
    args, kwargs = split_example(example)
    return compile_plan(
        model, args, kwargs, Cluster.load(cluster), loss=loss, constraints=constraints, strict=strict,
        time_limit=time_limit, loss_only=loss_only, timings=timings, progress=progress,
    )  # fmt: skip


def compile_plan(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], cluster: Cluster, *,
    loss: Loss | None = None, training: bool = True, constraints: Mapping[str, str | Form] | None = None,
    strict: bool = False, time_limit: float = 600.0, loss_only: bool = False, like: Plan | None = None,
    timings: MutableMapping[str, float] | None = None, progress: Progress | None = None,
) -> Plan:  # fmt: skip
    """:func:`compile` for a split example, also of the forward alone (``training=False``).

    ``like``: an earlier plan of the same model; parameters keep its stored forms and lengths on the
    same active devices, so that the same shards serve both plans (another batch shape, evaluation).
    """
    clock = _Clock(timings if timings is not None else {})
    with clock("total"):
        with clock("trace"):
            graph = trace(model, args, kwargs, loss=loss, training=training)
            if loss_only and graph.loss is not None:
                graph = graph.without_outputs()
        with clock("rules"):
            theory = derive(graph, strict=strict)
        limits = Limits(seconds=time_limit)
        if like is None:
            fixed = resolve(theory, constraints)
            return _alternate(theory, cluster, fixed, limits, clock, progress)
        return _like(theory, cluster, like, limits, clock)


def _alternate(
    theory: Theory, cluster: Cluster, fixed: Constraints, limits: Limits, clock: _Clock,
    progress: Progress | None,
) -> Plan:  # fmt: skip
    costs = CostModel(theory, cluster)
    space = search_space(theory, fixed)
    with clock("synth"):
        baselines = _baselines(theory, costs, fixed, limits)
    pairs, iterations = _rounds(space, costs, starting_ratios(costs), limits, clock, progress)
    best = min([*baselines.values(), *pairs], key=lambda p: p.cost.step_seconds)
    seconds = {k: p.cost.step_seconds for k, p in baselines.items()}
    seconds["fastest_device_alone"] = float(min(costs.alone()))
    active = tuple(range(cluster.world))
    everyone = best.cost.step_seconds
    for ranks in teams(costs):
        part = CostModel(theory, cluster.part(ranks))
        if part.floor() >= best.cost.step_seconds:
            continue
        if len(ranks) == 1:
            alone = search_space(theory, known.single_device(theory, fixed.forms))
            pairs, rounds = _rounds(alone, part, (("alone", (1.0,)),), limits, clock, progress)
        else:
            start = ("proportional", proportional(part))
            pairs, rounds = _rounds(space, part, (start,), limits, clock, progress)
        found = min((_team_pair(theory, cluster, ranks, p, fixed) for p in pairs), key=_seconds)
        if _seconds(found) < _seconds(best) and (_fits(found, cluster) or not _fits(best, cluster)):
            best, iterations, active = found, rounds, ranks
    if len(active) < cluster.world:
        seconds["all_devices"] = everyone
    check(theory, best.program_of.program)
    return Plan(
        theory.graph, best.program_of.program, best.ratios, best.lengths, cluster, best.cost,
        _report(best.program_of), seconds, tuple(iterations), active,
    )  # fmt: skip


def _seconds(pair: _Pair) -> float:
    return pair.cost.step_seconds


def _fits(pair: _Pair, cluster: Cluster) -> bool:
    return all(n <= d.memory for n, d in zip(pair.cost.memory_bytes, cluster.devices, strict=True))


def _rounds(
    space: Space, costs: CostModel, starts: Sequence[tuple[str, tuple[float, ...]]], limits: Limits,
    clock: _Clock, progress: Progress | None,
) -> tuple[list[_Pair], list[Iteration]]:  # fmt: skip
    """Search and ratios in turns from each start, on the devices of ``costs``."""
    theory = costs.theory
    pairs: list[_Pair] = []
    iterations: list[Iteration] = []
    for name, start in starts:
        ratios, before = start, None
        seen: set[tuple[object, ...]] = set()
        for index in range(MAX_ITERATIONS):
            lengths = lengths_for(theory.axes, ratios)
            with clock("synth"):
                found = search(space, costs, lengths, limits, start=before, progress=progress)
            with clock("balance"):
                pairs.append(_Pair(found, ratios, lengths, step_cost(theory, costs, found.program, lengths)))
                better = optimise_ratios(theory, costs, found.program)
                moved = lengths_for(theory.axes, better)
                pairs.append(_Pair(found, better, moved, step_cost(theory, costs, found.program, moved)))
            iterations.append(
                Iteration(name, index, ratios, found.cost, min(p.cost.step_seconds for p in pairs[-2:]))
            )
            key = (found.rows, found.moves, moved)
            if key in seen or moved == lengths:
                break
            seen.add(key)
            ratios, before = better, found
    return pairs, iterations


def _team_pair(
    theory: Theory, cluster: Cluster, active: Sequence[int], pair: _Pair, fixed: Constraints
) -> _Pair:
    """A pair of the devices ``active`` as one of the cluster.

    What idle devices are sent costs time, so an output with a row per sample that every active device holds
    whole is left as rows instead, which is free: each device slices what it holds.
    """
    if len(active) == cluster.world:
        return pair
    batch = known.batch_axes(theory)

    def left(result: Result) -> Result:
        shape = theory.graph.tensors[result.tensor].shape
        axis = theory.axes.axis(result.tensor, 0) if shape else None
        free = result.form == IDENTITY and result.tensor not in fixed.forms
        rows = free and axis is not None and axis.id in batch and axis.units > 1
        return Result(result.tensor, all_gather(0)) if rows else result

    program = pair.program_of.program
    program = replace(program, outputs=tuple(map(left, program.outputs)))
    idle = idle_seconds(theory.graph, program, cluster, active)
    cost = on_cluster(pair.cost, cluster, active, idle)
    return replace(pair, program_of=replace(pair.program_of, program=program), cost=cost)


def _baselines(theory: Theory, costs: CostModel, fixed: Constraints, limits: Limits) -> dict[str, _Pair]:
    """Known kinds of programs in the same cost model, as far as the user's constraints allow them.

    Data parallelism with even and proportional shares, the latter with sharded parameters (ZeRO-3), and the
    best program that does not divide the batch (tensor parallelism).
    """
    found: dict[str, _Pair] = {}
    quick = replace(limits, expansions=min(limits.expansions, 10_000))
    for name, wanted, ratios in (
        ("data_parallel_even", known.data_parallel(theory), even(costs)),
        ("data_parallel_proportional", known.data_parallel(theory), proportional(costs)),
        ("zero_like", known.zero_like(theory), proportional(costs)),
        ("tensor_parallel", known.tensor_parallel(theory), proportional(costs)),
    ):
        if any(wanted.forms.get(t, form) != form for t, form in fixed.forms.items()):
            continue
        constraints = Constraints({**fixed.forms, **wanted.forms}, wanted.row_filter)
        try:
            lengths = lengths_for(theory.axes, ratios)
            result = search(search_space(theory, constraints), costs, lengths, quick)
        except (InfeasibleError, SearchError):
            continue
        found[name] = _Pair(result, ratios, lengths, step_cost(theory, costs, result.program, lengths))
    return found


def _like(theory: Theory, cluster: Cluster, like: Plan, limits: Limits, clock: _Clock) -> Plan:
    forms, lengths = _pinned(theory, like)
    with clock("synth"):
        return _fixed_plan(theory, cluster, Constraints(forms), like.ratios, lengths, limits, like.active)


def _fixed_plan(
    theory: Theory, cluster: Cluster, fixed: Constraints, ratios: tuple[float, ...], lengths: Lengths,
    limits: Limits, active: tuple[int, ...],
) -> Plan:  # fmt: skip
    """The best program at given lengths."""
    costs = CostModel(theory, cluster.part(active))
    found = search(search_space(theory, fixed), costs, lengths, limits)
    cost = step_cost(theory, costs, found.program, lengths)
    pair = _team_pair(theory, cluster, active, _Pair(found, ratios, lengths, cost), fixed)
    program = pair.program_of.program
    check(theory, program)
    return Plan(
        theory.graph, program, ratios, lengths, cluster, pair.cost, _report(found), {}, (), active
    )  # fmt: skip


def _pinned(theory: Theory, like: Plan) -> tuple[dict[int, Form], Lengths]:
    """Stored forms of parameters and lengths of their axes, as in ``like``.

    Raises PlanError if the graph cannot have them.
    """
    stored = like.parameter_layout()
    forms: dict[int, Form] = {}
    pinned: dict[int, tuple[int, ...]] = {}
    for p in theory.graph.parameters:
        form, extents = stored[p.name]
        forms[p.tensor] = form
        if not is_sharded(form):
            continue
        dim = sharded_dim(form)
        axis = theory.axes.axis(p.tensor, dim)
        unit = theory.graph.tensors[p.tensor].shape[dim] // axis.units if axis is not None else 0
        if axis is None or any(e % unit for e in extents):
            raise PlanError(
                f"{p.name} is stored in shards of {list(extents)}, which the new graph cannot use"
            )
        units = tuple(e // unit for e in extents)
        if pinned.setdefault(axis.id, units) != units:
            raise PlanError(f"{p.name} is stored in other shards than parameters it must agree with")
    lengths = lengths_for(theory.axes, like.ratios)
    return forms, Lengths(lengths.world, tuple(pinned.get(i, u) for i, u in enumerate(lengths.units)))


def _report(found: Found) -> SearchReport:
    return SearchReport(found.cost, found.lower_bound, found.gap, found.stop_reason, found.expansions)


def plan_for(
    theory: Theory, cluster: Cluster, constraints: Constraints, ratios: tuple[float, ...], *,
    limits: Limits | None = None, active: tuple[int, ...] | None = None,
) -> Plan:  # fmt: skip
    """The best program under ``constraints`` at fixed ratios: forced programs for tests and comparisons.

    ``active``: ranks of the devices that take part (default: all), to which the ratios belong.
    """
    active = tuple(range(cluster.world)) if active is None else active
    lengths = lengths_for(theory.axes, ratios)
    return _fixed_plan(theory, cluster, constraints, ratios, lengths, limits or Limits(), active)


def problem_text(plan: Plan, constraints: Mapping[str, str | Form] | None = None) -> str:
    """The search problem at the plan's lengths, as a self-contained file for ``hetspmd solve``."""
    space = search_space(plan.theory, resolve(plan.theory, constraints))
    return Searcher(space).problem(plan.costs, plan.lengths)
