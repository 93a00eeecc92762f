"""Optimal ratios: against brute force on a grid, and what must not change them."""

from __future__ import annotations

import itertools
import time

import numpy as np
import pytest
from cost_graphs import Builder, cluster, data_parallel, mlp, program, random_program
from hypothesis import given, settings
from hypothesis import strategies as st

from hetspmd.cluster.cluster import Cluster
from hetspmd.cluster.devices import Device, Network
from hetspmd.cost.model import CostModel
from hetspmd.cost.step import Stages
from hetspmd.placement import shard
from hetspmd.program.program import Communicate, Program
from hetspmd.ratios.ratios import optimise_ratios
from hetspmd.ratios.starts import even, proportional, starting_ratios
from hetspmd.rules.theory import Theory


def seconds(model: CostModel, chosen: Program, ratios: object) -> float:
    return Stages(model, chosen).seconds(model.even_shares(np.asarray(ratios, dtype=float)))


def grid(model: CostModel, chosen: Program, steps: int) -> float:
    """The least step time over all ratios that are multiples of 1 / steps."""
    stages = Stages(model, chosen)
    n = model.world
    best = float("inf")
    for head in itertools.product(range(steps + 1), repeat=n - 1):
        if sum(head) <= steps:
            ratios = np.array([*head, steps - sum(head)]) / steps
            best = min(best, stages.seconds(model.even_shares(ratios)))
    return best


def test_equal_finish_without_communication_is_proportional() -> None:
    theory = mlp(batch=64, width=32, hidden=64)
    model = CostModel(theory, cluster(4e8, 2e8, 1e8, 1e8, memory_bandwidth=1e15, launch=1e-12))
    found = optimise_ratios(theory, model, data_parallel(theory), start=(0.25,) * 4)
    assert found == pytest.approx((0.5, 0.25, 0.125, 0.125), abs=1e-6)
    assert sum(found) == pytest.approx(1.0, abs=1e-15)


def test_padded_collectives_pull_towards_even() -> None:
    """One op of F FLOPs along m, its output gathered: min max_j F B_j / r_j + L + (n - 1) M E / b.

    With r = (3, 1) the step is F B_1 / 3 + E B_1 / b for B_1 >= 3/4 and F (1 - B_1) + E B_1 / b below: as
    soon as E / b > F, even ratios win.
    """
    b = Builder()
    x = b.input("x", (120, 8))
    y = b.op("y", "mk->mk", (x,), {"m": 120, "k": 8}, flops=3e6)
    b.op("z", "mk->mk", (y,), {"m": 120, "k": 8}, blocked="m")
    theory = b.theory(None, {})

    def choose(instruction: int, rows: list) -> int:
        names = [r.name for r in rows]
        return names.index("m") if "m" in names else names.index("always")

    chosen = program(theory, choose)
    assert [s.kind for s in chosen.steps if isinstance(s, Communicate)] == ["grouped_broadcast"]
    padded = Program(
        tuple(
            Communicate(s.tensor, "all_gather", s.source, s.target) if isinstance(s, Communicate) else s
            for s in chosen.steps
        ),
        None, (), (), (),
    )  # fmt: skip
    nbytes = 120 * 8 * 4
    slow = CostModel(theory, cluster(3e9, 1e9, bandwidth=nbytes / 1.0, memory_bandwidth=1e15))
    fast = CostModel(theory, cluster(3e9, 1e9, bandwidth=nbytes / 1e-6, memory_bandwidth=1e15))
    assert optimise_ratios(theory, slow, padded) == pytest.approx((0.5, 0.5), abs=1e-6)
    assert optimise_ratios(theory, fast, padded) == pytest.approx((0.75, 0.25), abs=1e-6)
    assert optimise_ratios(theory, slow, chosen)[0] > 0.74  # the sum does not depend on the ratios


