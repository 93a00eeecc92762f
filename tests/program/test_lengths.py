"""Whole units: exact against brute force, near to the ratios, in device order."""

from __future__ import annotations

import itertools
import math

import pytest
from cost_graphs import cluster, data_parallel, mlp
from hypothesis import given, settings
from hypothesis import strategies as st

from hetspmd.cost.model import CostModel
from hetspmd.cost.step import StepModel
from hetspmd.placement import shard
from hetspmd.plan.plan import Plan
from hetspmd.plan.reports import SearchReport
from hetspmd.program.lengths import LITTLE, Lengths, aligned, apportion, lengths_for
from hetspmd.program.schedule import make_schedule
from hetspmd.report.limits import StepLimits, limits, limits_document, limits_text
from scheduled import one_fragment

RATIOS = st.lists(st.sampled_from([0.0, 1.0, 2.0, 4.0]) | st.floats(1e-3, 10), min_size=1, max_size=4).filter(
    any
)
MANY = st.lists(st.sampled_from([0.0, 1.0, 4.0]) | st.floats(1e-6, 10), min_size=1, max_size=64).filter(any)


def completion(counts: tuple[int, ...], ratios: list[float]) -> float:
    return max(n / r if r else (math.inf if n else 0.0) for n, r in zip(counts, ratios, strict=True))


def divisions(units: int, parts: int) -> list[tuple[int, ...]]:
    found = []
    for bars in itertools.combinations(range(units + parts - 1), parts - 1):
        edges = (-1, *bars, units + parts - 1)
        found.append(tuple(b - a - 1 for a, b in itertools.pairwise(edges)))
    return found


def nearest_with_repair(units: int, ratios: list[float]) -> tuple[int, ...]:
    """HAP 5.1: nearest integers, then unit by unit where the rounding error grows least."""
    quotas = [units * r / sum(ratios) for r in ratios]
    counts = [round(q) for q in quotas]
    while sum(counts) != units:
        step = 1 if sum(counts) < units else -1
        allowed = [j for j in range(len(counts)) if counts[j] + step >= 0 and ratios[j] > 0]
        j = min(allowed, key=lambda j: (abs(counts[j] + step - quotas[j]), j))
        counts[j] += step
    return tuple(counts)


@settings(deadline=None)
@given(st.integers(0, 12), RATIOS)
def test_no_division_finishes_sooner(units: int, ratios: list[float]) -> None:
    best = min(completion(d, ratios) for d in divisions(units, len(ratios)))
    assert completion(apportion(units, ratios), ratios) == pytest.approx(best)


@settings(deadline=None)
@given(st.integers(0, 12), RATIOS)
def test_hap_rounding_where_it_finishes_as_soon(units: int, ratios: list[float]) -> None:
    hap = nearest_with_repair(units, ratios)
    ours = apportion(units, ratios)
    if completion(hap, ratios) <= completion(ours, ratios) * (1 + 1e-9):
        assert max(abs(a - b) for a, b in zip(hap, ours, strict=True)) <= 1
        quotas = [units * r / sum(ratios) for r in ratios]
        error = sum(abs(n - q) for n, q in zip(ours, quotas, strict=True))
        assert error <= sum(abs(n - q) for n, q in zip(hap, quotas, strict=True)) + 1e-9


@given(st.integers(0, 10_000), MANY)
def test_sums_zeros_and_lower_quota(units: int, ratios: list[float]) -> None:
    counts = apportion(units, ratios)
    assert sum(counts) == units
    for n, r in zip(counts, ratios, strict=True):
        assert n >= math.floor(units * r / sum(ratios) * (1 - 1e-9))
        assert r > 0 or n == 0


@given(st.integers(0, 200), RATIOS, st.sampled_from([0.5, 4.0, 1024.0]))
def test_scale_free(units: int, ratios: list[float], scale: float) -> None:
    assert apportion(units, ratios) == apportion(units, [r * scale for r in ratios])


@given(st.integers(0, 200), RATIOS, st.permutations(range(4)))
def test_follows_the_devices(units: int, ratios: list[float], order: list[int]) -> None:
    order = [j for j in order if j < len(ratios)]
    ours = apportion(units, ratios)
    permuted = apportion(units, [ratios[j] for j in order])
    assert sorted(permuted) == sorted(ours)
    if len(set(ratios)) == len(ratios):
        again = tuple(ours[j] for j in order)
        assert completion(permuted, [ratios[j] for j in order]) == pytest.approx(completion(ours, ratios))
        assert max((abs(a - b) for a, b in zip(permuted, again, strict=True)), default=0) <= 1


@pytest.mark.parametrize(
    ("units", "ratios", "counts"),
    [
        (12, (4, 2, 1, 1), (7, 3, 1, 1)),
        (8, (4, 2, 1, 1), (4, 2, 1, 1)),
        (12, (8, 1), (11, 1)),
        (2, (1, 1, 1, 1), (1, 1, 0, 0)),
        (10, (1, 0), (10, 0)),
        (1, (0.4, 0.6), (0, 1)),
        (7, (1e-9, 1), (0, 7)),
        (0, (1, 2), (0, 0)),
    ],
)
def test_examples(units: int, ratios: tuple[float, ...], counts: tuple[int, ...]) -> None:
    assert apportion(units, ratios) == counts


