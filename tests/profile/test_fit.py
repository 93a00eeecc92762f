"""Fits against parameters that are known, and the least squares against its optimality conditions."""

from __future__ import annotations

import math
from dataclasses import replace
from statistics import median

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from synthetic import TRUE, points, true_curve

from hetspmd.cluster.collective_kinds import KINDS, Kind
from hetspmd.cluster.curves import COLLECTIVES, Curve, Fit
from hetspmd.errors import ProfileError
from hetspmd.profile.collective_trials import trials
from hetspmd.profile.fit import fit_curve, fit_curves, fit_network, hidden, non_negative_least_squares
from hetspmd.profile.profile_thresholds import THRESHOLDS
from hetspmd.profile.timing import interval, repeat, tight


@pytest.mark.parametrize("devices", [2, 4, 9])
@pytest.mark.parametrize("kind", COLLECTIVES)
def test_exact_times_give_exact_terms(kind: Kind, devices: int) -> None:
    true = true_curve(kind, devices)
    fit = fit_curve(kind, devices, points(true))
    for term in KINDS[kind].terms:
        assert getattr(fit.curve, term) == pytest.approx(getattr(true, term), rel=1e-4), term
    assert fit.r2 == pytest.approx(1.0)
    assert fit.error == pytest.approx(0.0, abs=1e-5)


@pytest.mark.parametrize("kind", COLLECTIVES)
def test_noisy_times_give_the_terms_back(kind: Kind) -> None:
    """5 % of noise on every time; each term within 15 % of the truth, each prediction within 10 %."""
    true = true_curve(kind, 4)
    measured = points(true, noise=0.05, seed=3)
    fit = fit_curve(kind, 4, measured)
    for p in measured:
        case = (p.nbytes, p.shards, p.largest, p.exchange)
        assert fit.curve.seconds(*case) == pytest.approx(true.seconds(*case), rel=0.1)
    assert fit.curve.latency + 3 * fit.curve.per_shard == pytest.approx(
        true.latency + 3 * true.per_shard, rel=0.15
    )
    for term in ("per_largest", "per_exchange"):
        assert getattr(fit.curve, term) == pytest.approx(getattr(true, term), rel=0.15)
    assert fit.r2 is not None
    assert fit.r2 > 0.97
    errors = [
        abs(fit.curve.seconds(p.nbytes, p.shards, p.largest, p.exchange) / p.seconds - 1) for p in measured
    ]
    assert fit.error == pytest.approx(median(errors))
    assert 0.01 < fit.error < 0.08


@pytest.mark.parametrize("noise", [0.0, 0.05])
@pytest.mark.parametrize("kind", COLLECTIVES)
def test_a_split_where_the_terms_change(kind: Kind, noise: float) -> None:
    """Beyond 1 MiB everything takes four times as long per byte; without that, there is one curve."""
    true = true_curve(kind, 4)
    steep = replace(
        true, above=2.0**20, **{t: 4 * getattr(true, t) for t in KINDS[kind].terms if t.startswith("per_")}
    )
    measured = [p for p in points(true, noise, 5) if p.nbytes <= 2**20]
    assert len(fit_curves(kind, 4, points(true, noise, 5))) == 1
    measured += [p for p in points(steep, noise, 6) if p.nbytes > 2**20]
    low, high = fit_curves(kind, 4, measured)
    assert low.curve.above == 0
    assert 2**18 < high.curve.above < 2**21
    assert {*low.points, *high.points} == set(measured)
    for fit, truth in ((low, true), (high, steep)):
        for p in fit.points:
            case = (p.nbytes, p.shards, p.largest, p.exchange)
            assert fit.curve.seconds(*case) == pytest.approx(
                truth.seconds(*case), rel=1e-4 if not noise else 0.12
            )
    assert not hidden(measured)


@pytest.mark.parametrize("kind", COLLECTIVES)
def test_a_last_size_of_its_own(kind: Kind) -> None:
    """Only the largest size is five times as slow: its own curve is proportional to the size beyond it."""
    true = true_curve(kind, 4)
    top = THRESHOLDS.level_bytes[-1] // 2
    measured = [replace(p, seconds=5 * p.seconds) if p.nbytes > top else p for p in points(true)]
    low, high = fit_curves(kind, 4, measured)
    assert (high.curve.latency, high.curve.per_shard) == (0.0, 0.0)
    assert {p.nbytes > top for p in high.points} == {True}
    for p in high.points:
        case = (p.nbytes, p.shards, p.largest, p.exchange)
        assert high.curve.seconds(*case) == pytest.approx(p.seconds, rel=0.01)
    assert low.error == pytest.approx(0.0, abs=1e-4)


