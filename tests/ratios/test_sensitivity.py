"""What limits the step: against finite differences of the full solution, closed forms, and sums."""

from __future__ import annotations

import time

import numpy as np
import pytest
from cost_graphs import cluster, data_parallel, mlp, program, random_program
from hypothesis import given, settings
from hypothesis import strategies as st

from hetspmd.cluster.cluster import Cluster
from hetspmd.cluster.curves import Curve
from hetspmd.cluster.devices import Device, Network
from hetspmd.cost.model import CostModel
from hetspmd.cost.step import Stages, idle_seconds
from hetspmd.placement import shard
from hetspmd.program.program import Communicate, Program
from hetspmd.ratios.problem import Problem
from hetspmd.ratios.ratio_thresholds import THRESHOLDS
from hetspmd.ratios.ratios import minimise, optimise_ratios
from hetspmd.ratios.sensitivity import QUANTITIES, Quantity, Sensitivity, changed, sensitivities
from hetspmd.rules.theory import Theory
from scheduled import streams_of


def seconds(theory: Theory, of: Cluster, chosen: Program, start: tuple[float, ...]) -> float:
    """The stage model's seconds at the best ratios of the devices that have a share at the start."""
    model = CostModel(theory, of)
    stages = Stages(model, chosen)
    problem = Problem(stages, np.full(model.world, np.inf))
    first = np.array([start])
    return stages.seconds(model.even_shares(minimise(problem, first > 0, first)))


def slopes(
    theory: Theory, of: Cluster, chosen: Program, start: tuple[float, ...], s: Sensitivity, step: float = 1e-5
) -> tuple[float, float]:
    """The one-sided elasticities, by solving again, the lesser first."""
    base = seconds(theory, of, chosen, start)
    below, above = (
        seconds(theory, changed(of, s.quantity, s.ranks, factor), chosen, start)
        for factor in (1 - step, 1 + step)
    )
    found = sorted([(base - below) / (base * step), (above - base) / (base * step)])
    return found[0], found[1]


def total(found: tuple[Sensitivity, ...]) -> float:
    """The elasticity of scaling all rates and bandwidths by c, launches and latencies by 1 / c."""
    return sum(-QUANTITIES[s.quantity] * s.elasticity for s in found)


@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 10**6), st.lists(st.sampled_from([1e7, 2e7, 5e7, 1e8, 4e8]), min_size=1, max_size=4),
    st.sampled_from([1e5, 1e7, 1e9]), st.sampled_from([1e7, 1e8, 1e11]), st.sampled_from([1e-9, 1e-6, 1e-5]),
)  # fmt: skip
def test_finite_differences_of_the_full_solution(
    seed: int, rates: list[float], bandwidth: float, memory: float, launch: float
) -> None:
    theory = mlp(batch=12, width=6, hidden=10)
    chosen = random_program(theory, seed)
    of = cluster(*rates, bandwidth=bandwidth, memory_bandwidth=memory, launch=launch)
    model = CostModel(theory, of)
    ratios = optimise_ratios(theory, model, chosen)
    found = sensitivities(model, chosen, ratios, gains=0)
    assert found
    assert total(found) == pytest.approx(-1.0, abs=1e-9)
    assert all(QUANTITIES[s.quantity] * s.elasticity > 0 for s in found)
    if any(isinstance(s, Communicate) and s.kind == "all_to_all" for s in chosen.steps):
        return  # solved to a local optimum only
    named = {(s.quantity, s.ranks) for s in found}
    kinds = {ranks for s in found if (ranks := s.ranks)}
    for kind in kinds:  # what is not listed does not matter
        for quantity in ("flops", "memory_bandwidth", "launch"):
            if (quantity, kind) not in named:
                found = (*found, Sensitivity(quantity, kind, 0.0))
    for s in found:
        low, high = slopes(theory, of, chosen, ratios, s)
        assert low - 2e-3 <= s.elasticity <= high + 2e-3


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([0.25, 3.0]))
def test_a_faster_clock(seed: int, c: float) -> None:
    """Everything c times as fast: the step takes 1 / c, and the elasticities stay."""
    theory = mlp(batch=12, width=6, hidden=10)
    chosen = random_program(theory, seed)
    of = cluster(1e8, 5e7, 2e8, 1e8, bandwidth=1e7, memory_bandwidth=1e9)
    faster = of
    for quantity, power in QUANTITIES.items():
        faster = changed(faster, quantity, range(4), c if power < 0 else 1 / c)
    ratios = optimise_ratios(theory, CostModel(theory, of), chosen)
    before, after = (Stages(CostModel(theory, o), chosen) for o in (of, faster))
    shares = before.model.even_shares(ratios)
    assert after.seconds(shares) * c == pytest.approx(before.seconds(shares))
    found, again = (
        {
            (s.quantity, s.ranks): s.elasticity
            for s in sensitivities(CostModel(theory, o), chosen, ratios, gains=0)
        }
        for o in (of, faster)
    )
    assert sum(-abs(e) for e in again.values()) == pytest.approx(-1.0)
    assert found == pytest.approx(again, abs=1e-6)