@given(st.integers(0, 5000), MANY, st.sampled_from([1, 2, 8, 49]))
def test_aligned_where_it_costs_little(units: int, ratios: list[float], alignment: int) -> None:
    plain, counts = apportion(units, ratios), aligned(units, ratios, alignment)
    assert sum(counts) == units
    assert [n > 0 for n in counts] == [n > 0 for n in plain], "the same devices"
    assert completion(counts, ratios) <= completion(plain, ratios) * (1 + LITTLE) * (1 + 1e-9)
    if counts != plain:
        last = max(j for j, n in enumerate(counts) if n)
        assert all(n % alignment == 0 for j, n in enumerate(counts) if j != last)
        assert counts[last] % alignment == units % alignment


@pytest.mark.parametrize(
    ("units", "ratios", "alignment", "counts"),
    [
        (512, (428, 28, 28, 28), 8, (440, 24, 24, 24)),
        (512, (428, 28, 28, 28), 16, (428, 28, 28, 28)),  # 464 units would take 8 % longer than 428
        (4096, (3427, 223, 223, 223), 8, (3424, 224, 224, 224)),
        (30522, (5, 3, 2), 8, (15264, 9160, 6098)),  # what is left over is the last one's
        (30522, (5, 3, 0), 8, (19080, 11442, 0)),
        (1000, (1, 1, 1, 1), 8, (250, 250, 250, 250)),  # equal slices stay equal
        (12, (4, 2, 1, 1), 8, (7, 3, 1, 1)),
    ],
)
def test_alignments(units: int, ratios: tuple[float, ...], alignment: int, counts: tuple[int, ...]) -> None:
    assert aligned(units, ratios, alignment) == counts


def test_alignments_of_a_graph() -> None:
    """Slices of parameters are multiples of 8 elements, slices of the batch are not; heads are whole."""
    theory = mlp(batch=37, width=1000, hidden=800)
    lengths = lengths_for(theory.axes, (0.61, 0.39))
    x = theory.graph.inputs[0].tensor
    assert lengths.extents(theory.axes, x, shard(0), 37) == (23, 14)
    assert lengths.extents(theory.axes, x, shard(1), 1000) == (608, 392)


@pytest.mark.parametrize(
    ("units", "ratios"), [(-1, [1.0]), (1, []), (1, [0.0, 0.0]), (1, [1.0, -1.0]), (1, [math.nan, 1.0])]
)
def test_refuses(units: int, ratios: list[float]) -> None:
    with pytest.raises(ValueError, match="cannot divide"):
        apportion(units, ratios)


def test_lengths_of_a_graph() -> None:
    theory = mlp(batch=32, width=8, hidden=16)
    lengths = lengths_for(theory.axes, (0.75, 0.25, 0.0))
    x = theory.graph.inputs[0].tensor
    assert lengths.extents(theory.axes, x, shard(0), 32) == (24, 8, 0)
    assert lengths.extents(theory.axes, x, shard(1), 8) == (6, 2, 0)
    batch = theory.axes.of[x, 0]
    assert [lengths.range(batch, rank) for rank in range(3)] == [(0, 24), (24, 32), (32, 32)]
    assert isinstance(lengths, Lengths)
    with pytest.raises(ValueError, match="no logical axis"):
        lengths.extents(theory.axes, x, shard(7), 8)


def limits_of(rows: int, ratios: tuple[float, ...]) -> StepLimits:
    """Of a plan that divides ``rows`` rows among devices as fast as ``ratios``, whose network costs nothing."""
    theory = mlp(batch=rows, width=8, hidden=16)
    devices = cluster(
        *(1e6 * r for r in ratios), memory_bandwidth=1e15, bandwidth=1e15, latency=1e-15, launch=1e-15
    )
    lengths = lengths_for(theory.axes, ratios)
    chosen = data_parallel(theory)
    cost = StepModel(CostModel(theory, devices), chosen).cost(lengths)
    search = SearchReport(0.0, 0.0, 0.0, "handmade", 0)
    schedule = make_schedule(theory, chosen)
    step = one_fragment(chosen, schedule, (ratios,), lengths)
    plan = Plan(theory.graph, step, devices, cost, search, {}, ())
    plan.__dict__["theory"] = theory  # its ops are of no registry
    found = limits(plan)
    assert cost.step_seconds == pytest.approx(found.fractional_seconds * (1 + found.loss))
    text = limits_text(plan, found)
    assert f"whole units cost {100 * found.loss:.1f} %" in text
    document = limits_document(found)["lengths"]
    assert document == {"fractional_seconds": found.fractional_seconds, "loss": found.loss}
    return found


def test_what_whole_units_cost() -> None:
    """The device that finishes last, as 2 rows in place of 1.25, says what rounding costs."""
    ratios = (0.5, 0.25, 0.125, 0.125)
    assert limits_of(16, ratios).loss == pytest.approx(0.0, abs=1e-9)
    counts = apportion(10, ratios)
    last = max(n / (10 * r) for n, r in zip(counts, ratios, strict=True))
    assert last > 1
    assert limits_of(10, ratios).loss == pytest.approx(last - 1, abs=1e-6)


def test_equal_devices_are_one_line() -> None:
    found = limits_of(16, (0.5, 0.25, 0.125, 0.125))
    assert [s.ranks for s in found.sensitivities if s.quantity == "flops"] == [(0,), (1,), (2, 3)]
    assert all(s.gain is not None and s.gain > 0.01 for s in found.sensitivities[:3])
