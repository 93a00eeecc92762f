"""Why each candidate was not taken: what a plan keeps of the comparison."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from hetspmd.optimize.candidate import Candidate
from hetspmd.optimize.synthesis import Synthesis
from hetspmd.optimize.thresholds import THRESHOLDS
from hetspmd.plan.plan import Plan
from hetspmd.plan.reports import Considered


@dataclass(frozen=True)
class LeftOut:
    """Devices on which nothing was searched, since no program on them can take fewer seconds than ``seconds``, or
    none fits: they lack at least the bytes ``lacking``, by rank."""

    active: tuple[int, ...]
    seconds: float
    lacking: tuple[tuple[int, int], ...] = ()


def verdicts(
    ctx: Synthesis, candidates: Iterable[Candidate], best: Candidate, left_out: Sequence[LeftOut] = ()
) -> tuple[Considered, ...]:
    """Of each different candidate why it is not ``best``, and the devices that were left out."""
    different: dict[object, Candidate] = {}
    for c in (best, *candidates):
        result, distance = c.result, c.evaluator.prefetch_distance
        different.setdefault((result.rows, result.moves, distance, c.lengths, c.active), c)
    considered = [_verdict(ctx, c, best) for c in different.values()]
    out = [
        Considered(
            reason="any program",
            active=o.active,
            seconds=o.seconds,
            simulated=False,
            verdict="memory" if o.lacking else "bound",
            lacking=o.lacking,
        )
        for o in left_out
    ]
    return _ordered([*considered, *out])


def _verdict(ctx: Synthesis, candidate: Candidate, best: Candidate) -> Considered:
    simulated = candidate.simulated
    with ctx.clock("balance"):
        seconds = candidate.seconds if simulated else candidate.stages.lower_bound
        slower = seconds > best.seconds
        lacking = vars(candidate).get("lacking", {}) if slower else candidate.lacking
    if candidate is best:
        verdict = "taken"
    elif lacking:
        verdict = "memory"
    elif not simulated:
        verdict = "bound"
    else:
        verdict = "slower" if slower else "equal"
    return Considered(
        reason=candidate.reason,
        active=candidate.active,
        seconds=seconds,
        simulated=simulated,
        verdict=verdict,
        lacking=tuple(sorted(lacking.items())),
    )


def memory_is_short(considered: Iterable[Considered], seconds: float) -> bool:
    """Whether memory kept a candidate from being taken that may be faster than these seconds."""
    faster = seconds * (1 - THRESHOLDS.memory_gain)
    return any(c.verdict == "memory" and c.seconds < faster for c in considered)


def among(considered: Iterable[Considered], prefix: str) -> tuple[Considered, ...]:
    """The candidates of one of several ways to plan, with the way before their reasons."""
    return tuple(replace(c, reason=f"{prefix}: {c.reason}") for c in considered)


def one_taken(ways: Iterable[tuple[Iterable[Considered], bool]], best: Candidate) -> tuple[Considered, ...]:
    """The candidates of several ways to plan, each with one that was taken, and whether it is the way of
    ``best``."""
    candidates: list[Considered] = []
    for considered, own in ways:
        group = tuple(considered)
        candidates += group if own else _lost(group, _verdict_on(group, best.seconds, faster="asked"))
    return _ordered(candidates)


def ways_taken(plans: Mapping[str, Plan], taken: str) -> tuple[Considered, ...]:
    """The candidates of plans that were made in several ways, by the way; the plan of one of them was taken."""
    candidates: list[Considered] = []
    for way, plan in plans.items():
        # What accelerators inside machines add is known of the best candidate alone.
        seconds = plan.cost.step_seconds
        named = among(plan.considered, way)
        group = tuple(replace(c, seconds=seconds) if c.verdict == "taken" else c for c in named)
        best = plans[taken].cost.step_seconds
        candidates += group if way == taken else _lost(group, _verdict_on(group, best, faster="equal"))
    return _ordered(candidates)


def instead(
    considered: Iterable[Considered], taken: Considered, verdict: str = "slower"
) -> tuple[Considered, ...]:
    """The candidates with another one taken; ``verdict``: why the one is not that was, and none that is faster than
    the other one."""
    others = [
        replace(c, verdict=verdict) if c.verdict == "slower" and c.seconds <= taken.seconds else c
        for c in considered
    ]
    return _ordered([taken, *_lost(others, verdict)])


def taken_instead(considered: Iterable[Considered], candidate: Candidate) -> tuple[Considered, ...]:
    """The candidates with this one of them taken, which was not the fastest but is the best."""
    seconds = candidate.seconds
    own = Considered(
        reason=candidate.reason, active=candidate.active, seconds=seconds, simulated=True, verdict="taken"
    )
    others = [
        c
        for c in considered
        if (c.reason, c.active) != (own.reason, own.active) or (c.simulated and c.seconds != seconds)
    ]
    return instead(others, own)


def with_other_way(
    one: Iterable[Considered], other: Iterable[Considered], lacking: Mapping[int, int]
) -> tuple[Considered, ...]:
    """The candidates of ``other``, a way to plan that was compared with those of ``one``, where the one that was
    taken of these is the plan after all. ``lacking``: the bytes that ranks lack for the other way's, if any."""
    (own,) = (c for c in one if c.verdict == "taken")
    others = [c for c in other if replace(c, verdict="taken") != own]
    if lacking:
        short = tuple(sorted(lacking.items()))
        others = [replace(c, verdict="memory", lacking=short) if c.verdict == "taken" else c for c in others]
    return instead(others, own)


def _verdict_on(considered: Iterable[Considered], best: float, *, faster: str) -> str:
    """Why the candidate that was taken of one way is not the plan, whose step takes ``best`` seconds."""
    seconds = min((c.seconds for c in considered if c.verdict == "taken"), default=best)
    return "slower" if seconds > best else "equal" if seconds == best else faster


def _lost(considered: Iterable[Considered], verdict: str) -> list[Considered]:
    """The candidates where neither the one that was taken of them is the plan, nor those that are as fast."""
    return [replace(c, verdict=verdict) if c.verdict in ("taken", "equal") else c for c in considered]


def _ordered(considered: Iterable[Considered]) -> tuple[Considered, ...]:
    """The one that was taken, then those that were simulated, the fastest first, then the others."""
    return tuple(
        sorted(considered, key=lambda c: (c.verdict != "taken", not c.simulated, c.seconds, c.reason))
    )
