"""Clusters on which a rank's quota of CPU time pays for the threads that carry messages, too.

What hides communication takes computing from the rank there. hetspmd's plan is the one that ``hetspmd.compile``
makes of the profile, as it is: nothing is tuned on measured steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from emulated.spec import ClusterSpec
from versus.points import COMPILED, FASTEST_LINK
from versus.results import Point
from versus.statistics import Check, never_slower

CLUSTERS = {
    "4:2:1:1": ClusterSpec.of((4, 2, 1, 1), cores=1.8, rate=FASTEST_LINK, one_quota=True),
    "2:1": ClusterSpec.of((2, 1), cores=1.35, rate=FASTEST_LINK, one_quota=True),
}
LINKS = (FASTEST_LINK,)
KEPT = Path(__file__).parents[2] / "docs" / "one-quota.jsonl"
"""The points of the page in the documentation."""

PREDICTED_WITHIN = 0.1
"""The part of the predicted seconds that the measured ones may differ by."""


def off(point: Point) -> float:
    """Measured over predicted seconds of hetspmd, less 1."""
    predicted = point.arms[COMPILED].predicted
    assert predicted is not None
    return point.seconds(COMPILED) / predicted - 1


def checks(points: Sequence[Point]) -> list[Check]:
    """That hetspmd is never slower than the best incumbent, and that it is predicted."""
    farthest = max((abs(off(p)) for p in points), default=None)
    return [
        never_slower(points),
        Check(
            f"measured seconds are within {PREDICTED_WITHIN:.0%} of the predicted ones", farthest,
            None if farthest is None else farthest <= PREDICTED_WITHIN,
        ),
    ]  # fmt: skip


def summary(points: Sequence[Point], of: int) -> str:
    """The figures and the checks, as Markdown; ``of``: how many points a whole run has."""
    errors = [off(p) for p in points]
    lines = [
        f"- {len(points)} of {of} points measured",
        f"- measured over predicted seconds of hetspmd: from {min(errors):+.1%} to {max(errors):+.1%}",
        *(f"- {check}" for check in checks(points)),
    ]
    return "\n".join(lines)