def test_balanced_devices_share_what_limits() -> None:
    """T = F / (r_1 + ... + r_n): a device's elasticity is its part of the speed; with the ratios held it is 0."""
    theory = mlp(batch=64, width=32, hidden=64)
    model = CostModel(
        theory, cluster(4e8, 2e8, 1e8, 1e8, memory_bandwidth=1e15, launch=1e-15, bandwidth=1e15)
    )
    chosen = data_parallel(theory)
    found = sensitivities(model, chosen, optimise_ratios(theory, model, chosen), gains=3)
    by = {(s.quantity, s.ranks): s for s in found if s.quantity == "flops"}
    parts = {(0,): 0.5, (1,): 0.25, (2, 3): 0.25}
    latency = sum(s.elasticity for s in found if s.quantity == "latency")
    for ranks, part in parts.items():
        assert by["flops", ranks].elasticity == pytest.approx(-part * (1 - latency), rel=1e-4)
    assert next(s.ranks for s in found if s.quantity == "flops") == (0,)


def test_only_the_network() -> None:
    """An all-gather of E bytes, padded: L + (n - 1) M E / b, of which L is the part of the latency."""
    theory = mlp(batch=12, width=6, hidden=10)
    sharded = program(theory, lambda _, rows: len(rows) - 1, lambda t: shard(0))
    moves = [s for s in sharded.steps if isinstance(s, Communicate)]
    assert moves
    of = cluster(1e20, 1e20, bandwidth=1e5, latency=1e-3, memory_bandwidth=1e25, launch=1e-20)
    model = CostModel(theory, of)
    forms = [model.move_form(s.tensor, s.source, s.target, s.kind) for s in moves]
    found = {s.quantity: s.elasticity for s in sensitivities(model, sharded, (0.5, 0.5), gains=0)}
    whole = sum(model.form_seconds(f, model.even_shares((0.5, 0.5))) for f in forms)
    starts = sum(1e-3 * {"all_gather": 1, "grouped_broadcast": 2}[s.kind] for s in moves)
    assert found["latency"] == pytest.approx(starts / whole)
    assert found["bandwidth"] == pytest.approx(starts / whole - 1)


@pytest.mark.parametrize("seed", range(6))
def test_gains_are_those_of_the_simulation_on_a_better_cluster(seed: int) -> None:
    theory = mlp(batch=24, width=6, hidden=10, layers=2)
    chosen = random_program(theory, seed)
    of = cluster(1e8, 5e7, 2e8, 1e8, bandwidth=1e7, memory_bandwidth=1e9)
    model = CostModel(theory, of)
    ratios = optimise_ratios(theory, model, chosen)
    found = sensitivities(model, chosen, ratios, gains=4)
    assert [s.gain is None for s in found] == [i >= 4 for i in range(len(found))]
    order = [abs(s.elasticity) for s in found]
    assert order == sorted(order, reverse=True)
    before = streams_of(model, chosen).seconds(model.even_shares(ratios))
    for s in found[:4]:
        factor = (
            1 + THRESHOLDS.better_quantity if QUANTITIES[s.quantity] < 0 else 1 - THRESHOLDS.better_quantity
        )
        better = CostModel(theory, changed(of, s.quantity, s.ranks, factor))
        streams = streams_of(better, chosen)
        moved = optimise_ratios(theory, better, chosen, ratios)
        after = min(streams.seconds(better.even_shares(b)) for b in (ratios, moved))
        assert s.gain is not None
        assert -1e-12 <= s.gain <= THRESHOLDS.better_quantity + 1e-12
        assert s.gain == pytest.approx(1 - after / before, abs=1e-6)


