"""A step that is to run in micro-batches: its loop, and the outputs that it then has."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from hetspmd.errors import DroppedOutputWarning, MemoryLimitError, MicroBatchError
from hetspmd.optimize.considered import memory_is_short
from hetspmd.optimize.thresholds import THRESHOLDS
from hetspmd.plan.plan import Plan
from hetspmd.program.micro_batches import MicroBatches, micro_batches, samples
from hetspmd.program.time_split import split_in_time
from hetspmd.rules.nested import composes
from hetspmd.rules.rule import Triple
from hetspmd.rules.theory import Theory, derive
from hetspmd.search.constraints import Constraints
from hetspmd.trace.compat.trees import spec_from_text
from hetspmd.trace.graph import Output


def in_micro_batches(
    theory: Theory, count: int, *, fewer: bool = False
) -> tuple[Theory, MicroBatches | None]:
    """The theory of a training step in ``count`` micro-batches, and its loop; None for a single one.

    Outputs with a row for each sample are left out, with a warning: to keep them would take the memory that
    micro-batches save; the theory is the same for any number of micro-batches. ``fewer``: a batch of fewer samples
    has as many micro-batches as samples.

    Raises MicroBatchError for a step that cannot be split exactly, and where the model itself keeps rows of the
    batch.
    """
    graph = theory.graph
    if fewer:
        count = min(count, max(samples(theory, theory.batch_axes), 1))
        if count > 1:
            count = min(count, samples(theory, split_in_time(theory).axes))
    if count == 1:
        return theory, None
    batches = micro_batches(theory, count)
    rows = [place for place, output in enumerate(graph.outputs) if output.tensor in batches.joined]
    returned = spec_from_text(graph.output_spec).num_leaves
    if any(place >= returned for place in rows):
        raise MicroBatchError(
            "forward leaves rows of the batch in an attribute of the model, which micro-batches would leave in "
            "parts; return them instead, or use micro_batches=1"
        )
    if rows:
        warnings.warn(
            f"{len(rows)} output{'s' if len(rows) > 1 else ''} with a row for each sample come back as None from a "
            "training step in micro-batches; call the model under torch.no_grad() for them",
            DroppedOutputWarning,
            stacklevel=4,
        )
        kept: list[Theory] = vars(theory).setdefault("_without_rows", [])
        if not kept:
            outputs = tuple(Output(None) if n in rows else output for n, output in enumerate(graph.outputs))
            kept.append(derive(graph.with_outputs(outputs), quiet=True))
        theory = kept[0]
        batches = micro_batches(theory, count)
    return theory, batches


Planned = Callable[[Theory, MicroBatches | None], Plan]
"""What makes the plan of a step in micro-batches."""


@dataclass(frozen=True)
class StepDraft:
    """What is known of the plan of a step before it is made.

    seconds          of the step, or more than it takes
    memory_is_short  memory may keep a faster program from being the plan
    plan             makes the plan
    """

    seconds: float
    memory_is_short: bool
    plan: Callable[[], Plan]

    @classmethod
    def of(cls, plan: Plan) -> StepDraft:
        """That of a plan that has been made."""
        seconds = plan.cost.step_seconds
        return cls(seconds, memory_is_short(plan.considered, seconds), lambda: plan)


Drafted = Callable[[Theory, MicroBatches | None], StepDraft]
"""What begins the plan of a step in micro-batches."""


def best_number(
    theory: Theory,
    count: int | Literal["auto"],
    planned: Planned,
    quickly: Planned | None = None,
    drafted: Drafted | None = None,
    lasting: float | None = None,
) -> Plan:
    """The plan in ``count`` micro-batches; for ``"auto"`` the fastest of those in one, two, four and so on, or in a
    number between the best of these and its half, where each micro-batch communicates.

    More are tried as long as memory is short: where none fits, or where it may have kept a faster program from
    being the best, until one is not faster than the one before. ``quickly`` makes plans like ``planned`` but says
    sooner that none fits (default: ``planned``); where it finds none in any number, ``planned`` is asked for one in
    the most. ``drafted`` begins those of ``quickly``, of which only the best is made. ``lasting``: the part of the
    devices' memory that is held in any number, of which those that lack much by it are left out.

    Raises what the last one raised, if none fits, and MicroBatchError for a step that does not fit and cannot be
    divided.
    """
    if count != "auto":
        return planned(*in_micro_batches(theory, count))
    thorough, quickly = planned, quickly or planned
    numbers = _Numbers(theory, drafted or _drafts(quickly), lasting)
    best = numbers.fewest()
    if best is None:
        assert numbers.lacking is not None, "no number of micro-batches fits, so the last one lacks memory"
        if quickly is thorough:
            raise numbers.lacking
        return thorough(*in_micro_batches(theory, numbers.all[-1]))
    (plan, number), short = numbers.fastest(best), numbers.short
    return _fewer(theory, plan, (short, number), quickly) if 2 * short >= number else plan


def _drafts(planned: Planned) -> Drafted:
    return lambda theory, batches: StepDraft.of(planned(theory, batches))


class _Numbers:
    """The numbers of micro-batches one, two, four and so on, and what drafts in them have told."""

    def __init__(self, theory: Theory, drafted: Drafted, lasting: float | None) -> None:
        most = max(samples(theory, theory.batch_axes), 1)
        self.all = [1]
        while self.all[-1] < most:
            self.all.append(min(2 * self.all[-1], most))
        self.short = 0
        """The largest number in which nothing fits, of those that are smaller than any in which something does."""
        self.lacking: MemoryLimitError | None = None
        self._theory, self._drafted, self._lasting = theory, drafted, lasting

    def _in(self, place: int) -> StepDraft:
        return self._drafted(*in_micro_batches(self._theory, self.all[place]))

    def fewest(self) -> tuple[StepDraft, int] | None:
        """The draft in the fewest micro-batches that fit, and their number's place; None where none fits."""
        place = before = 0
        while True:
            try:
                found = self._in(place)
                break
            except MemoryLimitError as error:
                self.lacking, self.short = error, self.all[place]
                if place + 1 == len(self.all):
                    return None
                before, place = place + 1, self._next(place, error)
            except MicroBatchError as error:
                if place == before:
                    raise MicroBatchError(
                        f"{error}. In one it does not fit: {self.lacking}"
                    ) from self.lacking
                place = before
        # Of the numbers that were left out, the last ones may do.
        for fewer in range(place - 1, before - 1, -1):
            try:
                found, place = self._in(fewer), fewer
            except MemoryLimitError:
                self.short = self.all[fewer]
                break
        return found, place

    def _next(self, place: int, lacking: MemoryLimitError) -> int:
        """The place of the next number, after those in which programs like the one that lacks least lack memory,
        too: what they do not hold in any number falls with the number."""
        if self._lasting is None:
            return place + 1
        missing = max((amount / max(have, 1) for amount, have in lacking.lacking.values()), default=0.0)
        free = 1 - self._lasting
        enough = self.all[place] * (missing + free) / free if free > 0 else 0.0
        return max(p for p, number in enumerate(self.all) if number <= enough or p == place + 1)

    def fastest(self, fewest: tuple[StepDraft, int]) -> tuple[Plan, int]:
        """The fastest plan, and its number, of the fewest micro-batches that fit and of more, each twice as many,
        as long as memory is short and the next draft is faster than the best before. Where drafts are nearly as
        good as each other, the plans decide."""
        best, at = fewest
        drafts = [(best, self.all[at])]
        for place in range(at + 1, len(self.all)):
            if not best.memory_is_short:
                break
            try:
                other = self._in(place)
            except MemoryLimitError:
                continue
            except MicroBatchError:
                break
            drafts.append((other, self.all[place]))
            if other.seconds >= best.seconds:
                break
            best = other
        most = best.seconds * (1 + THRESHOLDS.near_draft)
        plans = [(draft.plan(), number) for draft, number in drafts if draft.seconds <= most]
        return min(plans, key=lambda made: made[0].cost.step_seconds)