def test_errors_up_and_down_weigh_the_same() -> None:
    """Of two times of the same case the geometric mean is predicted, not the lesser."""
    point = points(true_curve("all_reduce", 2))[0]
    low, high = replace(point, seconds=1e-3), replace(point, seconds=4e-3)
    curve = fit_curve("all_reduce", 2, [low, high]).curve
    assert curve.seconds(point.nbytes, 1, 1.0, 0.0) == pytest.approx(2e-3, rel=1e-3)


def test_a_curve_that_hides_its_bandwidth() -> None:
    true = true_curve("all_gather", 4)
    assert hidden([p for p in points(true) if p.nbytes <= 2**15])
    assert not hidden(points(true))
    flat = [replace(p, seconds=1e-3) for p in points(true)]
    with pytest.raises(ProfileError, match="too busy to be measured"):
        fit_network([fit_curve("all_gather", 4, flat)])


def test_short_messages_weigh_what_long_ones_do() -> None:
    """One long message that takes twice what it should moves the latency by no more than a short one would."""
    true = true_curve("all_reduce", 2)
    measured = points(true)
    *rest, longest = measured
    fit = fit_curve("all_reduce", 2, [*rest, replace(longest, seconds=2 * longest.seconds)])
    assert fit.curve.latency == pytest.approx(true.latency, rel=0.05)
    assert fit.error is not None
    assert fit.error > 0.0


def test_what_was_measured_badly_has_little_to_say() -> None:
    """The least size took four times as long, give or take twice: as such it moves no prediction by a tenth, as a
    time that is sure it moves that of its size by half at least."""
    true = true_curve("all_reduce", 2)
    first, *rest = points(true)
    rest = [p for p in rest if p.nbytes <= 2**18]
    wrong = replace(first, seconds=4 * first.seconds)
    for sure, (least, most) in {False: (1.0, 1.1), True: (1.5, 4.0)}.items():
        low, high = (0.96, 1.03) if sure else (0.5, 2.0)
        point = replace(wrong, low=low * wrong.seconds, high=high * wrong.seconds)
        fits = fit_curves("all_reduce", 2, [point, *rest])
        ratio = fits[0].curve.seconds(first.nbytes, 1, 1.0, 0.0) / first.seconds
        assert least <= ratio <= most
        for p in rest if not sure else ():
            (curve,) = (f.curve for f in fits if p in f.points)
            assert curve.seconds(p.nbytes, 1, 1.0, 0.0) == pytest.approx(p.seconds, rel=0.1)


def test_the_network_of_the_models_own_formulas() -> None:
    """Times made by the formulas of the cost model give back their latency and bandwidth."""
    n, latency, bandwidth = 4, 7e-5, 1.3e9
    found = []
    for kind in COLLECTIVES:
        true = {
            "all_reduce": {"latency": 2 * latency, "per_byte": 2 * (n - 1) / n / bandwidth},
            "all_to_all": {"latency": latency, "per_exchange": 1 / bandwidth},
            "grouped_reduce": {"latency": 0.0, "per_shard": latency, "per_byte": 1 / bandwidth},
            "grouped_broadcast": {"latency": 0.0, "per_shard": latency, "per_byte": 1 / bandwidth},
            "ring_reduce": {"latency": 0.0, "per_shard": latency, "per_byte": 1 / bandwidth},
            "exchange_reduce": {"latency": 0.0, "per_shard": latency, "per_byte": 1 / bandwidth},
            "ring_gather": {"latency": 0.0, "per_shard": latency, "per_byte": 1 / bandwidth},
        }.get(kind, {"latency": latency, "per_largest": (n - 1) / bandwidth})
        curve = Curve(kind, n, **true)
        found.append(Fit(curve, points=tuple(points(curve))))
    network = fit_network(found)
    assert network.latency == pytest.approx(latency, rel=1e-4)
    assert network.bandwidth == pytest.approx(bandwidth, rel=1e-4)


