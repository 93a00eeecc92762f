"""The curves of a model's whole steps on every kind of device, up to the rows at which memory ends (Poplar,
Algorithm 1).

The ranks go in rounds. In each round every rank runs steps of the number of rows that is next for its kind of
device, all at once, as in training; nothing communicates within a round, so that none waits for a rank whose
memory ends. After it the ranks tell each other what came of it, and each knows what is next for all: 1, 2, 4, ...
rows until steps no longer fit on some rank of the kind, then rows between the most that fit and the least that
did not: those that would fit if the bytes went on growing as they did, and the middle where such guesses lead
nowhere. No round begins that would take longer than what is left of the budget; the least is one round.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any

from torch import nn

from hetspmd.cluster.cluster import Cluster
from hetspmd.cluster.step_curves import ModelSteps, StepCurve, StepPoint
from hetspmd.errors import ProfileError
from hetspmd.profile.grouping import kinds_of
from hetspmd.profile.host import host_identity, usable_memory
from hetspmd.profile.measure import Options, Profile
from hetspmd.profile.profile_thresholds import THRESHOLDS
from hetspmd.profile.rows import RowPlaces, find_rows
from hetspmd.profile.session import Session
from hetspmd.profile.step_runs import COUNTED_STEPS, Attempt, StepCase, StepRunner
from hetspmd.trace.autocast import autocast_for
from hetspmd.trace.trace import split_example

Tick = Callable[[str], None]


def step_case(
    name: str, model: nn.Module, example: Any, places: RowPlaces | None = None, autocast: str | None = None
) -> StepCase:
    """What is run of a TARGET. ``places``: where it has rows, if that is known. ``autocast``: the dtype of the
    ``torch.autocast`` under which it runs, if any.

    Raises BatchSizeError for a model that cannot be given other numbers of rows.
    """
    args, kwargs = split_example(example)
    if places is None:
        with autocast_for(model, autocast):
            places = find_rows(name, model, args, kwargs)
    return StepCase(name, model, args, kwargs, places, autocast)


def with_steps(
    session: Session,
    profile: Profile,
    cases: Sequence[StepCase],
    options: Options,
    memory: int | None = None,
    tick: Tick = lambda what: None,
) -> Profile:
    """The profile with the curves of the models' steps, measured for about ``options.budget`` seconds; those of
    other models stay. ``memory``: bytes that a step is given on every rank; by default what the cluster says that
    its device has, and what it can use where the cluster does not say. Given bytes become the devices'
    ``memory``.

    The same on every rank. Raises ProfileError on every rank if one fails, and if the profile is of another
    number of devices than there are ranks.
    """
    if profile.cluster.world != session.world:
        raise ProfileError(
            f"the cluster has {profile.cluster.world} devices and there are {session.world} ranks; start as many"
        )
    cluster = profile.cluster
    if memory is not None:
        cluster = replace(cluster, devices=tuple(replace(d, memory=float(memory)) for d in cluster.devices))
    given = _memories(session, cluster)
    models: list[ModelSteps] = []
    for case in cases:
        if case.places.identity in {model.identity for model in models}:
            continue
        part = max(options.budget, 0.0) / len(cases)
        runner = StepRunner(case, session.device, given[session.rank], options.optimizer, options.tolerance)
        with_name = _named(tick, case.name if len(cases) > 1 else "")
        curves = measure_curves(session, kinds_of(cluster.devices), given, runner.run, part, with_name)
        models.append(
            ModelSteps(case.places.identity, case.name, case.places.rows, options.optimizer, curves)
        )
    new = {model.identity for model in models}
    steps = (*(m for m in cluster.steps if m.identity not in new), *models)
    about = {**(profile.measured.about or {}), "steps": ", ".join(map(_about, models))}
    measured = replace(profile.measured, steps=steps, about=about)
    return Profile(replace(cluster, steps=steps), measured)


def _memories(session: Session, cluster: Cluster) -> list[int]:
    """Bytes that a step is given on each rank: the least of its kind of device."""
    hosts = session.together("naming the host", host_identity)
    sharing = Counter(hosts)[hosts[session.rank]]
    usable = session.together("asking for memory", lambda: usable_memory(session.device, sharing))
    given = [0] * cluster.world
    for kind in kinds_of(cluster.devices):
        own = cluster.devices[kind[0]].memory
        least = int(min(usable[r] for r in kind) if math.isinf(own) else own)
        for rank in kind:
            given[rank] = max(least, 1)
    return given


def _named(tick: Tick, name: str) -> Tick:
    return lambda what: tick(f"{name} {what}".strip())


def _about(model: ModelSteps) -> str:
    limits = "; ".join(
        f"at most {c.limit} rows" if c.over is not None else f"{c.limit} rows and more" for c in model.curves
    )
    return f"{model.name} ({limits})"


@dataclass
class Ladder:
    """Which rows come next on a kind of device whose steps are given ``memory`` bytes.

    fits      the most rows that fit, 0 if none yet
    over      the least that did not fit
    refused   the most rows that the model does not compute at all
    counted   bytes of ``over``
    guesses   how often the limit was guessed
    """

    memory: int
    fits: int = 0
    over: int | None = None
    refused: int = 0
    points: list[StepPoint] = field(default_factory=list)
    counted: int = 0
    guesses: int = 0

    def next(self, left: float) -> int | None:
        """The rows to try; None where the limit is known, growing has no end, or it would take longer than the
        seconds that are ``left``. The first rows are tried however few these are."""
        low = max(self.fits, self.refused)
        if self.over is None:
            rows = max(2 * low, 1) if low < THRESHOLDS.most_rows else 0
        else:
            rows = self._between(low, self.over) if self.over - low > 1 else 0
        last = max(self.points, key=lambda p: p.rows, default=None)
        steps = THRESHOLDS.step_samples + COUNTED_STEPS
        expected = 0.0 if last is None else steps * last.seconds * rows / last.rows
        tried = low > 0 or self.over is not None
        return None if rows == 0 or (tried and expected >= left) else rows

    def _between(self, low: int, over: int) -> int:
        """Rows above ``low`` and below ``over``: the most of which the bytes would fit if they grow as they did
        last, and the middle where that was guessed too often."""
        if len(self.points) < 2 or self.guesses >= THRESHOLDS.limit_guesses:
            return (low + over) // 2
        before, last = sorted(self.points, key=lambda p: p.rows)[-2:]
        each = (last.peak - before.peak) / (last.rows - before.rows)
        guess = last.rows + int((self.memory - last.peak) / each) if each > 0 else low
        return min(max(guess, low + 1), over - 1)

    def take(self, attempts: Sequence[Attempt]) -> None:
        """What came of the last rows on each rank of the kind."""
        rows, counted = attempts[0].rows, max(a.counted for a in attempts)
        self.guesses += self.over is not None
        points = [a.point for a in attempts if a.point is not None]
        if any(a.refused for a in attempts):
            self.refused = max(self.refused, rows)
        elif len(points) < len(attempts):
            self.over, self.counted = rows, max(counted, 1)
        else:
            self.fits = rows
            self.points.append(
                StepPoint(
                    rows,
                    float(f"{median(p.seconds for p in points):.4g}"),
                    min(p.low for p in points),
                    max(p.high for p in points),
                    sum(p.samples for p in points),
                    max(p.peak for p in points),
                    counted,
                )
            )

    def curve(self, ranks: tuple[int, ...]) -> StepCurve:
        """What was measured."""
        over = None if self.over is None else (self.over, self.counted)
        return StepCurve(ranks, self.memory, tuple(sorted(self.points, key=lambda p: p.rows)), over)


def _maybe(run: Callable[[int, float], Attempt], rows: int | None, deadline: float) -> Attempt | None:
    """Steps of so many rows; nothing where a rank only waits for others."""
    return None if rows is None else run(rows, deadline)


def measure_curves(
    session: Session,
    kinds: Sequence[tuple[int, ...]],
    given: Sequence[int],
    run: Callable[[int, float], Attempt],
    budget: float,
    tick: Tick = lambda what: None,
) -> tuple[StepCurve, ...]:
    """The curves of one model on all kinds of devices, from rounds of about ``budget`` seconds together.

    ``given``: bytes that a step has on each rank. ``run``: steps of so many rows on this rank's device, repeated
    until the deadline on ``perf_counter``. Raises ProfileError on every rank if a step fails on one for another
    reason than memory.
    """
    ladders = [Ladder(given[kind[0]]) for kind in kinds]
    mine = next(n for n, kind in enumerate(kinds) if session.rank in kind)
    begin, left = perf_counter(), budget
    while any(rows := [ladder.next(left) for ladder in ladders]):
        own = rows[mine]
        deadline = perf_counter() + THRESHOLDS.step_part * left
        if own is not None:
            tick(f"{own} rows")
        attempts = session.together(
            f"measuring steps of {own} rows",
            partial(_maybe, run, own, deadline),
        )
        for ladder, kind in zip(ladders, kinds, strict=True):
            of_kind = [a for rank in kind if (a := attempts[rank]) is not None]
            if of_kind:
                ladder.take(of_kind)
        left = budget - max(session.together("reading the clock", lambda: perf_counter() - begin))
    return tuple(  # of the kinds on which anything is known
        ladder.curve(kind)
        for ladder, kind in zip(ladders, kinds, strict=True)
        if ladder.points or ladder.over is not None
    )