@settings(max_examples=25, deadline=None)
@given(
    st.integers(0, 10**6), st.lists(st.sampled_from([1e7, 2e7, 5e7, 1e8, 4e8]), min_size=2, max_size=3),
    st.sampled_from([1e5, 1e7, 1e9]), st.sampled_from([1e7, 1e8, 1e11]), st.sampled_from([1e-9, 1e-6, 1e-5]),
)  # fmt: skip
def test_no_grid_point_is_better(
    seed: int, rates: list[float], bandwidth: float, memory: float, launch: float
) -> None:
    theory = mlp(batch=12, width=6, hidden=10)
    chosen = random_program(theory, seed)
    model = CostModel(theory, cluster(*rates, bandwidth=bandwidth, memory_bandwidth=memory, launch=launch))
    found = optimise_ratios(theory, model, chosen)
    assert min(found) >= 0
    assert sum(found) == pytest.approx(1.0)
    value = seconds(model, chosen, found)
    if any(isinstance(s, Communicate) and s.kind == "all_to_all" for s in chosen.steps):
        assert value <= seconds(model, chosen, proportional(model)) * (1 + 1e-9)
    else:
        assert value <= grid(model, chosen, 120 if len(rates) == 2 else 24) * (1 + 1e-6)


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10**6), st.permutations(range(4)), st.sampled_from([1e-3, 8.0]))
def test_permuting_devices_and_changing_the_clock(seed: int, order: list[int], clock: float) -> None:
    theory = mlp(batch=12, width=6, hidden=10)
    chosen = random_program(theory, seed)
    rates = [1e8, 5e7, 2e8, 1e8]
    model = CostModel(theory, cluster(*rates))
    found = optimise_ratios(theory, model, chosen)
    permuted = CostModel(theory, cluster(*(rates[j] for j in order)))
    again = optimise_ratios(theory, permuted, chosen)
    assert seconds(permuted, chosen, again) == pytest.approx(seconds(model, chosen, found), rel=1e-6)
    slower = CostModel(
        theory,
        Cluster(
            tuple(
                Device("d", {"default": r * clock}, memory_bandwidth=1e11 * clock, launch=1e-6 / clock)
                for r in rates
            ),
            Network(1e9 * clock, 1e-5 / clock),
        ),
    )
    scaled = optimise_ratios(theory, slower, chosen)
    assert seconds(slower, chosen, scaled) * clock == pytest.approx(seconds(model, chosen, found), rel=1e-6)


def test_the_same_ratios_every_time() -> None:
    theory = mlp(batch=12, width=6, hidden=10, layers=3)
    model = CostModel(theory, cluster(1e8, 2e8, 3e8, 3e8))
    chosen = random_program(theory, 7)
    assert optimise_ratios(theory, model, chosen) == optimise_ratios(theory, model, chosen)


def test_equal_devices_get_equal_shares() -> None:
    theory = mlp(batch=64, width=32, hidden=64)
    model = CostModel(theory, cluster(*[1e8] * 3, *[3e8] * 5))
    found = optimise_ratios(theory, model, data_parallel(theory))
    assert len(set(found[:3])) == 1
    assert len(set(found[3:])) == 1


def test_a_device_that_only_slows_the_step_gets_nothing() -> None:
    """Its launches alone take longer than the whole step does without it."""
    theory = mlp(batch=64, width=32, hidden=64)
    fast = Device("fast", {"default": 1e9}, launch=1e-6)
    slow = Device("slow", {"default": 1e9}, launch=1.0)
    model = CostModel(theory, Cluster((fast, slow, fast), Network(1e12, 1e-9)))
    assert optimise_ratios(theory, model, data_parallel(theory)) == pytest.approx((0.5, 0.0, 0.5))


def test_constants_count() -> None:
    """Launch time of a device takes work off it: B F / r + k l is equal on both."""
    theory = mlp(batch=64, width=32, hidden=64)
    flops = sum(rule.flops for rule in theory.rules.values())
    devices = (
        Device("a", {"default": flops}, launch=1e-9),
        Device("b", {"default": flops}, launch=0.05),
    )
    model = CostModel(theory, Cluster(devices, Network(1e12, 1e-9)))
    # Eight ops and two steps of the optimizer: B_1 = B_2 + 10 * 0.05 and B_1 + B_2 = 1
    assert len(theory.rules) + len(theory.graph.parameters) == 10
    assert optimise_ratios(theory, model, data_parallel(theory)) == pytest.approx((0.75, 0.25), abs=1e-6)


