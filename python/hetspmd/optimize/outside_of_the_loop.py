"""Whether a step in micro-batches can have its collectives outside of the loop at all."""

from __future__ import annotations

from collections.abc import Callable

from hetspmd.cost.memory import Holdings
from hetspmd.optimize.candidate import Candidate
from hetspmd.optimize.synthesis import Synthesis
from hetspmd.optimize.thresholds import THRESHOLDS
from hetspmd.program.micro_batches import micro_batches, samples


def lacks_outside(ctx: Synthesis, first: Callable[[], Candidate | None]) -> bool:
    """Whether a program lacks memory that holds no more than others whose collectives are outside of the loop:
    ``first``, which is made when it is asked for.

    Where it lacks memory in any number of micro-batches, that is kept for the next number.
    """
    prepared = ctx.prepared
    if prepared is not None and prepared.lacks_outside:
        return True
    candidate = first()
    if candidate is None or candidate.fits:
        return False
    if prepared is not None:
        prepared.lacks_outside = _in_any_number(candidate)
    return True


def _in_any_number(candidate: Candidate) -> bool:
    """Whether a candidate is far from fitting even with one sample in each micro-batch."""
    theory, batches = candidate.evaluator.ctx.theory, candidate.evaluator.ctx.batches
    assert batches is not None, "it is in micro-batches"
    single = micro_batches(theory, samples(theory, batches.loop.axes), batches.repeated)
    step = candidate.step
    holdings = Holdings(theory, step.program, step.schedule, executed=True, batches=single)
    lacking = holdings.at(candidate.lengths, buffers=False).lacking(step.model.capacity)
    return bool((lacking > THRESHOLDS.far_from_fitting * step.model.capacity).any())
