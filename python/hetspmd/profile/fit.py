"""Curves through measured points, by non-negative least squares on relative errors.

A collective's seconds are linear in the terms of :class:`hetspmd.cluster.curves.Curve`. With x_i the factors of
the terms at point i (1, k, E, M E, X E), p_i = x_i b and t_i its measured median, the terms are

    argmin over b >= 0 of sum_i w_i ln(p_i / t_i)^2,

in which a microsecond of a short message weighs what a second of a long one does, and half the time what twice the
time does. w_i is the inverse of the variance of ln t_i: ``point_noise`` squared, and the square of a quarter of the
logarithm of its interval's upper end over its lower one (a 95 % interval spans four standard deviations), so that
what was measured badly has little to say. The minimum is found by Gauss and Newton's method: with q the last
solution's p, ln(p / t) is nearly ln(q / t) + (p - q) / q, which makes each step a non-negative least squares
problem with the weights sqrt(w) / q. The minimum over b >= 0 is the unconstrained one over the terms that are not 0
there (Karush-Kuhn-Tucker); as there are at most four terms, every set of them is tried, and the exact minimum is
found.

Backends change their algorithm with the size, and memory is slower than caches; so the sizes may fall into two
parts, each with its own terms. The split, or none, is the one of least N ln(S / W) + p ln N (Schwarz's criterion),
S the sum above over N points whose w sum up to W (a mean deviation of less than ``point_noise`` counts as that
much) and p the number of terms, and one more for a split. A part of a single size has the terms per byte only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations
from statistics import median

import numpy as np
import numpy.typing as npt

from hetspmd.cluster.collective_kinds import KINDS, Kind
from hetspmd.cluster.curves import Curve, Fit, Point
from hetspmd.cluster.devices import Network
from hetspmd.errors import ProfileError
from hetspmd.profile.profile_thresholds import THRESHOLDS

Array = npt.NDArray[np.float64]


def non_negative_least_squares(matrix: Array, target: Array) -> Array:
    """argmin over b >= 0 of |matrix b - target|, for a matrix of few columns; the first of equally good ones."""
    scale = np.linalg.norm(matrix, axis=0)
    scaled = matrix / np.where(scale > 0, scale, 1.0)
    columns = np.flatnonzero(scale > 0)
    best, least = np.zeros(matrix.shape[1]), float(target @ target)
    for count in range(1, len(columns) + 1):
        for chosen in combinations(columns.tolist(), count):
            solution = np.linalg.lstsq(scaled[:, chosen], target, rcond=None)[0]
            residual = scaled[:, chosen] @ solution - target
            if solution.min() >= 0 and float(residual @ residual) < least * (1 - THRESHOLDS.better_fit):
                least = float(residual @ residual)
                best = np.zeros(matrix.shape[1])
                best[list(chosen)] = solution / scale[list(chosen)]
    return best


def fit_curves(kind: Kind, devices: int, points: Sequence[Point]) -> tuple[Fit, ...]:
    """The curve of ``kind`` through ``points``, or the two curves for smaller and for larger tensors.

    Raises ValueError without points.
    """
    sizes = sorted({p.nbytes for p in points})
    best: tuple[Fit, ...] = (fit_curve(kind, devices, points),)
    least = math.inf
    for split in (0, *range(2, len(sizes))):
        above = 0.0 if split == 0 else round(math.sqrt(sizes[split - 1] * sizes[split]))
        parts = [p for p in points if p.nbytes <= above], [p for p in points if p.nbytes > above]
        fits = [fit_curve(kind, devices, q, at) for q, at in zip(parts, (0.0, above), strict=True) if q]
        errors = np.array([e for fit in fits for e in _errors(fit.curve, fit.points)])
        weights = _weights([p for fit in fits for p in fit.points])
        deviation = max(float(weights @ errors**2) / float(weights.sum()), THRESHOLDS.point_noise**2)
        count = sum(len(_terms(kind, fit.points)) for fit in fits) + len(fits) - 1
        value = len(points) * math.log(deviation) + count * math.log(len(points))
        if value < least:
            best, least = tuple(fits), value
    return best


def fit_curve(kind: Kind, devices: int, points: Sequence[Point], above: float = 0.0) -> Fit:
    """One curve of ``kind`` between ``devices`` devices through ``points``, with its quality.

    Raises ValueError without points.
    """
    if not points:
        raise ValueError(f"no point of {kind}")
    factors = {
        "latency": [1.0 for _ in points],
        "per_shard": [float(p.shards) for p in points],
        "per_byte": [float(p.nbytes) for p in points],
        "per_largest": [p.nbytes * p.largest for p in points],
        "per_exchange": [p.nbytes * p.exchange for p in points],
    }
    terms = _terms(kind, points)
    coefficients = relative_least_squares(
        np.array([factors[term] for term in terms]).T, np.array([p.seconds for p in points]), _weights(points)
    )
    numbers = {t: _rounded(v) for t, v in zip(terms, coefficients.tolist(), strict=True)}
    curve = Curve(kind, devices, above=above, **numbers)
    errors = _errors(curve, points)
    logs = [math.log(p.seconds) for p in points]
    spread = sum((x - math.fsum(logs) / len(logs)) ** 2 for x in logs)
    r2 = 1 - sum(e * e for e in errors) / spread if spread > 0 else None
    return Fit(curve, r2, median(abs(math.expm1(e)) for e in errors), tuple(points))


def hidden(points: Sequence[Point]) -> bool:
    """Whether the times tell too little of the bandwidth: even shards of the largest size take less than twice as
    long as those of the least."""
    even = sorted((p.nbytes, p.seconds) for p in points if p.skew == "even")
    return even[-1][1] < THRESHOLDS.hardly_grown * even[0][1]


def _terms(kind: Kind, points: Sequence[Point]) -> tuple[str, ...]:
    single = len({p.nbytes for p in points}) == 1
    return tuple(t for t in KINDS[kind].terms if not single or t not in ("latency", "per_shard"))


def _errors(curve: Curve, points: Sequence[Point]) -> list[float]:
    """ln(p / t) of each point."""
    return [math.log(curve.seconds(p.nbytes, p.shards, p.largest, p.exchange) / p.seconds) for p in points]


def _weights(points: Sequence[Point]) -> Array:
    """The inverse variance of the logarithm of each point's seconds."""
    return np.array([1 / (THRESHOLDS.point_noise**2 + (math.log(p.high / p.low) / 4) ** 2) for p in points])