def test_roofline_on_both_sides() -> None:
    """A device bound by memory at its share and one bound by FLOPs: cutting planes meet both."""
    b = Builder()
    x = b.input("x", (1000, 10))
    b.op("y", "mk->mk", (x,), {"m": 1000, "k": 10}, flops=8e4)  # 80,000 bytes: 1 FLOP per byte
    theory = b.theory(None, {})
    chosen = program(theory, lambda _, rows: [r.name for r in rows].index("m") if rows[0].name == "m" else 0)
    devices = (
        Device("compute", {"default": 1e6}, memory_bandwidth=1e9, launch=1e-12),
        Device("memory", {"default": 1e9}, memory_bandwidth=3e6, launch=1e-12),
    )
    model = CostModel(theory, Cluster(devices, Network(1e9)))
    assert optimise_ratios(theory, model, chosen) == pytest.approx((0.25, 0.75), abs=1e-6)


def test_one_device_and_misuse() -> None:
    theory = mlp()
    chosen = data_parallel(theory)
    assert optimise_ratios(theory, CostModel(theory, cluster(1e9)), chosen) == (1.0,)
    model = CostModel(theory, cluster(1e9, 1e9))
    for start in [(1.0,), (0.5, 0.6), (-0.5, 1.5)]:
        with pytest.raises(ValueError, match="start must be 2"):
            optimise_ratios(theory, model, chosen, start=start)
    with pytest.raises(ValueError, match="another theory"):
        optimise_ratios(mlp(), model, chosen)


def test_never_dearer_than_the_start() -> None:
    theory = mlp(batch=12, width=6, hidden=10, layers=2)
    model = CostModel(theory, cluster(4e8, 1e8, 1e8, bandwidth=1e6))
    for seed in range(12):
        chosen = random_program(theory, seed)
        for _, start in starting_ratios(model):
            found = optimise_ratios(theory, model, chosen, start)
            assert seconds(model, chosen, found) <= seconds(model, chosen, start)


def test_nothing_to_divide_keeps_the_start() -> None:
    theory = mlp()
    model = CostModel(theory, cluster(4e8, 1e8))
    chosen = program(theory, lambda _, rows: len(rows) - 1)
    assert not any(isinstance(s, Communicate) for s in chosen.steps)
    assert optimise_ratios(theory, model, chosen, (0.3, 0.7)) == (0.3, 0.7)


def test_one_expensive_link_leaves_the_fastest_alone() -> None:
    theory = mlp(batch=12, width=6, hidden=10)
    sharded = program(theory, lambda _, rows: 0, lambda t: shard(0))
    model = CostModel(theory, cluster(1e8, 4e8, bandwidth=1e2, latency=1e-9))
    found = optimise_ratios(theory, model, sharded)
    assert seconds(model, sharded, found) <= seconds(model, sharded, (0.0, 1.0)) * (1 + 1e-9)


def deep(layers: int) -> Theory:
    return mlp(batch=64, width=16, hidden=32, layers=layers)


def test_many_stages_on_many_unlike_devices_are_quick() -> None:
    theory = deep(200)
    chosen = data_parallel(theory)
    model = CostModel(theory, cluster(*[1e9 * (1 + j) for j in range(64)], memory_bandwidth=1e12))
    begin = time.perf_counter()
    found = optimise_ratios(theory, model, chosen)
    assert time.perf_counter() - begin < 5
    assert seconds(model, chosen, found) <= seconds(model, chosen, proportional(model))


def test_starts() -> None:
    theory = mlp()
    model = CostModel(theory, cluster(1e8, 3e8, 3e8, 1e8))
    assert proportional(model) == pytest.approx((0.125, 0.375, 0.375, 0.125))
    assert even(model) == (0.25,) * 4
    assert [name for name, _ in starting_ratios(model)] == ["proportional", "even"]
    equal = CostModel(theory, cluster(1e8, 1e8))
    assert [name for name, _ in starting_ratios(equal)] == ["proportional"]
    assert starting_ratios(CostModel(theory, cluster(1e8))) == (("proportional", (1.0,)),)


# upper bounds --------------------------------------------------------------------------------------------------


def bounded_grid(model: CostModel, chosen: Program, most: np.ndarray, steps: int) -> float:
    """The least step time over all ratios within the bounds that are multiples of 1 / steps."""
    stages = Stages(model, chosen)
    best = float("inf")
    for head in itertools.product(range(steps + 1), repeat=model.world - 1):
        ratios = np.array([*head, steps - sum(head)]) / steps
        if sum(head) <= steps and (ratios <= most + 1e-12).all():
            best = min(best, stages.seconds(model.even_shares(ratios)))
    return best


