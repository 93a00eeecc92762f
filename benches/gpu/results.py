"""The measured points, a line of JSON each, written when the point has been measured or has failed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from emulated.pages import append as append
from emulated.pages import read_lines
from emulated.pages import text as text
from gpu.points import Key

FOLDER = Path(__file__).parents[2] / "target" / "bench" / "gpu"


@dataclass(frozen=True)
class Arm:
    """One way to make the step.

    seconds    of each timed step; on one GPU, of each turn, the mean of its steps
    losses     of the first two steps
    launched   the part of each turn's seconds in which the host was not done with launching (one GPU)
    peak       bytes of the device during a step: what the arm holds between steps, and what a step adds (one GPU)
    predicted  seconds of a step (plans on several ranks)
    words      what the plan does
    reason     why there are no seconds; "" if there are
    """

    seconds: tuple[float, ...] = ()
    losses: tuple[float, ...] = ()
    launched: tuple[float, ...] = ()
    peak: int | None = None
    predicted: float | None = None
    words: str = ""
    reason: str = ""

    @property
    def median(self) -> float:
        """Seconds."""
        return median(self.seconds)


@dataclass(frozen=True)
class Line:
    """A point that was tried.

    machine        what measured it (:mod:`gpu.machine`)
    day            when, in UTC
    took           seconds that the point took, with everything
    computing      seconds of a proportional step without communication (several ranks)
    communicating  seconds of the all-reduces of its gradients (several ranks)
    reason         why it was not measured; "" if it was
    skipped        the machine lacks what the point needs; otherwise, with a reason, the point failed
    small          of ``--small``
    """

    part: str
    model: str
    precision: str
    at: str
    size: Mapping[str, int]
    machine: Mapping[str, str]
    day: str
    took: float
    arms: Mapping[str, Arm] = field(default_factory=dict)
    computing: float = 0.0
    communicating: float = 0.0
    reason: str = ""
    skipped: bool = False
    small: bool = False

    @property
    def key(self) -> Key:
        """The point."""
        return Key(self.part, self.model, self.precision, self.at)

    @property
    def cluster(self) -> str:
        """As :mod:`versus.statistics` calls the shares."""
        return self.at

    @property
    def measured(self) -> bool:
        """Whether every arm has seconds."""
        return not self.reason and all(not arm.reason for arm in self.arms.values())

    def seconds(self, arm: str) -> float:
        """The median of an arm."""
        return self.arms[arm].median


def load(folder: Path, kept: Path | None = None, *, small: bool = False) -> dict[Key, Line]:
    """The last line of each point of a folder; of points that it does not have, those of the file ``kept``.

    A line without seconds does not replace one that has them.
    """
    found: dict[Key, Line] = {}
    for file in (kept, folder / "points.jsonl"):
        for entry in read_lines(file) if file is not None else ():
            line = _line(entry)
            before = found.get(line.key)
            if line.small == small and (before is None or line.measured or not before.measured):
                found[line.key] = line
    return found


def ordered(lines: Mapping[Key, Line], keys: Iterable[Key]) -> list[Line]:
    """The lines of those points that have one, in the order of the points."""
    return [lines[key] for key in keys if key in lines]


def arm_of(fields: Mapping[str, Any]) -> Arm:
    """An arm of what JSON holds."""
    lists: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in fields.items()}
    return Arm(**lists)


def _line(entry: dict[str, Any]) -> Line:
    return Line(**entry | {"arms": {name: arm_of(arm) for name, arm in entry["arms"].items()}})
