"""Ratios by segment: the linear program against a grid, what must not change it, partitions and cuts."""

from __future__ import annotations

import itertools
import time
from dataclasses import replace

import numpy as np
import pytest
from cost_graphs import cluster, mlp, random_program

from hetspmd.cluster.cluster import Cluster
from hetspmd.cluster.devices import Device, Network
from hetspmd.cost.memory import memory_profile
from hetspmd.cost.model import CostModel
from hetspmd.cost.rebalance import moved_part, rebalance_seconds
from hetspmd.cost.step import Stages
from hetspmd.optimize.partition import partition, segments_like
from hetspmd.program.lengths import by_segment, lengths_for
from hetspmd.program.program import Communicate, Program
from hetspmd.ratios.problem import Problem, Room
from hetspmd.ratios.ratios import gain, optimise
from hetspmd.ratios.starts import proportional
from hetspmd.rules.axes import Axes
from hetspmd.rules.rule import OpRule
from hetspmd.rules.theory import Theory, theory_of
from hetspmd.search.constraints import Constraints
from hetspmd.search.constraints import data_parallel as by_batch
from hetspmd.search.search import Limits, search
from hetspmd.search.space import search_space
from hetspmd.trace.cuts import with_cuts
from hetspmd.trace.graph import REBALANCE


