"""In which order devices run fragments of a step: forward or backward, for one micro-batch at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

from hetspmd.errors import PlanError

RunPhase = Literal["forward", "backward", "recompute"]
"""What a device does of a fragment at a time. ``"recompute"`` is a fragment's whole forward again; what the graph
itself computes again in its backward (:mod:`hetspmd.trace.recompute`) is a part of ``"backward"``."""


@dataclass(frozen=True)
class FragmentRun:
    """What a device does at a time: a fragment's forward or backward, for one of the device's micro-batches.

    Attributes:
        micro_batch: Number of the micro-batch, from 0; of a device that takes turns of its own, of its own.
        fragment: Number of the fragment.
        phase: ``"forward"``, ``"backward"``, or ``"recompute"`` between them.
    """

    micro_batch: int
    fragment: int
    phase: RunPhase

    def __str__(self) -> str:
        return f"{self.phase} of fragment {self.fragment} for micro-batch {self.micro_batch}"


Runs = tuple[FragmentRun, ...]
"""What a device runs, one after the other."""


def plain_runs(phases: Mapping[int, Sequence[RunPhase]], count: int) -> Runs:
    """One micro-batch after the other, of ``count``: each through the fragments forward, and back.

    ``phases``: what runs of each fragment of the device, by its number, ascending.
    """
    runs: list[FragmentRun] = []
    for turn in range(count):
        runs += [FragmentRun(turn, number, "forward") for number in phases]
        back = [number for number, own in phases.items() if "backward" in own]
        runs += [FragmentRun(turn, number, "backward") for number in reversed(back)]
    return tuple(runs)


def check_runs(plain: Mapping[int, Runs], order: Sequence[Runs], *, alike: bool) -> None:
    """Raise PlanError unless an order fits the fragments, of which ``plain`` has the plain order by device.

    Each device runs each of its fragments for each of its micro-batches once forward and then once backward, if it
    has one, and between them computes the forward again at most once. ``alike``: all devices of a fragment run it
    in one order, as they have to where they communicate in it.
    """
    if len(order) != len(plain):
        raise PlanError(f"an order of the runs of {len(order)} devices, of {len(plain)} active ones")
    if tuple(order) == tuple(plain.values()):
        raise PlanError("the order of the runs is the plain one, and is written where that is left out")
    seen: dict[int, list[FragmentRun]] = {}
    for (rank, expected), runs in zip(plain.items(), order, strict=True):
        wrong = next(_misplaced(expected, runs), None)
        if wrong is not None:
            raise PlanError(f"the order of the runs of device {rank} does not fit its fragments: {wrong}")
        for number in sorted({run.fragment for run in runs}) if alike else ():
            own = [run for run in runs if run.fragment == number]
            if seen.setdefault(number, own) != own:
                raise PlanError(f"device {rank} runs fragment {number} in another order than others do")


def _misplaced(expected: Runs, runs: Runs) -> Iterator[str]:
    """What is wrong with the runs of a device."""
    place = {run: at for at, run in enumerate(runs)}
    if len(place) != len(runs):
        yield "a run stands twice"
    for run in expected:
        if run not in place:
            yield f"the {run} is missing"
    for run in runs:
        if run.phase != "recompute" and run not in expected:
            yield f"there is no {run}"
        forward, again, backward = (
            place.get(replace(run, phase=phase)) for phase in ("forward", "recompute", "backward")
        )
        there = [at for at in (forward, again, backward) if at is not None]
        if any(one > other for one, other in pairwise(there)):
            yield f"the {run} does not stand after the forward and before the backward"
        if again is not None and (forward is None or backward is None):
            yield f"the {run} has no forward before it and no backward after it"
