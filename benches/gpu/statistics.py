"""What the lines say: ratios, and whether what must hold does.

ratio         of a point of one GPU: the median over turns of hetspmd's seconds over PyTorch's in the same turn
host-limited  points of few rows at which eager PyTorch spends :data:`LAUNCHING` of its seconds with launching
balanced      points at which proportional DDP communicates about as long as it computes (:mod:`versus.statistics`)
predictions   of every plan that has run on several ranks, hetspmd's own and forced ones

A point that failed has no seconds, and what must hold at it does not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import geometric_mean, median

from gpu.points import ARMS, COMPILED, EAGER, FEW, ONE_GPU, REAL, TRUST, UNLIKE, Key
from gpu.results import Line
from trust.statistics import pearson
from versus.statistics import Check, is_balanced, never_slower, over_best, over_ddp

MOST_OF_TORCH = 1.0
MOST_OF_FEW = 0.7
LAUNCHING = 0.9
LEAST_BALANCED = 1.3
LEAST_OVER_DDP = 2.0
LEAST_PEARSON = 0.97
MOST_ERROR = 0.1


@dataclass(frozen=True)
class Prediction:
    """Seconds of a plan's step."""

    line: Line
    plan: str
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        """predicted / measured - 1."""
        return self.predicted / self.measured - 1


def ratios(line: Line) -> list[float]:
    """hetspmd's seconds over PyTorch's, turn by turn, sorted; of a measured point of one GPU."""
    torchs, own = (line.arms[name].seconds for name in ARMS[line.part])
    return sorted(h / t for t, h in zip(torchs, own, strict=True))


def ratio(line: Line) -> float:
    """Their median."""
    return median(ratios(line))


def host_limited(line: Line) -> bool:
    """Whether eager PyTorch's host is busy with launching for nearly all of a step."""
    return median(line.arms[ARMS[EAGER][0]].launched) >= LAUNCHING


def peaks(line: Line, lines: Mapping[Key, Line]) -> tuple[int, int] | None:
    """Peak bytes of hetspmd and of eager PyTorch at the same point; None where one was not measured."""
    own = line.arms.get(ARMS[line.part][1])
    eager_line = lines.get(line.key._replace(part=EAGER))
    eager = None if eager_line is None else eager_line.arms.get(ARMS[EAGER][0])
    if own is None or eager is None or own.peak is None or eager.peak is None:
        return None
    return own.peak, eager.peak


def predictions(lines: Sequence[Line]) -> list[Prediction]:
    """Those of all plans that have run."""
    return [
        Prediction(line, name, arm.predicted, arm.median)
        for line in lines
        for name, arm in line.arms.items()
        if arm.predicted is not None and arm.seconds
    ]


def checks(lines: Sequence[Line], keys: Sequence[Key]) -> list[Check]:
    """All that must hold; ``keys``: the points that a whole run has."""
    return [*_one_gpu(lines, keys), *_unlike(lines, keys), *_trust(lines)]


def _one_gpu(lines: Sequence[Line], keys: Sequence[Key]) -> list[Check]:
    """What must hold on one GPU."""
    by_key = {line.key: line for line in lines}

    def of(part: str, *batches: str) -> list[Line]:
        return [line for line in lines if line.part == part and line.at in batches]

    def worst(part: str, *batches: str) -> float | None:
        return max((ratio(line) for line in of(part, *batches) if line.measured), default=None)

    few = [line for line in of(EAGER, FEW) if not line.measured or host_limited(line)]
    mean = _mean([ratio(line) for line in few if line.measured])
    held = [found for line in lines if line.part in ONE_GPU and (found := peaks(line, by_key)) is not None]
    most = max((own / eager for own, eager in held), default=None)
    memory = [line for line in lines if line.part in ONE_GPU]
    return [
        _check(
            f"one GPU: hetspmd takes at most {MOST_OF_TORCH:.2f} times eager PyTorch's seconds for each model"
            + _count(of(EAGER, REAL), keys), worst(EAGER, REAL), of(EAGER, REAL), lambda v: v <= MOST_OF_TORCH,
        ),
        _check(
            f"one GPU, few rows, where the host limits eager PyTorch: at most {MOST_OF_FEW:g} times its seconds "
            f"in the geometric mean ({_number(few)})", mean, few, lambda v: v <= MOST_OF_FEW,
        ),
        _check(
            f"one GPU: compile=True takes at most {MOST_OF_TORCH:.2f} times torch.compile's seconds for each model"
            + _count(of(COMPILED, REAL, FEW), keys), worst(COMPILED, REAL, FEW), of(COMPILED, REAL, FEW),
            lambda v: v <= MOST_OF_TORCH,
        ),
        _check(
            f"one GPU: the peak of memory is at most eager PyTorch's ({len(held)} of {len(memory)} tried points "
            "have both)", most, memory, lambda v: v <= 1.0,
        ),
    ]  # fmt: skip


