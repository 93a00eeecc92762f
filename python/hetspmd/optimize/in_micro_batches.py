"""A step that is to run in micro-batches: its loop, and the outputs that it then has."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
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


def best_number(
    theory: Theory, count: int | Literal["auto"], planned: Planned, quickly: Planned | None = None
) -> Plan:
    """The plan in ``count`` micro-batches; for ``"auto"`` the fastest of those in one, two, four and so on, or in a
    number between the best of these and its half, where each micro-batch communicates.

    More are tried as long as memory is short: where none fits, or where it may have kept a faster program from
    being the best, until one is not faster than the one before. ``quickly`` makes plans like ``planned`` but says
    sooner that none fits (default: ``planned``); where it finds none in any number, ``planned`` is asked for one in
    the most.

    Raises what the last one raised, if none fits, and MicroBatchError for a step that does not fit and cannot be
    divided.
    """
    if count != "auto":
        return planned(*in_micro_batches(theory, count))
    quickly = quickly or planned
    number, most = 1, max(samples(theory, theory.batch_axes), 1)
    best: tuple[Plan, int] | None = None
    lacking: MemoryLimitError | None = None
    short = 0
    while True:
        try:
            plan = quickly(*in_micro_batches(theory, number))
        except MemoryLimitError as error:
            lacking = error
            short = number if best is None else short
        except MicroBatchError as error:
            if best is not None:
                break
            raise MicroBatchError(f"{error}. In one it does not fit: {lacking}") from lacking
        else:
            if best is not None and plan.cost.step_seconds >= best[0].cost.step_seconds:
                break
            best = plan, number
            if not memory_is_short(plan.considered, plan.cost.step_seconds):
                break
        if number >= most:
            break
        number = min(2 * number, most)
    if best is None:
        assert lacking is not None, "no number of micro-batches fits, so the last one lacks memory"
        if quickly is planned:
            raise lacking
        return planned(*in_micro_batches(theory, number))
    plan, number = best
    return _fewer(theory, plan, (short, number), quickly) if 2 * short >= number else plan


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