def relative_least_squares(matrix: Array, seconds: Array, weights: Array | None = None) -> Array:
    """argmin over b >= 0 of the sum of w ln(p / t)^2, with p = matrix b, t the seconds and w the weights (1 if not
    given); the best of ``fit_rounds``."""
    roots = np.ones(len(seconds)) if weights is None else np.sqrt(weights)
    best = solution = non_negative_least_squares(matrix * (roots / seconds)[:, None], roots)
    least = math.inf
    low, high = THRESHOLDS.predicted_range
    for _ in range(THRESHOLDS.fit_rounds):
        predicted = np.clip(matrix @ solution, low * seconds, high * seconds)
        errors = np.log(predicted / seconds)
        value = float((roots * errors) @ (roots * errors))
        if value < least * (1 - THRESHOLDS.better_fit):
            best, least = solution, value
        solution = non_negative_least_squares(
            matrix * (roots / predicted)[:, None], roots * np.clip(1 - errors, *THRESHOLDS.target_range)
        )
    return best


def fit_network(fits: Sequence[Fit]) -> Network:
    """The latency and bandwidth with which the cost model's own formulas come closest to all measured points.

    They stand for what no curve was measured of. The formulas are those of the kinds' records
    (:mod:`hetspmd.cluster.collective_kinds`). Raises ProfileError if the times do not grow with the size.
    """
    rows, seconds, points = [], [], [p for fit in fits for p in fit.points]
    for fit in fits:
        terms = KINDS[fit.curve.kind].formula(fit.curve.devices)
        for p in fit.points:
            traffic = terms.per_byte * p.nbytes
            traffic += terms.per_largest * p.largest * p.nbytes + terms.per_exchange * p.exchange * p.nbytes
            rows.append([terms.latency + terms.per_shard * p.shards, traffic])
            seconds.append(p.seconds)
    latency, per_byte = relative_least_squares(np.array(rows), np.array(seconds), _weights(points)).tolist()
    latencies, traffic = max(rows, key=lambda row: row[1])
    if per_byte * traffic < latency * latencies:
        raise ProfileError(
            "the times of the collectives do not grow with their sizes: the machine is too busy to be measured; "
            "profile again when it is not, or raise --budget"
        )
    return Network(_rounded(1 / per_byte), _rounded(latency or min(seconds)))


def _rounded(value: float) -> float:
    """Six significant digits: more than was measured, and a file that can be read."""
    return float(f"{value:.6g}")