def test_a_bound_on_the_fast_device_is_met() -> None:
    theory = mlp(batch=64, width=32, hidden=64)
    model = CostModel(theory, cluster(4e8, 2e8, 1e8, 1e8, memory_bandwidth=1e15, launch=1e-12))
    chosen = data_parallel(theory)
    free = optimise_ratios(theory, model, chosen)
    assert free == pytest.approx((0.5, 0.25, 0.125, 0.125), abs=1e-6)
    most = (0.2, np.inf, np.inf, 2.0)
    found = optimise_ratios(theory, model, chosen, (0.1, 0.5, 0.2, 0.2), most=most)
    assert found == pytest.approx((0.2, 0.4, 0.2, 0.2), abs=1e-6)
    assert optimise_ratios(theory, model, chosen, (0.25,) * 4, most=(0.9,) * 4) == pytest.approx(
        free, abs=1e-6
    )


def test_equal_devices_with_unlike_bounds_are_told_apart() -> None:
    theory = mlp(batch=64, width=32, hidden=64)
    model = CostModel(theory, cluster(1e8, 1e8, 1e8, memory_bandwidth=1e15, launch=1e-12))
    found = optimise_ratios(theory, model, data_parallel(theory), (0.1, 0.4, 0.5), most=(0.1, np.inf, np.inf))
    assert found == pytest.approx((0.1, 0.45, 0.45), abs=1e-6)


def test_bounds_that_leave_one_point() -> None:
    theory = mlp()
    model = CostModel(theory, cluster(4e8, 1e8))
    chosen = data_parallel(theory)
    assert optimise_ratios(theory, model, chosen, (0.3, 0.7), most=(0.3, 0.7)) == pytest.approx((0.3, 0.7))
    assert optimise_ratios(theory, model, chosen, (0.0, 1.0), most=(0.0, 1.0)) == (0.0, 1.0)


@pytest.mark.parametrize("most", [(0.3, 0.6), (-0.5, 0.9), (-1.0, -1.0), (0.0, 0.0)])
def test_impossible_bounds_return_the_start(most: tuple[float, float]) -> None:
    theory = mlp()
    model = CostModel(theory, cluster(4e8, 1e8))
    assert optimise_ratios(theory, model, data_parallel(theory), (0.4, 0.6), most=most) == (0.4, 0.6)


def test_a_start_beyond_the_bounds_is_left() -> None:
    """Any ratios that fit are better than those that do not."""
    theory = mlp(batch=64, width=32, hidden=64)
    model = CostModel(theory, cluster(4e8, 1e8, memory_bandwidth=1e15, launch=1e-12))
    found = optimise_ratios(theory, model, data_parallel(theory), (0.8, 0.2), most=(0.5, 1.0))
    assert found == pytest.approx((0.5, 0.5), abs=1e-6)


@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 10**6), st.lists(st.sampled_from([1e7, 5e7, 4e8]), min_size=2, max_size=3),
    st.sampled_from([1e5, 1e7, 1e9]), st.lists(st.integers(-2, 14), min_size=3, max_size=3),
)  # fmt: skip
def test_within_the_bounds_no_grid_point_is_better(
    seed: int, rates: list[float], bandwidth: float, twelfths: list[int]
) -> None:
    theory = mlp(batch=12, width=6, hidden=10)
    chosen = random_program(theory, seed)
    model = CostModel(theory, cluster(*rates, bandwidth=bandwidth))
    most = np.array(twelfths[: model.world]) / 12
    start = proportional(model)
    found = np.array(optimise_ratios(theory, model, chosen, start, most=most))
    assert found.sum() == pytest.approx(1.0)
    if np.clip(most, 0.0, 1.0).sum() < 1.0 - 1e-9:
        assert tuple(found) == start
        return
    if (most < 0).any():  # a device that cannot even hold what is whole
        return
    if np.clip(most, 0.0, 1.0).sum() < 1.0 + 1e-9:
        return
    assert (found <= most * (1 + 1e-9)).all()
    value = seconds(model, chosen, found)
    if (np.array(start) <= most).all():
        assert value <= seconds(model, chosen, start) * (1 + 1e-9)
    if not any(isinstance(s, Communicate) and s.kind == "all_to_all" for s in chosen.steps):
        assert value <= bounded_grid(model, chosen, most, 120 if model.world == 2 else 24) * (1 + 1e-6)