def halves(theory: Theory, count: int = 2) -> Theory:
    """The layers of an ``mlp`` in ``count`` segments, its backward with them."""
    graph = theory.graph
    layers = max(int(p.name[1:]) for p in graph.parameters) + 1
    place: list[int] = []
    for i in graph.instructions:
        digits = i.name.lstrip("abcdefghijklmnopqrstuvwxyz")
        layer = int(digits) if digits else (layers - 1 if i.name in ("loss", "g") else 0)
        place.append(layer * count // layers)
    cut = with_cuts(graph, place, lambda t: bool(graph.tensors[t].shape))
    rules = iter(theory.rules.values())
    found: dict[int, OpRule] = {}
    from hetspmd.rules.registry import rule_for
    from hetspmd.rules.rule import call_of

    for i in cut.instructions:
        if i.op == REBALANCE:
            copied = rule_for(call_of(cut, i))
            assert copied is not None
            found[i.id] = copied
        elif not i.is_source:
            found[i.id] = next(rules)
    return theory_of(cut, found)


def best_program(theory: Theory, model: CostModel, ratios: object, *, whole: bool = True) -> Program:
    lengths = lengths_for(theory.axes, ratios)
    constraints = by_batch(theory) if whole else Constraints()
    return search(search_space(theory, constraints), model, lengths, Limits()).program


def unlike(*, bandwidth: float = 1e9, latency: float = 1e-6, **numbers: float) -> Cluster:
    """A device that computes quickly, and one that reads memory quickly."""
    scale = numbers.get("scale", 1.0)
    devices = (
        Device("computes", {"float32": 4e9 * scale}, memory_bandwidth=4e8 * scale, launch=1e-9),
        Device("reads", {"float32": 1e9 * scale}, memory_bandwidth=16e8 * scale, launch=1e-9),
    )
    return Cluster(devices, Network(bandwidth * scale, latency))


def contrasting() -> Theory:
    """A segment bound by FLOPs and one bound by memory."""
    theory = halves(mlp(batch=60, width=8, hidden=16, layers=2))
    slow = {
        i: replace(rule, flops=rule.flops * (30 if theory.graph.segments[i] == 0 else 0.01))
        for i, rule in theory.rules.items()
    }
    return theory_of(theory.graph, slow)


def test_each_segment_gets_its_own_ratios() -> None:
    theory = contrasting()
    model = CostModel(theory, unlike(bandwidth=1e12))
    program = best_program(theory, model, (0.5, 0.5))
    first, second = optimise(theory, model, program)
    assert first[0] > 0.7
    assert second[0] < 0.35


@pytest.mark.parametrize("seed", range(8))
def test_against_a_grid(seed: int) -> None:
    """No point of a grid over both segments' ratios is better, on random programs with cuts."""
    dice = np.random.default_rng(seed)
    theory = contrasting() if seed % 2 else halves(mlp(batch=40, width=8, hidden=16, layers=2))
    network = float(10 ** dice.uniform(7, 11)), float(10 ** dice.uniform(-8, -4))
    model = CostModel(theory, unlike(bandwidth=network[0], latency=network[1]))
    start = tuple((float(x), 1 - float(x)) for x in dice.uniform(0.1, 0.9, 2))
    program = best_program(theory, model, start, whole=seed % 4 < 2)
    problem = Problem(Stages(model, program))
    found = problem.step_seconds(np.array(optimise(theory, model, program, start)))
    steps = np.linspace(0, 1, 41)
    grid = min(
        problem.step_seconds(np.array([[a, 1 - a], [b, 1 - b]])) for a, b in itertools.product(steps, steps)
    )
    assert found <= grid * (1 + 1e-6)
    assert found <= problem.step_seconds(np.array(start))


def test_three_devices_against_a_grid() -> None:
    theory = contrasting()
    devices = (*unlike().devices, Device("weak", {"float32": 5e8}, memory_bandwidth=5e8, launch=1e-9))
    model = CostModel(theory, Cluster(devices, Network(1e10, 1e-7)))
    program = best_program(theory, model, proportional(model))
    problem = Problem(Stages(model, program))
    found = problem.step_seconds(np.array(optimise(theory, model, program)))
    points = [
        (a / 10, b / 10, 1 - (a + b) / 10) for a, b in itertools.product(range(11), range(11)) if a + b <= 10
    ]
    grid = min(problem.step_seconds(np.array(pair)) for pair in itertools.product(points, points))
    assert found <= grid * (1 + 1e-6)


def test_the_stage_model_at_fractional_shares_agrees() -> None:
    theory = contrasting()
    model = CostModel(theory, unlike())
    program = best_program(theory, model, (0.5, 0.5))
    stages = Stages(model, program)
    for ratios in (((0.3, 0.7), (0.6, 0.4)), ((1.0, 0.0), (0.0, 1.0)), ((0.5, 0.5), (0.5, 0.5))):
        matrix = np.array(ratios)
        assert Problem(stages).step_seconds(matrix) == pytest.approx(
            stages.seconds(model.even_shares(matrix)), rel=1e-12
        )


def test_units_do_not_matter() -> None:
    """A cluster a thousand times as fast in everything has the same ratios."""
    theory = contrasting()
    slow = CostModel(theory, unlike(bandwidth=1e9))
    program = best_program(theory, slow, (0.5, 0.5))
    found = optimise(theory, slow, program)
    devices = tuple(
        replace(d, flops={"float32": d.flops["float32"] * 1e3}, memory_bandwidth=d.memory_bandwidth * 1e3,
                launch=d.launch / 1e3)
        for d in slow.cluster.devices
    )  # fmt: skip
    fast = CostModel(theory, Cluster(devices, Network(1e12, 1e-9)))
    assert np.array(optimise(theory, fast, program)) == pytest.approx(np.array(found), abs=1e-5)


def test_permuted_devices_without_communication() -> None:
    """Where cuts cost nearly nothing, the order of the devices does not matter."""
    theory = contrasting()
    cluster_ = unlike(bandwidth=1e15, latency=1e-15)
    model = CostModel(theory, cluster_)
    program = best_program(theory, model, (0.5, 0.5))
    back = CostModel(theory, replace(cluster_, devices=cluster_.devices[::-1]))
    here, there = np.array(optimise(theory, model, program)), np.array(optimise(theory, back, program))
    assert there[:, ::-1] == pytest.approx(here, abs=1e-5)


def test_a_device_that_only_slows_gets_nothing() -> None:
    theory = halves(mlp(batch=64, width=16, hidden=32, layers=2))
    quick = Device("quick", {"float32": 1e10}, memory_bandwidth=1e11, launch=1e-9)
    slow = replace(quick, name="slow", launch=1e-2)
    model = CostModel(theory, Cluster((quick, slow), Network(1e9, 1e-6)))
    program = best_program(theory, model, (0.5, 0.5))
    assert optimise(theory, model, program) == ((1.0, 0.0), (1.0, 0.0))


def test_a_slow_network_ties_the_segments() -> None:
    """Cuts would cost more than unlike ratios would gain: the segments' ratios are equal, to the last bit."""
    theory = contrasting()
    model = CostModel(theory, unlike(bandwidth=1e12, latency=10.0))
    program = best_program(theory, model, (0.5, 0.5))
    first, second = optimise(theory, model, program, ((0.9, 0.1), (0.2, 0.8)))
    assert first == second


@pytest.mark.parametrize("seed", range(5))
def test_memory_is_a_row_over_all_segments(seed: int) -> None:
    """The best ratios within the memory: no point of a grid that fits is better, and it fits."""
    dice = np.random.default_rng(seed)
    theory = contrasting()
    model = CostModel(theory, unlike(bandwidth=1e11))
    program = best_program(theory, model, (0.5, 0.5))
    profile = memory_profile(theory, program, lengths_for(theory.axes, (0.5, 0.5)))
    free = np.array(optimise(theory, model, program))
    unbounded = Room.of(profile, np.full(2, np.inf))
    held = unbounded.held(free).max(axis=0)
    even = unbounded.held(np.full((2, 2), 0.5)).max(axis=0)
    capacity = even + (held - even) * dice.uniform(0.0, 0.9)
    room = Room.of(profile, capacity)
    start = ((0.5, 0.5), (0.5, 0.5))
    found = np.array(optimise(theory, model, program, start, room=room))
    assert room.fits(found)
    problem = Problem(Stages(model, program), room=room)
    steps = np.linspace(0, 1, 41)
    grid = min(
        problem.seconds_within(np.array([[a, 1 - a], [b, 1 - b]])) for a, b in itertools.product(steps, steps)
    )
    assert problem.seconds_within(found) <= grid * (1 + 1e-6)


@pytest.mark.parametrize("seed", range(5))
def test_a_little_less_memory_is_sought_near_what_was_found(seed: int) -> None:
    """No other devices have shares, and what is found is as good as what is found from nothing."""
    dice = np.random.default_rng(seed)
    theory = contrasting()
    model = CostModel(theory, unlike(bandwidth=1e11))
    program = best_program(theory, model, (0.5, 0.5))
    profile = memory_profile(theory, program, lengths_for(theory.axes, (0.5, 0.5)))
    even = Room.of(profile, np.full(2, np.inf)).held(np.full((2, 2), 0.5)).max(axis=0)
    start = ((0.5, 0.5), (0.5, 0.5))
    capacity = even * dice.uniform(1.05, 1.6)
    first = optimise(theory, model, program, start, room=Room.of(profile, capacity))
    room = Room.of(profile, capacity * [0.97, 1.0])
    problem = Problem(Stages(model, program), room=room)
    whole = problem.seconds_within(np.array(optimise(theory, model, program, start, room=room)))
    near = np.array(optimise(theory, model, program, start, room=room, near=first))
    assert room.fits(near)
    assert problem.seconds_within(near) <= whole * (1 + 1e-6)
    alone = optimise(theory, model, program, start, near=((0.0, 1.0), (0.0, 1.0)))
    assert alone in (((0.0, 1.0), (0.0, 1.0)), start)  # the start stays where it is better


def test_one_segment_is_a_special_case() -> None:
    for seed in range(4):
        theory = mlp(layers=2)
        model = CostModel(theory, cluster(4e8, 2e8, 1e8))
        program = random_program(theory, seed)
        (found,) = optimise(theory, model, program)
        assert sum(found) == pytest.approx(1.0)
        problem = Problem(Stages(model, program))
        assert problem.step_seconds(np.array([found])) <= problem.step_seconds(
            np.array([proportional(model)])
        ) * (1 + 1e-12)


# what is moved ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(20))
def test_moved_part_by_counting(seed: int) -> None:
    """Of 60 elements, those that a device must send or receive, counted one by one."""
    dice = np.random.default_rng(seed)
    n = int(dice.integers(1, 6))
    one, other = (np.bincount(dice.integers(0, n, 60), minlength=n) for _ in range(2))
    holder, then = np.repeat(np.arange(n), one), np.repeat(np.arange(n), other)
    sent = [int(((holder == j) & (then != j)).sum()) for j in range(n)]
    received = [int(((then == j) & (holder != j)).sum()) for j in range(n)]
    assert moved_part(one / 60, other / 60) == pytest.approx(max(*sent, *received) / 60, abs=1e-12)


def test_equal_shares_move_nothing() -> None:
    shares = np.array([0.2, 0.5, 0.3])
    assert rebalance_seconds(1e-3, 5.0, shares, shares.copy()) == 0.0
    assert rebalance_seconds(1e-3, 5.0, shares, shares[::-1]) == pytest.approx(1e-3 + 5.0 * 0.1)


# partitions -------------------------------------------------------------------------------------------------


def test_axes_belong_to_one_segment_and_have_groups() -> None:
    theory = halves(mlp(batch=24, layers=4), 4)
    axes: Axes = theory.axes
    assert axes.segments == 4
    for axis in axes.axes:
        assert {theory.graph.segment(t) for t, _ in axis.members} == {axis.segment}
        assert axes.axes[axis.group].units == axis.units
    samples = {axes.axes[a].segment for a in range(len(axes.axes)) if axes.axes[a].units == 24}
    assert samples == {0, 1, 2, 3}
    assert len({a.group for a in axes.axes if a.units == 24}) == 1


def test_lengths_by_segment() -> None:
    axes = halves(mlp(batch=24, layers=2)).axes
    lengths = lengths_for(axes, ((1.0, 0.0), (0.25, 0.75)))
    for axis in axes.axes:
        if axis.units == 24:
            assert lengths.units[axis.id] == ((24, 0), (6, 18))[axis.segment]
    assert lengths_for(axes, (0.25, 0.75)) == lengths_for(axes, ((0.25, 0.75),) * 2)
    with pytest.raises(ValueError, match="ratios of 3 segments for a graph of 2"):
        lengths_for(axes, ((0.5, 0.5),) * 3)
    assert by_segment((0.5, 0.5), 2) == ((0.5, 0.5), (0.5, 0.5))


def sources(theory: Theory) -> Theory:
    """The same with a module path per layer, as a traced model has."""
    named = tuple(
        replace(i, source=f"layers.{i.name[-1]}" if i.name[-1].isdigit() else "head")
        for i in theory.graph.instructions
    )
    return theory_of(replace(theory.graph, instructions=named), theory.rules)


def test_partition_keeps_layers_whole_and_balances() -> None:
    theory = sources(mlp(batch=24, layers=8))
    weights = [1.0] * len(theory.graph.instructions)
    places = partition(theory, weights, 4)
    assert max(places) == 3
    by_layer: dict[str, set[int]] = {}
    for instruction, place in zip(theory.graph.instructions, places, strict=True):
        if not instruction.is_source:
            by_layer.setdefault(instruction.source, set()).add(place)
    assert all(len(found) == 1 for found in by_layer.values())
    assert [min(by_layer[f"layers.{n}"]) for n in range(8)] == [0, 0, 1, 1, 2, 2, 3, 3]
    for p in theory.graph.parameters:
        assert places[theory.graph.producers[p.tensor]] == min(by_layer[f"layers.{p.name[1:]}"])
    assert partition(theory, weights, 4) == places
    assert set(partition(theory, weights, 1)) == {0}


def test_partition_cuts_where_few_bytes_cross() -> None:
    """A bottleneck near the middle is cut, not the middle itself."""
    theory = sources(mlp(batch=24, layers=5))
    graph = theory.graph
    narrow = [
        replace(t, shape=(24, 1)) if t.name == "y2" else t for t in graph.tensors
    ]  # between layer 2 and 3 little crosses
    theory = replace(theory, graph=replace(graph, tensors=tuple(narrow)))
    places = partition(theory, [1.0] * len(graph.instructions), 2)
    of = {i.source: p for i, p in zip(graph.instructions, places, strict=True) if not i.is_source}
    assert [of[f"layers.{n}"] for n in range(5)] == [0, 0, 0, 1, 1]


def test_segments_of_the_same_model_at_another_batch() -> None:
    theory = sources(mlp(batch=24, layers=4))
    other = sources(mlp(batch=12, layers=4))
    places = partition(theory, [1.0] * len(theory.graph.instructions), 2)
    cut = with_cuts(theory.graph, places, lambda t: bool(theory.graph.tensors[t].shape))
    assert segments_like(other.graph, cut) == places


# time -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_64_devices_and_8_segments_take_less_than_a_second() -> None:
    """Every device is unlike every other; cuts between all neighbours."""
    theory = halves(mlp(batch=4096, width=64, hidden=256, layers=32), 8)
    dice = np.random.default_rng(0)
    devices = tuple(
        Device(f"d{j}", {"float32": float(f)}, memory_bandwidth=float(b), launch=1e-9)
        for j, (f, b) in enumerate(
            zip(dice.uniform(1, 9, 64) * 1e10, dice.uniform(1, 9, 64) * 1e9, strict=True)
        )
    )
    model = CostModel(theory, Cluster(devices, Network(1e11, 1e-6)))
    program = best_program(theory, model, proportional(model))
    assert sum(isinstance(s, Communicate) and s.kind == "rebalance" for s in program.steps) >= 14
    problem = Problem(Stages(model, program))
    assert len(problem.kinds) == 64
    started = time.process_time()
    part, _ = gain(problem, np.asarray(proportional(model)))
    assert time.process_time() - started < 1.0
    assert part > 0.0