def _unlike(lines: Sequence[Line], keys: Sequence[Key]) -> list[Check]:
    """What must hold on unlike GPUs."""
    tried = [line for line in lines if line.part == UNLIKE]
    points = [line for line in tried if line.measured]
    never = never_slower(points)
    balanced = [p for p in points if is_balanced(p)]
    gain, ddp = _mean([over_best(p) for p in balanced]), _mean([over_ddp(p) for p in points])
    return [
        _check(
            f"unlike GPUs: {never.what}{_count(tried, keys)}", never.value, tried, lambda v: v <= 1.03
        ),
        _check(
            f"unlike GPUs: at least {LEAST_BALANCED:g} times faster than the best incumbent in the geometric mean "
            f"of the points where proportional DDP's communication and computation are within a factor of two "
            f"({_number(balanced)})", gain, balanced, lambda v: v >= LEAST_BALANCED,
        ),
        _check(
            f"unlike GPUs: at least {LEAST_OVER_DDP:g} times faster than proportional DDP in the geometric mean of "
            f"all points{_count(tried, keys)}", ddp, tried, lambda v: v >= LEAST_OVER_DDP,
        ),
    ]  # fmt: skip


def _trust(lines: Sequence[Line]) -> list[Check]:
    """What must hold of predictions."""
    tried = [line for line in lines if line.part in (UNLIKE, TRUST)]
    found = predictions(tried)
    correlated = pearson(found) if len({(p.predicted, p.measured) for p in found}) > 1 else None
    error = median(abs(p.error) for p in found) if found else None
    return [
        _check(
            f"predictions: Pearson correlation of at least {LEAST_PEARSON:g} ({len(found)} plans)", correlated,
            tried, lambda v: v >= LEAST_PEARSON, digits=3,
        ),
        _check(
            f"predictions: median error of at most {MOST_ERROR:.0%} ({len(found)} plans)", error, tried,
            lambda v: v <= MOST_ERROR, digits=3,
        ),
    ]  # fmt: skip


def _check(
    what: str, value: float | None, tried: Sequence[Line], holds: Callable[[float], bool], digits: int = 3
) -> Check:
    """A requirement on points that were tried: one that failed lets it fail."""
    failed = sum(not line.measured and not line.skipped for line in tried)
    if failed:
        return Check(f"{what}, {failed} failed", value, False, digits)
    return Check(what, value, None if value is None else holds(value), digits)


def _count(lines: Sequence[Line], keys: Sequence[Key]) -> str:
    """How many of the points of these lines' part and batches were measured."""
    if not lines:
        return ""
    kinds = {(line.part, line.at) for line in lines}
    whole = sum((key.part, key.at) in kinds for key in keys)
    return f" ({sum(line.measured for line in lines)} of {whole} points)"


def _number(lines: Sequence[Line]) -> str:
    """How many points these are, in words."""
    return f"{len(lines)} point{'' if len(lines) == 1 else 's'}"


def _mean(values: Sequence[float]) -> float | None:
    """The geometric mean; None of none."""
    return geometric_mean(values) if values else None
