"""Plans in which modules that follow others are stored in the others' shards (:mod:`hetspmd.optimize.followers`).

The plan comes first, without regard to that. Where a follower is stored otherwise than what it follows, another
program is searched at the same ratios in which it is not. Its report says "following" in the place of "optimal":
its bound is of programs with this storage, and not of all.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from hetspmd.errors import FollowerWarning, InfeasibleError, SearchError
from hetspmd.optimize.candidate import Candidate
from hetspmd.optimize.considered import instead
from hetspmd.optimize.followers import followers, stored_as_followed
from hetspmd.optimize.prefetch import further
from hetspmd.optimize.synthesis import Clock, Synthesis
from hetspmd.optimize.synthesize import candidate_at, within_memory
from hetspmd.placement import Placement
from hetspmd.plan.plan import Plan
from hetspmd.plan.reports import Considered
from hetspmd.program.stored import Stored, as_stored
from hetspmd.search.constraints import resolve, spelling
from hetspmd.search.search import Limits

FOLLOWING = "following"
"""Why a search has stopped: with the certified optimum among programs whose followers are stored as is asked."""


def follows(plan: Plan) -> bool:
    """Whether all modules that follow others are in their shards, but for those whose storage the user has said."""
    return _moved(plan) is None


def followed(
    plan: Plan, limits: Limits, clock: Clock, planned: Callable[[Synthesis, Candidate], Plan | None]
) -> Plan:
    """The plan with modules that follow others in their shards; ``plan`` itself where they are, or where none is
    found in which they can be so.

    ``planned``: the plan of a candidate of a synthesis; None where it does not fit the memory.
    """
    stored = _moved(plan)
    if stored is None:
        return plan
    with clock("rules"):
        theory, forms, lengths = as_stored(plan.theory, stored, plan.ratios)
    with clock("synth"), suppress(InfeasibleError, SearchError):
        said = resolve(theory, plan.constraints)
        ctx = Synthesis(theory, plan.cluster, replace(said, forms={**said.forms, **forms}), limits)
        candidate = within_memory(ctx, candidate_at(ctx, plan.ratios, lengths, plan.active))
        if candidate is not None:
            candidate = further(ctx, ctx.costs(plan.active), candidate) or candidate
        new_plan = None if candidate is None else planned(ctx, candidate)
        if new_plan is not None:
            optimal = new_plan.search.stop_reason == "optimal"
            search = replace(new_plan.search, stop_reason=FOLLOWING) if optimal else new_plan.search
            taken = Considered(
                reason="modules that follow others in the others' shards",
                active=new_plan.active,
                seconds=new_plan.cost.step_seconds,
                simulated=True,
                verdict="taken",
            )
            return replace(
                new_plan, search=search, considered=instead(plan.considered, taken, verdict="storage")
            )
    return plan


def warn_of_strays(plan: Plan) -> None:
    """Warn where a module that follows another one is stored otherwise."""
    strays = _moved(plan)
    if strays is None:
        return
    stored = plan.parameter_layout()
    for follower, leader in followers(plan.graph).items():
        if strays[follower] != stored[follower]:
            warnings.warn(
                f"{follower} has no gradient and is a copy of {leader} by its name and shape, but is stored "
                f"otherwise ({_spelled(stored[follower])}; {leader}: {_spelled(stored[leader])}): no program was "
                "found that fits, and in which both have the same shards. A loop that moves one by the other, "
                "element by element, finds other shapes on the ranks. Where yours does, store both alike: "
                f"constraints={{{_glob(follower, leader)!r}: 'replicated', "
                f"{_glob(leader, follower)!r}: 'replicated'}}",
                FollowerWarning,
                stacklevel=3,
            )
            return


def _moved(plan: Plan) -> Stored | None:
    """The storage with every follower in the shards of what it follows, but for what the user has said; None where
    it is so already."""
    if not followers(plan.graph):
        return None
    said = resolve(plan.theory, plan.constraints).forms
    return stored_as_followed(plan.graph, plan.parameter_layout(), frozenset(said))


def _spelled(stored: tuple[Placement, tuple[int, ...]]) -> str:
    form, extents = stored
    return f"{spelling(form)} of {list(extents)}" if extents else spelling(form)


def _glob(name: str, other: str) -> str:
    """The parameters of the module of ``name`` that has a copy of the parameter ``other``."""
    parts, others = name.split("."), other.split(".")
    same = 0
    while same < min(len(parts), len(others)) - 1 and parts[-1 - same] == others[-1 - same]:
        same += 1
    return ".".join([*parts[: len(parts) - same], "*"]) if same else name
