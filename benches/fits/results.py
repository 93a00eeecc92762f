"""The measured points, a line of JSON each, written when the point has been measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from emulated.pages import append as append
from emulated.pages import read_lines
from emulated.pages import text as text
from fits.points import COMPILED, Peaks

FOLDER = Path(__file__).parents[2] / "target" / "bench" / "fits"
KEPT = Path(__file__).parents[2] / "docs" / "fits.jsonl"
"""The points of the page in the documentation."""


@dataclass(frozen=True)
class Arm:
    """One arm of a point.

    words    the setting, or the plan
    seconds  of each timed step
    losses   of the first two steps, of the whole batch
    peaks    bytes that each rank was counted to hold
    """

    words: str
    seconds: tuple[float, ...]
    losses: tuple[float, ...]
    peaks: Peaks

    @property
    def median(self) -> float:
        """Seconds."""
        return median(self.seconds)


@dataclass(frozen=True)
class Point:
    """A model on a cluster.

    limits     bytes of each device
    plain      bytes that DDP holds with all rows at once
    need       bytes that DDP holds at its leanest
    least      bytes that FSDP2 holds at its leanest
    tried      seconds of a first step of each setting of FSDP2 that fits
    arms       the fastest of these, and hetspmd unless it has no plan that fits
    predicted  seconds of hetspmd's step
    expected   bytes that hetspmd predicts of each rank
    failure    why hetspmd has no plan; "" if it has one
    """

    cluster: str
    model: str
    limits: Peaks
    plain: Peaks
    need: Peaks
    least: Peaks
    tried: Mapping[str, float]
    arms: Mapping[str, Arm]
    predicted: float = 0.0
    expected: Peaks = ()
    failure: str = ""

    @property
    def key(self) -> tuple[str, str]:
        """What no two points have in common."""
        return self.cluster, self.model

    @property
    def best(self) -> str:
        """The setting of FSDP2 with the least median."""
        return min((n for n in self.arms if n != COMPILED), key=lambda name: self.arms[name].median)

    @property
    def over(self) -> tuple[int, ...]:
        """The ranks on which hetspmd was counted to hold more than the limit."""
        if self.failure:
            return ()
        held = zip(self.arms[COMPILED].peaks, self.limits, strict=True)
        return tuple(rank for rank, (peak, limit) in enumerate(held) if peak > limit)

    @property
    def ratio(self) -> float | None:
        """How many times faster than the best of FSDP2 hetspmd is; None where it does not fit."""
        if self.failure or self.over:
            return None
        return self.arms[self.best].median / self.arms[COMPILED].median


def load(folder: Path, kept: Path | None = None) -> list[Point]:
    """The points of a folder, in the order in which they were measured, behind those of the file ``kept`` that the
    folder does not have; none where there is no file."""
    found: dict[tuple[str, str], Point] = {}
    for file in (folder / "points.jsonl", kept):
        for entry in read_lines(file) if file is not None else ():
            arms = {
                name: Arm(a["words"], *(tuple(a[part]) for part in ("seconds", "losses", "peaks")))
                for name, a in entry.pop("arms").items()
            }
            lists = {name: tuple(value) for name, value in entry.items() if isinstance(value, list)}
            point = Point(**{**entry, **lists}, arms=arms)
            found.setdefault(point.key, point)
    return list(found.values())