def _fewer(theory: Theory, best: Plan, between: tuple[int, int], planned: Planned) -> Plan:
    """The plan, or a faster one in the fewest micro-batches that fit between a number that does not and that of the
    plan, found by bisection, where the plan waits for what it communicates in each of them."""
    short, number = between
    while number - short > 1 and _waits_in_each(best):
        middle = (short + number) // 2
        try:
            plan = planned(*in_micro_batches(theory, middle))
        except MemoryLimitError:
            short = middle
            continue
        if plan.cost.step_seconds >= best.cost.step_seconds:
            break
        best, number = plan, middle
    return best


def _waits_in_each(plan: Plan) -> bool:
    """Whether there are collectives in the loop over micro-batches that fewer of them would save, and the step is
    longer than what the devices compute."""
    computed = max(plan.cost.per_device_compute)
    return bool(plan.repeated) and plan.cost.step_seconds * (1 - THRESHOLDS.hidden_gain) > computed


def composed(theory: Theory, batches: MicroBatches | None, constraints: Constraints) -> Constraints:
    """The constraints, and that an instruction's row on the devices can be had at once with its row in time."""
    if batches is None:
        return constraints
    known: dict[tuple[int, Triple, Triple], bool] = {}
    asked, loop = constraints.row_filter, batches.loop

    def allowed(instruction: int, row: Triple, axis: int | None) -> bool:
        if asked is not None and not asked(instruction, row, axis):
            return False
        if loop.phases[instruction] != "in":
            return True
        call, in_time = theory.calls[instruction], loop.rows[instruction]
        key = id(call), in_time, row
        if key not in known:
            known[key] = composes(call, theory.rules[instruction], in_time, row)
        return known[key]

    return replace(constraints, row_filter=allowed)
