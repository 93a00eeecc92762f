"""Why a plan was chosen: the candidates that were compared, with their seconds and why each was not taken."""

from __future__ import annotations

from typing import Any, Final

from hetspmd.cluster.machines import device_word, devices_text
from hetspmd.codec.quantities import quantity_text, seconds_text
from hetspmd.codec.tables import counted, table
from hetspmd.plan.plan import Plan
from hetspmd.plan.reports import SINGLE_ACCELERATORS, VIRTUAL_DEVICES, Considered


def candidates_text(plan: Plan) -> str:
    """A table of all candidates: the plan's own first, then by their predicted seconds of a step."""
    considered = plan.considered
    if not considered:
        return "Candidates: none are kept of a plan that was made for the storage of another one"
    rows = [
        [
            seconds_text(c.seconds) if c.simulated else f"at least {seconds_text(c.seconds)}",
            _devices(c, plan),
            _why(c, considered[0].seconds, plan),
            c.reason,
        ]
        for c in considered
    ]
    header = ["a step", "devices", "why not", "candidate"]
    return f"{counted(len(considered), 'candidate')} compared\n" + table(header, rows, right=(0,))


def candidates_document(plan: Plan) -> list[dict[str, Any]]:
    """For each candidate ``reason``, ``ranks``, ``seconds`` (a lower bound where ``simulated`` is false),
    ``verdict``, ``lacking`` (rank to bytes), and ``numbered``: whether ``ranks`` and ``lacking`` have numbers of
    ``"rank"`` or of ``"machine"``."""
    return [
        {
            "reason": c.reason,
            "ranks": list(c.active),
            "seconds": c.seconds,
            "simulated": c.simulated,
            "verdict": c.verdict,
            "lacking": {str(rank): nbytes for rank, nbytes in c.lacking},
            "numbered": _word(c, plan),
        }
        for c in plan.considered
    ]


_WORDS: Final = {VIRTUAL_DEVICES: "machine", SINGLE_ACCELERATORS: "rank"}


def _way(candidate: Considered) -> str:
    return candidate.reason.partition(": ")[0]


def _word(candidate: Considered, plan: Plan) -> str:
    """What the candidate's numbers count: a plan that was made in two ways has candidates of both."""
    return _WORDS.get(_way(candidate), device_word(plan.cluster))


def _devices(candidate: Considered, plan: Plan) -> str:
    word, active = _word(candidate, plan), candidate.active
    if plan.inside is None and _way(candidate) not in _WORDS and len(active) == plan.world:
        return "all"
    # A plan of single accelerators knows no machines, and so not how many there are.
    counts = {"rank": sum(plan.cluster.accelerators), "machine": 0 if plan.inside is None else plan.world}
    return f"all {word}s" if len(active) == counts[word] else devices_text(word, active)


def _why(candidate: Considered, best: float, plan: Plan) -> str:
    if candidate.verdict == "memory":
        rank, nbytes = max(candidate.lacking, key=lambda lack: lack[1])
        return f"{_word(candidate, plan)} {rank} lacks {quantity_text(nbytes, 'bytes')}"
    if candidate.verdict == "slower" and best > 0:
        times = candidate.seconds / best
        if times < 1:
            return "slower, but for what goes on inside machines"
        if times >= 2:
            return f"{times:.1f} times as slow"
        return "0.01 % slower or less" if times < 1.0001 else f"{100 * (times - 1):.2g} % slower"
    return _WHY[candidate.verdict]


_WHY = {
    "taken": "the plan",
    "slower": "slower",
    "equal": "as fast, found later",
    "bound": "its bound is slower",
    "storage": "copies of trained modules apart",
    "asked": "another number of segments was asked",
}