def test_measured_curves_have_bandwidth_and_latency() -> None:
    curve = Curve("grouped_reduce", 2, 1e-3, 2e-4, 3e-9, 5e-9)
    of = Cluster(tuple(Device("d", {"default": 1e9}) for _ in range(2)), Network(1e9, 1e-4), (curve,))
    (slow,) = changed(of, "latency", (), 2.0).curves
    assert (slow.latency, slow.per_shard, slow.per_byte, slow.per_largest) == (2e-3, 4e-4, 3e-9, 5e-9)
    (wide,) = changed(of, "bandwidth", (), 2.0).curves
    assert (wide.latency, wide.per_shard, wide.per_byte, wide.per_largest) == (1e-3, 2e-4, 1.5e-9, 2.5e-9)
    assert changed(of, "flops", (1,), 2.0).devices[1].flops == {"default": 2e9}
    assert changed(of, "flops", (1,), 2.0).devices[0] == of.devices[0]


def test_bounds_keep_the_shares() -> None:
    """A device that may have a fifth at most: then the others' speed counts for what they hold."""
    theory = mlp(batch=64, width=32, hidden=64)
    model = CostModel(theory, cluster(4e8, 2e8, 1e8, memory_bandwidth=1e15, launch=1e-15, bandwidth=1e15))
    chosen = data_parallel(theory)
    most = np.array([0.2, np.inf, np.inf])
    ratios = optimise_ratios(theory, model, chosen, (0.2, 0.4, 0.4), most=most)
    assert ratios == pytest.approx((0.2, 0.8 * 2 / 3, 0.8 / 3), abs=1e-6)
    found = {
        s.ranks: s.elasticity for s in sensitivities(model, chosen, ratios, most=most, gains=0) if s.ranks
    }
    assert (0,) not in found
    assert found[(1,)] == pytest.approx(2 * found[(2,)], rel=1e-3)


def test_idle_devices_are_sent_results() -> None:
    theory = mlp(batch=12, width=6, hidden=10)
    of = cluster(1e8, 2e8, 3e8, bandwidth=1e3, latency=1e-2)
    alone = CostModel(theory, of.part((2,)))
    chosen = data_parallel(theory)
    idle = idle_seconds(theory.graph, chosen, of, (2,))
    assert idle > 0
    found = sensitivities(alone, chosen, (1.0,), cluster=of, active=(2,))
    assert {s.ranks for s in found} == {(), (2,)}
    whole = Stages(alone, chosen).seconds(alone.even_shares((1.0,))) + idle
    network = sum(-QUANTITIES[s.quantity] * s.elasticity for s in found if not s.ranks)
    assert network == pytest.approx(-idle / whole)
    assert total(found) == pytest.approx(-1.0)


def test_every_quantity_has_its_place() -> None:
    names: list[Quantity] = ["flops", "memory_bandwidth", "launch", "bandwidth", "latency"]
    assert list(QUANTITIES) == names


def test_quick_for_a_long_program() -> None:
    theory = mlp(batch=64, width=16, hidden=32, layers=200)
    chosen = data_parallel(theory)
    assert len(chosen.steps) > 2000
    model = CostModel(theory, cluster(*[1e9 * (1 + j) for j in range(8)], memory_bandwidth=1e10))
    ratios = optimise_ratios(theory, model, chosen)
    streams = streams_of(model, chosen)
    taken = []
    for _ in range(3):
        begin = time.process_time()
        assert sensitivities(model, chosen, ratios, streams=streams)
        taken.append(time.process_time() - begin)
    assert min(taken) < 0.3, taken
