"""What a plan keeps of how it was found, and of the accelerators inside machines."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from hetspmd.program.lengths import Matrix
from hetspmd.program.program import Program

__all__ = ["VERDICTS", "Considered", "Inside", "Iteration", "SearchReport"]

VERDICTS: Final = ("taken", "slower", "equal", "bound", "memory", "storage", "asked")
"""Why a candidate is not the plan: it takes more seconds; it takes as many, and came later; it cannot take fewer
seconds than the plan, by a bound that was enough; it does not fit the memory; copies of trained modules would lie
in other shards than the modules; or something else was asked for, another number of segments."""


@dataclass(frozen=True)
class SearchReport:
    """What the search says of a program, in its additive cost model.

    ``cost`` and ``lower_bound`` are in seconds, ``gap`` is ``(cost - lower_bound) / cost``. ``stop_reason`` is
    "optimal" for the certified optimum; "rescored" for a program that the simulation of the step prefers to it;
    "memory" for the best found that fits the devices, with the bound of those that do; "following" for the
    certified optimum, and the bound, of programs that store copies of trained modules in the modules' shards; or
    the limit that struck.
    The numbers are the same in every run; seconds of wall time are not kept here.
    """

    cost: float
    lower_bound: float
    gap: float
    stop_reason: str
    expansions: int


@dataclass(frozen=True)
class Iteration:
    """One step of the alternation between search and ratios (HAP 3.1)."""

    start: str
    index: int
    ratios: Matrix
    search_seconds: float
    step_seconds: float


@dataclass(frozen=True, kw_only=True)
class Considered:
    """A candidate that was compared with the plan.

    reason     why it was made
    active     ranks of the devices that it uses
    seconds    predicted seconds of its step, or a lower bound of them
    simulated  whether the step was simulated, so that ``seconds`` is no bound
    verdict    one of :data:`VERDICTS`
    lacking    ranks whose devices lack memory for it, each with the bytes
    """

    reason: str
    active: tuple[int, ...]
    seconds: float
    simulated: bool
    verdict: str
    lacking: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class Inside:
    """What the accelerators of each machine do of its part (:mod:`hetspmd.program.levels`).

    program       of the same theory; divides evenly
    seconds       of the collectives inside, those that the machines' figures count as computation left out
    memory_bytes  peak of one accelerator of each device, 0 of an idle one
    """

    program: Program
    seconds: float
    memory_bytes: tuple[int, ...]
