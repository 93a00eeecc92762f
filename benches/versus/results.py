"""The measured points, a line of JSON each, written when the point has been measured."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from emulated.pages import append as append
from emulated.pages import read_lines
from emulated.pages import text as text
from emulated.spec import EmulationError

FOLDER = Path(__file__).parents[2] / "target" / "bench" / "versus"
KEPT = Path(__file__).parents[2] / "docs" / "cluster.jsonl"
"""The points of the page in the documentation."""

FIRST_LOSS, SECOND_LOSS = 1e-4, 0.05
"""Relative difference of the losses of a point's arms that rounding in float32 may make: of the first step, and of
the second (AdamW divides each gradient by its own size, so that rounding moves parameters as far as anything)."""


@dataclass(frozen=True)
class Measured:
    """One arm of a point: seconds of each timed step, global losses of the first two steps, and the prediction of
    the cost model for hetspmd's plans (None for the others)."""

    seconds: tuple[float, ...]
    losses: tuple[float, ...]
    predicted: float | None = None

    @property
    def median(self) -> float:
        """Seconds."""
        return median(self.seconds)


@dataclass(frozen=True)
class Point:
    """A model on a cluster over a link, with all its arms.

    rate           of the links, bytes/s
    computing      seconds of a proportional step without communication
    communicating  seconds of the all-reduces of its gradients
    """

    cluster: str
    model: str
    size: str
    link: str
    rate: float
    computing: float
    communicating: float
    arms: Mapping[str, Measured]

    @property
    def key(self) -> tuple[str, str, str, str]:
        """What no two points have in common."""
        return self.cluster, self.model, self.size, self.link

    @property
    def bits(self) -> str:
        """The rate as text."""
        bits = self.rate * 8
        return f"{bits / 1e9:g} Gbit/s" if bits >= 1e9 else f"{bits / 1e6:g} Mbit/s"

    def seconds(self, arm: str) -> float:
        """The median of an arm."""
        return self.arms[arm].median


def at_rate(points: Iterable[Point], of: tuple[str, str, str], rate: float) -> Point | None:
    """The point of a cluster, model and size over links of that rate, bytes/s, if there is one."""
    found = (p for p in points if (p.cluster, p.model, p.size) == of)
    return next((p for p in found if math.isclose(p.rate, rate, rel_tol=1e-6)), None)


def measured(ranks: Sequence[Mapping[str, Any]], *, summed: bool, predicted: float | None = None) -> Measured:
    """One arm from what :func:`versus.rank.train` found on the ranks that have part in it. ``summed``: each rank's
    loss is its part of the global one; otherwise every rank has all of it."""
    part = [r for r in ranks if r["stamps"]]
    seconds: list[float] = []
    for stamps in zip(*(r["stamps"] for r in part), strict=True):
        ends = [max(of) for of in zip(*stamps, strict=True)]
        seconds += [b - a for a, b in pairwise(ends)]
    losses = [tuple(r["losses"]) for r in part]
    whole = tuple(map(sum, zip(*losses, strict=True))) if summed else losses[0]
    return Measured(tuple(seconds), whole, predicted)


def check_losses(point: Point) -> None:
    """Raise EmulationError unless all arms of a point computed the same training steps."""
    check_same({name: arm.losses for name, arm in point.arms.items()}, f"{point.model} on {point.cluster}")


def check_same(
    losses: Mapping[str, Sequence[float]], where: str,
    limits: tuple[float, float] = (FIRST_LOSS, SECOND_LOSS),
) -> None:  # fmt: skip
    """Raise EmulationError unless the losses of all arms are those of the same first two training steps.

    ``limits``: how far they may be apart in each, relative to the first arm's.
    """
    (name, first), *others = losses.items()
    for other, found in others:
        if len(found) != len(first):
            raise EmulationError(f"{name} has {len(first)} losses, {other} {len(found)}")
        for step, (a, b, limit) in enumerate(zip(first, found, limits, strict=True)):
            if not abs(a - b) <= limit * max(abs(a), 1e-12):
                raise EmulationError(
                    f"{where}, step {step}: the loss is {a} with {name!r} and {b} with {other!r}"
                )


def load(folder: Path, kept: Path | None = None) -> list[Point]:
    """The points of a folder, in the order in which they were measured, behind those of the file ``kept`` that the
    folder does not have; none where there is no file."""
    found: dict[tuple[str, str, str, str], Point] = {}
    for file in (folder / "points.jsonl", kept):
        for entry in read_lines(file) if file is not None else ():
            arms = {
                name: Measured(tuple(a["seconds"]), tuple(a["losses"]), a["predicted"])
                for name, a in entry.pop("arms").items()
            }
            point = Point(**entry, arms=arms)
            found.setdefault(point.key, point)
    return list(found.values())
