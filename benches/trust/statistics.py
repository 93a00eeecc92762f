"""How good the predictions are: correlation, errors, and what following them costs.

Pearson       of predicted and measured seconds over all points
error         median over the points of |predicted / measured - 1|
regret        per model and cluster: measured seconds of the plan that is predicted best, over the least measured
              of its plans, less 1
memory        per rank that takes part: |predicted / measured - 1| of the peak
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import correlation, median
from typing import Protocol

from trust.results import Point

HEAD = (
    "cluster", "model", "plan", "predicted s", "measured s", "least to most", "error", "predicted MB",
    "measured MB", "error",
)  # fmt: skip


class Predicted(Protocol):
    """A plan, or a point of one."""

    @property
    def predicted(self) -> float:
        """Seconds of a step."""

    @property
    def measured(self) -> float:
        """Seconds of a step."""


def groups(points: Sequence[Point]) -> dict[tuple[str, str], list[Point]]:
    """The points of each cluster and model."""
    found: dict[tuple[str, str], list[Point]] = {}
    for p in points:
        found.setdefault((p.cluster, p.model), []).append(p)
    return found


def regret(points: Sequence[Point]) -> float:
    """Of the plans of one model on one cluster."""
    best = min(points, key=lambda p: p.predicted)
    return best.measured / min(p.measured for p in points) - 1


def pearson(points: Sequence[Predicted]) -> float:
    """Of predicted and measured seconds."""
    return correlation([p.predicted for p in points], [p.measured for p in points])


def table(points: Sequence[Point]) -> str:
    """A row per point, as Markdown. Memory is of the rank with the largest measured peak."""
    rows = [f"| {' | '.join(HEAD)} |", "|---|---|---|--:|--:|--:|--:|--:|--:|--:|"]
    for p in points:
        rank = max(range(len(p.peak_bytes)), key=lambda r: p.peak_bytes[r])
        most = max(p.memory_errors, key=abs)
        rows.append(
            f"| {p.cluster} | {p.model} | {p.plan} | {p.predicted:.3f} | {p.measured:.3f} | "
            f"{min(p.seconds):.3f} to {max(p.seconds):.3f} | {p.error:+.1%} | "
            f"{p.cost.memory_bytes[rank] / 1e6:.1f} | {p.peak_bytes[rank] / 1e6:.1f} | {most:+.1%} |"
        )
    return "\n".join(rows)


def summary(points: Sequence[Point]) -> str:
    """The figures, as Markdown."""
    errors = sorted(abs(p.error) for p in points)
    memory = sorted(abs(e) for p in points for e in p.memory_errors)
    lost = sorted((regret(of), *key) for key, of in groups(points).items())
    within = sum(e <= 0.1 for e in memory)
    lines = ["", f"- {len(points)} points, {len(lost)} pairs of a model and a cluster"]
    if len(points) > 1:
        lines.append(f"- Pearson correlation of predicted and measured seconds: {pearson(points):.3f}")
    lines += [
        f"- absolute relative error of the seconds: median {median(errors):.1%}, largest {errors[-1]:.1%}",
        f"- what following the prediction costs: median {median(r for r, *_ in lost):.1%}, most {lost[-1][0]:.1%} "
        f"({lost[-1][2]} on {lost[-1][1]}); at most 5 % in {sum(r <= 0.05 for r, *_ in lost)} of {len(lost)}",
        f"- peak memory: median error {median(memory):.1%}, largest {memory[-1]:.1%}; within 10 % on {within} of "
        f"{len(memory)} ranks",
    ]
    return "\n".join(lines)
