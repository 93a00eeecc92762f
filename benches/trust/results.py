"""The measured points: a folder with a cluster file per cluster, a plan file and a line of JSON per point.

A point is written when it has been measured, so that an interrupted run goes on where it was. Predictions are not
stored: they follow from the plan file, which holds the program, the lengths and the cluster as it was profiled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from emulated.pages import append_lines, read_lines
from hetspmd.cost.step import StepCost, StepModel, idle_seconds, on_cluster
from hetspmd.plan.plan import Plan

FOLDER = Path(__file__).parents[2] / "target" / "bench" / "trust"


@dataclass(frozen=True)
class Point:
    """A plan of a model on a cluster, predicted and measured.

    ``seconds`` of each timed step, ``losses`` of every step, bytes and CPU seconds per rank (:mod:`trust.rank`).
    """

    cluster: str
    model: str
    plan: str
    seconds: tuple[float, ...]
    losses: tuple[float, ...]
    peak_bytes: tuple[int, ...]
    resident_bytes: tuple[int, ...]
    main: tuple[float, ...]
    other: tuple[float, ...]
    file: str

    @property
    def measured(self) -> float:
        """The median of the seconds."""
        return median(self.seconds)

    @cached_property
    def cost(self) -> StepCost:
        """The prediction."""
        plan = Plan.load(self.file)
        idle = idle_seconds(plan.graph, plan.program, plan.cluster, plan.active)
        found = StepModel(plan.costs, plan.program, idle=idle).cost(plan.lengths)
        return on_cluster(found, plan.cluster, plan.active)

    @property
    def predicted(self) -> float:
        """Seconds of a step."""
        return self.cost.step_seconds

    @property
    def error(self) -> float:
        """predicted / measured - 1."""
        return self.predicted / self.measured - 1

    @property
    def memory_errors(self) -> tuple[float, ...]:
        """The same of the peak memory of each rank that takes part."""
        pairs = zip(self.cost.memory_bytes, self.peak_bytes, strict=True)
        return tuple(p / m - 1 for p, m in pairs if p)


def point(cluster: str, model: str, plan: str, file: Path, ranks: Sequence[dict[str, Any]]) -> Point:
    """The point of what :func:`trust.rank.train` found on the ranks. The first step of each round is not timed."""
    seconds: list[float] = []
    for stamps in zip(*(r["stamps"] for r in ranks), strict=True):
        ends = [max(of) for of in zip(*stamps, strict=True)]
        seconds += [b - a for a, b in pairwise(ends[1:])]
    return Point(
        cluster, model, plan, tuple(seconds), tuple(ranks[0]["losses"]),
        tuple(r["peak_bytes"] for r in ranks), tuple(r["resident_bytes"] for r in ranks),
        tuple(median(r["main"]) for r in ranks), tuple(median(r["other"]) for r in ranks), str(file),
    )  # fmt: skip


def load(folder: Path) -> list[Point]:
    """The points of a folder, in the order in which they were measured; none if there is no folder."""
    found = []
    for entry in read_lines(folder / "points.jsonl"):
        numbers = {k: tuple(v) if isinstance(v, list) else v for k, v in entry.items()}
        found.append(Point(**{**numbers, "file": str(folder / entry["file"])}))
    return found


def append(folder: Path, points: Sequence[Point]) -> None:
    """Add points to the folder's."""
    names = (
        "cluster", "model", "plan", "seconds", "losses", "peak_bytes", "resident_bytes", "main", "other",
    )  # fmt: skip
    entries = [
        {name: getattr(p, name) for name in names} | {"file": str(Path(p.file).relative_to(folder))}
        for p in points
    ]
    append_lines(folder / "points.jsonl", entries)