@given(st.integers(0, 10_000), st.integers(1, 4), st.integers(1, 8))
def test_least_squares_is_optimal(seed: int, columns: int, rows: int) -> None:
    """Karush-Kuhn-Tucker: the gradient is 0 where b > 0, and not negative where b = 0."""
    dice = np.random.default_rng(seed)
    matrix = dice.uniform(0, 1, (rows, columns)) * 10.0 ** dice.integers(-6, 6, columns)
    target = dice.uniform(-0.5, 1, rows)
    found = non_negative_least_squares(matrix, target)
    assert found.min() >= 0
    scale = np.linalg.norm(matrix, axis=0)
    gradient = matrix.T @ (matrix @ found - target) / scale
    assert gradient.min() >= -1e-6
    assert np.abs(gradient[found > 0]).max(initial=0.0) < 1e-6


def test_least_squares_of_a_column_of_zeros() -> None:
    matrix = np.array([[1.0, 0.0], [1.0, 0.0]])
    assert non_negative_least_squares(matrix, np.array([2.0, 4.0])).tolist() == pytest.approx([3.0, 0.0])
    with pytest.raises(ValueError, match="no point of all_reduce"):
        fit_curve("all_reduce", 2, [])


@pytest.mark.parametrize("n", [*range(6, 40), 100, 399])
def test_interval_holds_the_median_often_enough(n: int) -> None:
    """Of samples 1 ... n, P(x_k <= median <= x_(n+1-k)) from the binomial distribution, for this k and the next."""
    _, low, high = interval([float(i) for i in range(n, 0, -1)])
    k = int(low)
    assert high == n + 1 - k

    def coverage(k: int) -> float:
        return 1 - 2 * sum(math.comb(n, i) for i in range(k)) / 2**n

    assert coverage(k) >= THRESHOLDS.confidence > coverage(k + 1)


def test_tight_and_repeat() -> None:
    assert interval([3.0, 1.0, 2.0]) == (2.0, 1.0, 3.0)
    assert not tight([1.0] * (THRESHOLDS.first_samples - 1), 0.05)
    assert tight([1.0] * THRESHOLDS.first_samples, 0.05)
    assert tight([1.0, 1.0, 1.0, 1.0, 1.0, 1.09], 0.05)
    assert not tight([1.0, 1.0, 1.0, 1.0, 1.0, 1.2], 0.05)
    assert len(repeat(lambda: 1.0, math.inf, 0.05)) == THRESHOLDS.first_samples
    assert len(repeat(lambda: 1.0, 0.0, 0.05)) == 3
    coin = iter(range(10_000))
    assert len(repeat(lambda: float(1 + next(coin) % 2), math.inf, 0.05)) == 400


@pytest.mark.parametrize("n", [2, 3, 4, 7, 16])
def test_trials(n: int) -> None:
    order = list(reversed(range(n)))
    for nbytes in THRESHOLDS.level_bytes[:3]:
        found = trials(nbytes, order)
        assert {t.kind for t in found} == set(COLLECTIVES)
        for t in found:
            assert 0.5 * nbytes <= t.nbytes <= nbytes
            if t.kind == "all_reduce":
                continue
            shares = [e / sum(t.extents) for e in t.extents]
            assert t.largest == max(shares)
            assert t.shards == sum(1 for s in shares if s)
            assert t.shards == {"even": n, "skewed": n, "half": n // 2, "lone": 1}[t.skew]
            if t.skew != "even":
                assert shares[n - 1] == max(shares)  # the fastest device holds most
                assert shares[0] == min(shares)
            if t.kind == "all_to_all":
                targets = [e / sum(t.targets) for e in t.targets]
                want = max(max(s * (1 - u), u * (1 - s)) for s, u in zip(shares, targets, strict=True))
                assert t.exchange == pytest.approx(want)
        kinds = [(t.kind, t.skew) for t in found]
        assert len(kinds) == len(set(kinds)) == 1 + (len(COLLECTIVES) - 1) * (3 if n in (2, 3) else 4) - 2
        assert not {("all_gather", "lone"), ("reduce_scatter", "lone")} & set(kinds), (
            "they run as grouped ones"
        )
    assert set(TRUE) == {term for kind in KINDS.values() for term in kind.terms}
