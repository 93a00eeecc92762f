"""Measured steps of a model: which model they are of, and the pace and the room that they give its devices."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from hetspmd.cluster.cluster import Cluster
from hetspmd.cluster.devices import Device, Network
from hetspmd.cluster.step_curves import ModelSteps, StepCurve, StepPoint
from hetspmd.cost.measured_steps import capacity_of, identity, measured_bytes, rows_of, step_seconds
from hetspmd.cost.model import CostModel
from hetspmd.errors import MemoryLimitError
from hetspmd.optimize.compile_options import CompileOptions
from hetspmd.optimize.compiler import compile as synthesize
from hetspmd.optimize.compiler import compile_plan, plan_for
from hetspmd.plan.plan import Plan
from hetspmd.program.lengths import lengths_for
from hetspmd.report import plan_json, plan_text
from hetspmd.rules.theory import Theory, derive
from hetspmd.search.constraints import data_parallel
from hetspmd.trace.graph import Graph
from hetspmd.trace.trace import trace

ROWS = (("x", 0, 1),)
WIDTH = 32


class Body(nn.Module):
    def __init__(self, width: int = WIDTH, layers: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x.square().mean()


class Telling(Body):
    """Returns what it computes beside the loss, by an op of its own."""

    def forward(self, x: torch.Tensor) -> Any:
        loss = super().forward(x)
        return {"loss": loss, "probabilities": self.layers[0](x).softmax(-1)}


def graph(rows: int, *, model: nn.Module | None = None, width: int = WIDTH, **dtype: torch.dtype) -> Graph:
    return trace(model or Body(width), (), {"x": torch.zeros(rows, width, **dtype)})


def test_the_identity_is_of_the_model_and_not_of_its_rows() -> None:
    own = identity(graph(8), ROWS)
    assert own is not None
    assert [identity(graph(n), ROWS) for n in (2, 7, 96)] == [own] * 3
    assert [rows_of(graph(n), ROWS) for n in (1, 7)] == [1, 7]
    others = [
        graph(8, width=16),
        graph(8, model=Body(layers=3)),
        graph(8, model=Body().double(), dtype=torch.float64),
        trace(Body(), (torch.zeros(8, WIDTH),), {}),
        trace(Body(), (), {"x": torch.zeros(8, 3, WIDTH)}),
    ]
    found = [identity(g, ROWS) for g in others]
    assert own not in found
    assert len(set(found)) == len(found)
    with torch.autocast("cpu", torch.bfloat16):
        assert identity(graph(8), ROWS) != own
    frozen = Body()
    frozen.layers[0].requires_grad_(False)
    assert identity(graph(8, model=frozen), ROWS) != own


def test_the_identity_knows_inputs_and_no_outputs() -> None:
    assert identity(graph(8), (("y", 0, 1),)) is None
    assert identity(graph(8), (("x", 2, 1),)) is None
    assert identity(graph(9), (("x", 0, 2),)) is None, "nine are no pairs"
    told = graph(8, model=Telling())
    assert identity(told, ROWS) == identity(told.without_outputs(), ROWS) == identity(graph(8), ROWS)


def point(rows: int, seconds: float, peak: int, counted: int) -> StepPoint:
    return StepPoint(rows, seconds, seconds, seconds, 3, peak, counted)


CURVE = StepCurve(
    (0,), 3000, (point(1, 1.0, 1200, 1000), point(4, 2.0, 2300, 2000), point(6, 1.9, 2900, 2600))
)


def test_seconds_between_and_beyond_the_points() -> None:
    assert step_seconds(CURVE, 0.5) == 1.0
    assert step_seconds(CURVE, 2.5) == 1.5
    assert step_seconds(CURVE, 6) == 2.0, "more rows take no less"
    assert step_seconds(CURVE, 12) == 4.0


def test_bytes_between_and_beyond_the_points() -> None:
    assert [measured_bytes(CURVE, c) for c in (1000, 2000, 2600)] == [1200, 2300, 2900]
    assert measured_bytes(CURVE, 1500) == 1750
    assert measured_bytes(CURVE, 400) == 600, "a workspace is there however little is counted"
    assert measured_bytes(CURVE, 5200) == 2900 + 1.2 * 2600, "as where they were most beside what was counted"
    assert measured_bytes(CURVE, 0) == 0, "an idle device holds nothing"
    lighter = replace(CURVE, points=(point(1, 1.0, 500, 1000),))
    assert [measured_bytes(lighter, c) for c in (500, 1000, 3000)] == [250, 500, 1500]


def device(memory: float) -> Device:
    return Device("d", {"default": 1e9}, memory=memory)


def test_room_is_what_the_measured_bytes_leave() -> None:
    assert capacity_of(None, device(7.0)) == 7.0
    assert capacity_of(CURVE, device(2300)) == pytest.approx(2000, abs=1)
    limited = replace(CURVE, over=(7, 2650))
    assert capacity_of(limited, device(3000)) == 2649, "less than what did not fit"
    assert capacity_of(limited, device(float("inf"))) == 2649, "the file says of no other memory"
    assert capacity_of(limited, device(2300)) == pytest.approx(2000, abs=1), (
        "a device with less memory than measured"
    )
    assert capacity_of(limited, device(58000)) > 48000, "one with more is not held to that limit"
    nothing = StepCurve((0,), 3000, (), (1, 4000))
    assert capacity_of(nothing, device(3000)) == 3000


steps_of = st.lists(
    st.tuples(st.integers(1, 50), st.integers(1, 10**6), st.integers(1, 10**6)), min_size=1, max_size=6
)


@given(steps_of, st.integers(1, 10**7), st.integers(1, 10**7))
def test_bytes_rise_and_room_is_their_inverse(rows: list[tuple[int, int, int]], one: int, other: int) -> None:
    points = tuple(point(n, 1.0, peak, counted) for n, (_, peak, counted) in enumerate(rows, 1))
    curve = StepCurve((0,), 10**7, points)
    low, high = sorted((one, other))
    assert measured_bytes(curve, low) <= measured_bytes(curve, high)
    assert all(measured_bytes(curve, p.counted) >= p.peak for p in points), "never below what was measured"
    room = capacity_of(curve, device(float(one)))
    assert measured_bytes(curve, room) <= one
    assert measured_bytes(curve, room * (1 + 1e-9) + 1) >= one


def devices(*speeds: float, memory: float = 1e12) -> tuple[Device, ...]:
    return tuple(Device(f"d{n}", {"default": s * 1e9}, memory, s * 1e9, 1e-6) for n, s in enumerate(speeds))


def theory_of(rows: int) -> Theory:
    return derive(graph(rows))


@cache
def counted_alone(rows: int, layers: int = 2) -> int:
    plan = synthesize(Body(layers=layers), {"x": torch.zeros(rows, WIDTH)}, Cluster(devices(1.0)))
    return plan.cost.memory_bytes[0]


def measured(own: tuple[Device, ...], *curves: StepCurve, layers: int = 2) -> Cluster:
    found = identity(graph(8, model=Body(layers=layers)), ROWS)
    assert found is not None
    steps = (ModelSteps(found, "body", ROWS, "adamw", curves),)
    return Cluster(own, Network(1e9, 1e-6), steps=steps)


def curve_of(
    rank: int, seconds: Callable[[int], float], over: int | None = None, layers: int = 2
) -> StepCurve:
    rows = [r for r in (1, 2, 4, 8, 16, 32, 64) if over is None or r < over]
    rows = sorted({*rows, *(() if over is None else (over - 1,))})
    points = tuple(point(r, seconds(r), counted_alone(r, layers), counted_alone(r, layers)) for r in rows)
    return StepCurve((rank,), 10**12, points, None if over is None else (over, counted_alone(over, layers)))


def modelled(cluster: Cluster, rows: int, of: int) -> np.ndarray:
    """Seconds of each device for ``rows`` of a batch of ``of``, by the ops of a data parallel step, added up."""
    theory = theory_of(of)
    model = CostModel(theory, Cluster(cluster.devices, cluster.network))
    axis = theory.axes.axis(theory.graph.inputs[0].tensor, 0)
    assert axis is not None
    total = np.zeros(cluster.world)
    shares = model.even_shares(np.full(cluster.world, rows / of))
    for instruction, of_rows in enumerate(theory.row_axes):
        row = of_rows.index(axis.id) if axis.id in of_rows else 0
        total += model.seconds(np.array([model.signature(instruction, row)]), shares)[0]
    return total


def test_the_pace_is_what_was_measured_over_what_the_ops_say() -> None:
    """Two devices with unlike curves, and one without: the rows at which all take equally long, and the seconds
    there are those that were measured."""
    rows = 24
    own = devices(1.0, 1.0, 1.0)
    cluster = measured(own, curve_of(0, lambda r: 1e-5 * r), curve_of(1, lambda r: 5e-5 + 5e-6 * r))
    model = CostModel(theory_of(rows), cluster)
    found = model.measured
    assert found is not None
    assert sum(found.turn) == pytest.approx(rows, rel=1e-6)
    taken = [1e-5 * found.turn[0], 5e-5 + 5e-6 * found.turn[1]]
    assert taken[0] == pytest.approx(taken[1], rel=1e-6)
    for rank in (0, 1):
        below, above = int(found.turn[rank]), int(found.turn[rank]) + 1
        low, high = (modelled(cluster, n, rows)[rank] for n in (below, above))
        assert taken[rank] / high <= found.pace[rank] * (1 + 1e-9)
        assert found.pace[rank] <= taken[rank] / low * (1 + 1e-9)
    assert found.pace[2] == 1.0
    plain = CostModel(model.theory, Cluster(own, cluster.network))
    every = np.arange(len(model.triples.flops))
    shares = plain.even_shares(np.array([0.2, 0.3, 0.5]))
    assert model.seconds(every, shares) == pytest.approx(plain.seconds(every, shares) * np.array(found.pace))
    assert len(set(plain.kinds.tolist())) == 1
    assert len(set(model.kinds.tolist())) == 3, "what was equal no longer is"


def test_a_device_with_steps_twice_as_slow_gets_half_of_the_rows() -> None:
    """By their ops the devices are equal; whole steps say otherwise. Both know FLOPs alone."""
    own = (Device("d", {"default": 1e9}, launch=1e-12),) * 2
    rows = 48
    cluster = measured(own, curve_of(0, lambda r: 0.1 * r), curve_of(1, lambda r: 0.2 * r))
    example = {"x": torch.zeros(rows, WIDTH)}
    plan = synthesize(Body(), example, cluster)
    plain = synthesize(Body(), example, Cluster(own, cluster.network))
    axis = plan.theory.axes.axis(plan.graph.inputs[0].tensor, 0)
    assert axis is not None
    assert plain.lengths.units[axis.id] == (24, 24)
    assert plan.lengths.units[axis.id] == (32, 16)
    assert plan.cost.step_seconds == pytest.approx(3.2, rel=0.15), (
        "about as long as 32 rows were measured to take"
    )
    assert "Measured steps (body)" in plan_text(plan)
    assert plan_json(plan)["measured_steps"]["pace"] == list(plan.costs.measured.pace)
    again = synthesize(Body(), example, Cluster.from_text(cluster.to_text()))
    assert again.to_json() == plan.to_json()
    assert Plan.from_json(plan.to_json()).costs.measured == plan.costs.measured


def data_parallel_rows(cluster: Cluster, rows: int) -> tuple[int, ...]:
    """The rows of each device in the best data parallel plan."""
    theory = theory_of(rows)
    constraints = {f"layers.*.{what}": "replicated" for what in ("weight", "bias")}
    plan = synthesize(
        Body(), {"x": torch.zeros(rows, WIDTH)}, cluster, constraints={**constraints, "x": "shard(0)"}
    )
    axis = theory.axes.axis(theory.graph.inputs[0].tensor, 0)
    assert axis is not None
    return plan.lengths.units[axis.id]


def test_the_limit_of_rows_bounds_the_lengths() -> None:
    """The fast device would take nearly all rows, and its steps were seen to hold 40."""
    own = devices(8.0, 1.0)
    free = measured(own, curve_of(0, lambda r: 0.01 * r), curve_of(1, lambda r: 0.1 * r))
    bound = measured(own, curve_of(0, lambda r: 0.01 * r, over=41), curve_of(1, lambda r: 0.1 * r))
    assert data_parallel_rows(free, 64)[0] > 52
    fast, slow = data_parallel_rows(bound, 64)
    assert fast + slow == 64
    assert 30 <= fast <= 40


def test_the_limit_of_rows_asks_for_micro_batches() -> None:
    own, deep = devices(1.0), 12
    cluster = measured(own, curve_of(0, lambda r: 0.01 * r, over=257, layers=deep), layers=deep)
    example = {"x": torch.zeros(1024, WIDTH)}
    with pytest.raises(MemoryLimitError):
        synthesize(Body(layers=deep), example, cluster)
    plan = synthesize(Body(layers=deep), example, cluster, micro_batches="auto")
    assert plan.micro_batches in (4, 8), "no more than 256 rows at a time"
    assert plan.costs.measured is not None
    assert plan.costs.measured.turn == pytest.approx((1024 / plan.micro_batches,))
    assert plan.cost.step_seconds == pytest.approx(0.01 * 1024, rel=0.1), (
        "all turns of the device, with one step of the optimizer"
    )
    assert synthesize(Body(layers=deep), {"x": torch.zeros(256, WIDTH)}, cluster).cost.memory_bytes[0] > 0
    with pytest.raises(MemoryLimitError):
        synthesize(Body(layers=deep), {"x": torch.zeros(257, WIDTH)}, cluster)


def test_the_peak_of_a_plan_is_the_measured_one() -> None:
    plain = curve_of(0, lambda r: 0.01 * r)
    points = tuple(replace(p, peak=p.counted + 5000 + 100 * p.rows) for p in plain.points)
    cluster = measured(devices(1.0), replace(plain, points=points))
    for p in points[1:]:
        plan = synthesize(Body(), {"x": torch.zeros(p.rows, WIDTH)}, cluster)
        assert plan.cost.memory_bytes == (p.peak,)
        assert "needs" not in plan_text(plan)
    own = devices(1.0, memory=float(points[3].peak))
    tight = measured(own, replace(plain, points=points))
    assert synthesize(Body(), {"x": torch.zeros(8, WIDTH)}, tight).cost.memory_bytes == (points[3].peak,)
    with pytest.raises(MemoryLimitError):
        synthesize(Body(), {"x": torch.zeros(9, WIDTH)}, tight)


def test_another_model_is_planned_as_without_curves() -> None:
    own = devices(1.0, 1.0)
    cluster = measured(own, curve_of(0, lambda r: 0.1 * r), curve_of(1, lambda r: 0.2 * r, over=5))
    example = {"x": torch.zeros(24, WIDTH)}
    plan = synthesize(Body(layers=3), example, cluster)
    plain = synthesize(Body(layers=3), example, Cluster(own, cluster.network))
    assert plan.costs.measured is None
    assert replace(plan, cluster=plain.cluster).to_json() == plain.to_json()
    assert "Measured steps of body are not of this model" in plan_text(plan)
    assert plan_json(plan)["measured_steps"] is None
    assert "measured_steps" not in plan_json(plain)
    evaluated = compile_plan(Body(), (), example, cluster, CompileOptions(), training=False)
    assert evaluated.costs.measured is None, "steps were trained"


def test_bounds_stay_bounds() -> None:
    """No data parallel program at any shares is below the model's bound."""
    cluster = measured(
        devices(1.0, 2.0), curve_of(0, lambda r: 0.1 + 0.1 * r), curve_of(1, lambda r: 0.03 * r)
    )
    theory = theory_of(8)
    bound = CostModel(theory, cluster).lower_bound()
    assert bound > 0
    for first in range(9):
        ratios = (first / 8, 1 - first / 8)
        plan = plan_for(theory, cluster, data_parallel(theory), ratios)
        assert plan.lengths == lengths_for(theory.axes, (ratios,))
        assert plan.cost.stage_seconds >= bound * (1 - 1e-9)


def test_idle_devices_hold_nothing() -> None:
    fast, slow = curve_of(0, lambda r: 1e-6 * r), curve_of(1, lambda r: 10.0 * r)
    plan = synthesize(Body(), {"x": torch.zeros(8, WIDTH)}, measured(devices(1.0, 1.0), fast, slow))
    assert plan.active == (0,)
    assert plan.cost.memory_bytes[1] == 0
    assert plan.cost.memory_bytes[0] == next(p.peak for p in fast.points if p.rows == 8)
