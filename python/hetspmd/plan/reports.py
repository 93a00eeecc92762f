"""What a plan keeps of how it was found, and of the accelerators inside machines."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from hetspmd.program.lengths import Matrix
from hetspmd.program.program import Program

SINGLE_ACCELERATORS: Final = "single accelerators"
VIRTUAL_DEVICES: Final = "virtual devices"
"""The two ways to plan machines: where both were tried, candidates' reasons start with one of them and a colon."""


VERDICTS: Final = ("taken", "slower", "equal", "bound", "memory", "storage", "asked")
"""Why a candidate is not the plan: it takes more seconds; it takes as many, and came later; it cannot take fewer
seconds than the plan, by a bound that was enough; it does not fit the memory; copies of trained modules would lie
in other shards than the modules; or something else was asked for, another number of segments."""


@dataclass(frozen=True)
class SearchReport:
    """What the search says of a program, in its additive cost model, which ignores overlap.

    The numbers are the same in every run; wall time is not kept here.

    Attributes:
        cost: Seconds of the program.
        lower_bound: Seconds that no program can beat at the same ratios.
        gap: ``(cost - lower_bound) / cost``.
        stop_reason: ``"optimal"`` for the certified optimum; ``"rescored"`` for a program that the simulation
            of the step prefers to it; ``"memory"`` for the best program found that fits the devices, with the
            bound of those that fit; ``"following"`` for the certified optimum, and the bound, of programs
            that store copies of trained modules in the modules' shards; or the limit that struck.
        expansions: Nodes that the search expanded.
    """

    cost: float
    lower_bound: float
    gap: float
    stop_reason: str
    expansions: int


@dataclass(frozen=True)
class Iteration:
    """One step of the alternation between search and ratios (HAP 3.1).

    Attributes:
        start: The name of the ratios that the alternation began with.
        index: The number of the step.
        ratios: For each segment the share of each active device.
        search_seconds: The program's cost in the search, in seconds.
        step_seconds: The program's step in the stage model, in seconds.
    """

    start: str
    index: int
    ratios: Matrix
    search_seconds: float
    step_seconds: float


@dataclass(frozen=True, kw_only=True)
class Considered:
    """A candidate that was compared with the plan.

    Attributes:
        reason: Why it was made.
        active: Numbers of the devices that it uses: ranks, or machines in a plan across them and where the reason
            starts with ``"virtual devices"``.
        seconds: Predicted seconds of its step, or a lower bound of them.
        simulated: Whether the step was simulated; otherwise ``seconds`` is a bound, which was enough.
        verdict: ``"taken"``; ``"slower"``; ``"equal"``, as fast and found later; ``"bound"``, a bound of its
            seconds is slower; ``"memory"``, it does not fit; ``"storage"``, copies of trained modules would lie in
            other shards than these; or ``"asked"``, another number of segments was asked for.
        lacking: Numbers of the devices that lack memory for it, each with the bytes.
    """

    reason: str
    active: tuple[int, ...]
    seconds: float
    simulated: bool
    verdict: str
    lacking: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class Inside:
    """What the accelerators of each machine do, in a plan across machines.

    Attributes:
        program: A program of the same graph, divided evenly over the accelerators of a machine.
        seconds: Seconds of the collectives inside machines, without those that the machines' figures count as
            computation.
        memory_bytes: Peak bytes of one accelerator of each device, 0 of an idle one.
        bucket_bytes: The most bytes of a bucket of collectives inside machines.
    """

    program: Program
    seconds: float
    memory_bytes: tuple[int, ...]
    bucket_bytes: int = 0
