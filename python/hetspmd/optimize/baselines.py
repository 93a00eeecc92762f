"""Known kinds of programs as candidates: a plan is never worse than one of them in the same cost model."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from hetspmd.cost.model import CostModel
from hetspmd.errors import InfeasibleError, SearchError
from hetspmd.optimize.candidate import Candidate, Evaluator
from hetspmd.optimize.synthesis import Synthesis
from hetspmd.program.lengths import by_segment, lengths_for
from hetspmd.ratios.starts import even, proportional
from hetspmd.search import constraints as known
from hetspmd.search.constraints import Constraints
from hetspmd.search.search import SearchResult


def baselines(ctx: Synthesis, costs: CostModel, only: Collection[str] | None = None) -> dict[str, Candidate]:
    """Known kinds of programs on all devices by name (``only`` these), as far as the user's constraints allow them.

    Data parallelism with even and proportional shares, the latter with sharded parameters (ZeRO-3), and the
    best program that does not divide the batch (tensor parallelism).
    """
    candidates: dict[str, Candidate] = {}
    quick = replace(ctx.limits, expansions=min(ctx.limits.expansions, ctx.thresholds.baseline_expansions))
    before: SearchResult | None = None
    for name, wanted, ratios in (
        ("data_parallel_even", known.data_parallel(ctx.theory), even(costs)),
        ("data_parallel_proportional", known.data_parallel(ctx.theory), proportional(costs)),
        ("zero_like", known.zero_like(ctx.theory), proportional(costs)),
        ("tensor_parallel", known.tensor_parallel(ctx.theory), proportional(costs)),
    ):
        if only is not None and name not in only:
            continue
        if any(wanted.forms.get(t, form) != form for t, form in ctx.constraints.forms.items()):
            continue
        same = candidates.get("data_parallel_even")
        equal = by_segment(ratios, ctx.theory.axes.segments)
        if name == "data_parallel_proportional" and same is not None and same.ratios == equal:
            candidates[name] = same
            continue
        constraints = Constraints({**ctx.constraints.forms, **wanted.forms}, wanted.row_filter)
        lengths = lengths_for(ctx.theory.axes, ratios)
        try:
            with ctx.clock("synth"):
                within = ctx.searcher.space.within(constraints)
                result = ctx.searcher.search(costs, lengths, quick, within=within, start=before)
        except (InfeasibleError, SearchError):
            continue
        before = result
        # Its bound is of programs of its kind.
        evaluator = Evaluator(ctx, costs, result, ctx.everyone, None, name.replace("_", " "))
        candidates[name] = evaluator(equal, lengths)
    return candidates
