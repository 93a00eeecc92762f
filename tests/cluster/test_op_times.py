"""Measured op times: keys, the file's part, and how they stand in place of the roofline."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from cost_graphs import Builder, cluster, data_parallel, mlp
from hypothesis import given
from hypothesis import strategies as st

from hetspmd.cluster.cluster import Cluster
from hetspmd.cluster.curves import MeasuredFigures, read_measured
from hetspmd.cluster.devices import PASSES, Device, Network
from hetspmd.cluster.file import read_object
from hetspmd.cluster.op_times import OpFit, OpTime, OpTimes
from hetspmd.codec.records import decode, encode
from hetspmd.cost.model import CostModel
from hetspmd.cost.op_keys import VIEW_KEY, dense_strides, memory_orders
from hetspmd.cost.signatures import row_keys
from hetspmd.cost.step import Stages, StepModel
from hetspmd.errors import ClusterError
from hetspmd.program.lengths import lengths_for
from hetspmd.ratios.ratios import Problem, optimise_ratios
from hetspmd.ratios.sensitivity import sensitivities
from hetspmd.rules.theory import Theory, derive
from hetspmd.trace.graph import SECOND_READ
from hetspmd.trace.trace import trace

LAUNCH = 1e-6


def product() -> Theory:
    """c[40, 30] = a[40, 20] w[20, 30] in float32, w not trained."""
    b = Builder()
    a, w = b.input("a", (40, 20)), b.parameter("w", (20, 30))
    b.mm("c", "mk,kn->mn", a, w, {"m": 40, "k": 20, "n": 30})
    return b.theory(None, {})


def key(theory: Theory, instruction: int, name: str) -> str:
    rows = [r.name for r in theory.rows[instruction]]
    return row_keys(theory)[instruction][rows.index(name)]


def with_ops(base: Cluster, *times: OpTime, ranks: tuple[int, ...] = (0,)) -> Cluster:
    return Cluster(base.devices, base.network, base.curves, (OpTimes(ranks, times),))


def test_keys_are_of_the_call_alone() -> None:
    theory = product()
    whole, m, k = key(theory, 2, "always"), key(theory, 2, "m"), key(theory, 2, "k")
    assert whole == "test.op.default(float32[40,20], float32[20,30]) -> float32[40,30]"
    assert m == "test.op.default(float32[40/40,20], float32[20,30]) -> float32[40/40,30]"
    assert k == "test.op.default(float32[40,20/20], float32[20/20,30]) -> +float32[40,30]"
    assert key(theory, 2, "linear(0)") == whole
    assert row_keys(theory)[1] == (), "a parameter that is not trained costs nothing"
    trained = row_keys(mlp(batch=32, width=8, hidden=16))
    assert "optimizer(float32[8,16])" in trained[2]
    assert "optimizer(float32[8/8,16])" in trained[2]


def test_keys_know_memory_order_and_repeats() -> None:
    import torch
    from torch import nn

    import hetspmd.rules.ops  # noqa: F401  # registers the rules

    class Turned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.zeros(6, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x @ self.w.t()
            return (y * y).sum() + (x.unsqueeze(0).expand(3, 5, 4) + 1.0).transpose(0, 1).contiguous().sum()

    theory = derive(trace(Turned(), (), {"x": torch.ones(5, 4)}))
    keys = {k for of_rows in row_keys(theory) for k in of_rows}
    assert "aten.mm.default(float32[5,4], float32[4,6]{1,0}) -> float32[5,6]" in keys
    assert any(k.startswith("aten.mul.Tensor(float32[5,6], =0)") for k in keys)
    orders = memory_orders(theory)
    assert (1, 2) in orders, "the expanded dim has no place in memory"
    assert len(orders) == len(theory.graph.tensors)


def test_strides_follow_the_order() -> None:
    assert dense_strides((2, 3, 4), None) == ((12, 4, 1), 24)
    assert dense_strides((2, 3, 4), (2, 0, 1)) == ((3, 1, 6), 24)
    assert dense_strides((2, 3, 4), (1, 2)) == ((0, 4, 1), 12)
    assert dense_strides((5, 1), None) == ((1, 1), 5)


def test_a_measured_line_takes_the_roofline_s_place() -> None:
    theory = product()
    m = OpTime(key(theory, 2, "m"), 2e-5, 3e-4)
    base = cluster(1e9, 4e9, memory_bandwidth=1e8)
    model, plain = CostModel(theory, with_ops(base, m)), CostModel(theory, base)
    lengths = lengths_for(theory.axes, (0.25, 0.75))
    row = [r.name for r in theory.rows[2]].index("m")
    found, before = model.row_seconds(2, row, lengths), plain.row_seconds(2, row, lengths)
    assert found[0] == pytest.approx(2e-5 + 0.25 * 3e-4)
    assert found[1] == before[1], "device 1 was not measured"
    for other in range(len(theory.rows[2])):
        if theory.rows[2][other].name != "m":
            assert model.row_seconds(2, other, lengths) == plain.row_seconds(2, other, lengths)
    assert plain.alone()[0] == model.alone()[0], "the whole call was not measured"


def test_rows_of_a_measured_call_compare() -> None:
    """Where only the whole call was measured, the roofline of its rows is scaled to meet it."""
    theory = product()
    base = cluster(1e9, 1e9, memory_bandwidth=1e8, launch=LAUNCH)
    whole = 5e-4
    model = CostModel(theory, with_ops(base, OpTime(key(theory, 2, "always"), whole, 0.0)))
    a, b, c = 3200, 2400, 4800
    scale = (whole - LAUNCH) / ((a + b + c) / 1e8)
    names = [r.name for r in theory.rows[2]]
    signatures = np.array([model.signature(2, names.index(n)) for n in ("always", "linear(0)", "m")])
    found = model.seconds(signatures, model.even_shares((0.5, 0.5)))[:, 0]
    assert found == pytest.approx([whole, whole, scale * (0.5 * (a + c) + b) / 1e8 + LAUNCH])


def test_a_lone_device_runs_every_row_whole() -> None:
    theory = product()
    base = cluster(1e9, memory_bandwidth=1e8, launch=LAUNCH)
    lines = (OpTime(key(theory, 2, "always"), 5e-4, 0.0), OpTime(key(theory, 2, "m"), 1e-5, 1e-4))
    model = CostModel(theory, with_ops(base, *lines))
    rows = np.array([model.signature(2, row) for row in range(len(theory.rows[2]))])
    assert model.seconds(rows, model.even_shares((1.0,))) == pytest.approx(5e-4)


def test_views_cost_their_calls_where_they_were_measured() -> None:
    import torch
    from torch import nn

    import hetspmd.rules.ops  # noqa: F401  # registers the rules

    class Viewed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.zeros(6, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x @ self.w.t()).view(30).sum()

    theory = derive(trace(Viewed(), (), {"x": torch.ones(5, 4)}))
    views = [i.id for i in theory.graph.instructions if VIEW_KEY in row_keys(theory)[i.id]]
    ops = {theory.graph.instructions[v].op for v in views}
    assert {"aten.t.default", "aten.view.default"} <= ops
    assert SECOND_READ not in ops
    base = cluster(1e9, 4e9, memory_bandwidth=1e8, launch=LAUNCH)
    plain = CostModel(theory, base)
    seconds = 3e-6
    model = CostModel(theory, with_ops(base, OpTime(VIEW_KEY, seconds, 0.0)))
    lengths = lengths_for(theory.axes, (0.25, 0.75))
    proportional = model.even_shares(model.speeds() / model.speeds().sum())
    for view in views:
        for row in range(len(theory.rows[view])):
            assert plain.row_seconds(view, row, lengths) == (0.0, 0.0)
            assert model.row_seconds(view, row, lengths) == (seconds, 0.0), "device 1 was not measured"
            slope, constant = model.supports(np.array([model.signature(view, row)]), proportional)
            assert (slope[0].tolist(), constant[0].tolist()) == ([0.0, 0.0], [seconds, 0.0])
    both = CostModel(theory, with_ops(base, OpTime(VIEW_KEY, seconds, 0.0), ranks=(0, 1)))
    empty = lengths_for(theory.axes, (0.0, 1.0))
    rows = theory.row_axes[views[0]]
    cut = next(r for r, axis in enumerate(rows) if axis is not None)
    assert both.row_seconds(views[0], cut, empty) == (0.0, seconds), "nothing to view"
    free = plain.free(np.arange(len(plain.triples.flops)))
    assert free.sum() > both.free(np.arange(len(both.triples.flops))).sum()
    assert both.alone() == pytest.approx(plain.alone() + len(views) * seconds)


def test_the_optimizer_s_step_per_stored_form() -> None:
    theory = mlp(batch=32, width=8, hidden=16)
    devices = (
        Device("a", {"default": 1e9}, memory_bandwidth=1e6, launch=LAUNCH),
        Device("b", {"default": 1e9}, memory_bandwidth=1e6, launch=LAUNCH, optimizer=1e3),
    )
    model = CostModel(theory, Cluster(devices, Network(1e9)))
    lengths = lengths_for(theory.axes, (0.25, 0.75))
    u = theory.graph.producers[theory.graph.parameters[0].tensor]
    assert theory.rows[u][0].post == (0,)
    assert model.row_seconds(u, 0, lengths) == pytest.approx(
        (PASSES * 512 / 1e6 + LAUNCH, 512 / 1e3 + LAUNCH)
    )
    assert model.row_seconds(u, 1, lengths) == pytest.approx(
        (0.25 * PASSES * 512 / 1e6 + LAUNCH, 0.75 * 512 / 1e3 + LAUNCH)
    )
    step = OpTime("optimizer(float32[8/8,16])", 1e-5, 2e-3)
    timed = CostModel(theory, with_ops(Cluster(devices, Network(1e9)), step))
    row = row_keys(theory)[u].index(step.key)
    assert timed.row_seconds(u, row, lengths)[0] == pytest.approx(1e-5 + 0.25 * 2e-3)


def everything_timed(theory: Theory, world: int, seed: int) -> tuple[OpTimes, ...]:
    """Random lines for two in three of all keys, others for each rank."""
    dice = np.random.default_rng(seed)
    keys = sorted({k for of_rows in row_keys(theory) for k in of_rows})
    found = []
    for rank in range(world):
        chosen = [k for k in keys if dice.random() < 2 / 3]
        lines = tuple(OpTime(k, *(10 ** dice.uniform(-7, -3, 2)).tolist()) for k in chosen)
        found.append(OpTimes((rank,), lines))
    return tuple(found)


@given(st.integers(0, 10**6), st.integers(0, 40))
def test_lines_support_measured_seconds(seed: int, at: int) -> None:
    theory = mlp(batch=32, width=8, hidden=16)
    base = cluster(1e9, 4e9, memory_bandwidth=1e9)
    model = CostModel(theory, Cluster(base.devices, base.network, (), everything_timed(theory, 2, seed)))
    every = np.arange(len(model.triples.flops))
    ratios = np.array((at / 40, 1 - at / 40))
    slope, constant = model.supports(every, model.even_shares(ratios))
    assert (slope >= 0).all()
    assert (constant >= 0).all()
    sharded = model.triples.axis < len(theory.axes.axes)
    for share in (1e-9, 0.1, float(ratios[0]), 0.5, 1.0):
        here = np.array((share, 1 - share))
        line = constant + slope * np.where(sharded[:, None], here, 0.0)
        exact = model.seconds(every, model.even_shares(here))
        busy = exact > 0
        assert (line <= exact * (1 + 1e-9))[busy].all()
        if share == ratios[0]:
            assert line[busy] == pytest.approx(exact[busy])


@given(st.integers(0, 10**6))
def test_sums_floors_and_permutations_agree(seed: int) -> None:
    theory = mlp(batch=32, width=8, hidden=16)
    base = cluster(1e9, 4e9, 2e9, memory_bandwidth=1e9)
    ops = everything_timed(theory, 3, seed)
    whole = Cluster(base.devices, base.network, (), ops)
    model = CostModel(theory, whole)
    order = (2, 0, 1)
    turned = CostModel(theory, whole.part(order))
    every = np.arange(len(model.triples.flops))
    shares = np.array((0.5, 0.2, 0.3))
    assert np.array_equal(
        turned.seconds(every, turned.even_shares(shares[list(order)])),
        model.seconds(every, model.even_shares(shares))[:, list(order)],
    )
    ones = model.even_shares(np.ones(3))
    first = model.triples.signature[model.triples.offset[:-1]]
    assert model.alone() == pytest.approx(model.seconds(first, ones).sum(axis=0))
    # No choice of rows, each at any ratios, is below the bound.
    for ratios in ((0.5, 0.2, 0.3), (0.0, 1.0, 0.0), (0.1, 0.6, 0.3)):
        costs = model.row_costs(lengths_for(theory.axes, ratios))
        assert model.lower_bound() <= sum(float(np.min(c)) for c in costs) * (1 + 1e-9)


def test_ratios_and_sensitivities_follow_measured_ops() -> None:
    """Equal devices in the file, of which one was measured to be three times as fast."""
    theory = mlp(batch=64, width=32, hidden=64)
    base = Cluster((Device("d", {"default": 1e9}, launch=1e-12),) * 2, Network(1e12, 1e-9))
    keys = sorted({k for of_rows in row_keys(theory) for k in of_rows if not k.startswith("optimizer")})
    slow = tuple(OpTime(k, 0.0, 3e-3) for k in keys)
    fast = tuple(OpTime(k, 0.0, 1e-3) for k in keys)
    measured = Cluster(base.devices, base.network, (), (OpTimes((0,), slow), OpTimes((1,), fast)))
    model, dp = CostModel(theory, measured), data_parallel(theory)
    assert optimise_ratios(theory, model, dp) == pytest.approx((0.25, 0.75), abs=1e-6)
    assert Problem(Stages(model, dp), np.full(2, np.inf)).kinds == ((0,), (1,))
    found = sensitivities(model, dp, (0.25, 0.75))
    assert sum(
        s.elasticity * (1 if s.quantity in ("launch", "latency") else -1) for s in found
    ) == pytest.approx(1)
    by_flops = [s for s in found if s.quantity == "flops"]
    assert {s.ranks for s in by_flops} == {(0,), (1,)}
    assert all(s.gain is not None and s.gain > 0.01 for s in by_flops), "what was measured follows"
    lengths = lengths_for(theory.axes, (0.25, 0.75))
    assert StepModel(model, dp).cost(lengths).compute_seconds == pytest.approx(8 * 0.75e-3, rel=1e-3)


def test_the_file_round_trips() -> None:
    times = (OpTime("a", 1e-5, 0.0), OpTime("b", 0.0, 2e-3))
    made = Cluster((Device("d", {"default": 1e9}),) * 3, Network(1e9), (), (OpTimes((0, 2), times),))
    assert Cluster.from_text(made.to_text()) == made
    assert decode(encode(made), Cluster) == made
    assert str(made).endswith("measured times of 2 ops")
    assert made.part((1, 2)).ops == (OpTimes((1,), times),)
    assert made.part((1,)).ops == ()
    fits = (OpFit(times[0], 0.1, ((1.0, 1e-5),)), OpFit(times[1], 0.02, ((0.25, 5e-4), (1.0, 2e-3))))
    whole = MeasuredFigures(ops=(((0, 2), fits),))
    assert read_measured(read_object(whole.to_dict()), 3) == whole


@pytest.mark.parametrize(
    ("ops", "message"),
    [
        (3, "ops is 3; write a list"),
        ([{"ranks": [0]}], "lacks the key 'times'"),
        ([{"ranks": [7], "times": []}], "measured ops of rank 7; the cluster has 2 devices"),
        ([{"ranks": [0, 0], "times": []}], "measured ops of rank 0 stand twice"),
        (
            [{"ranks": [0], "times": [["a", 1, 1, 0], ["a", 1, 1, 0]]}],
            "measured op a stands twice for ranks [0]",
        ),
        ([{"ranks": [0], "times": [["a", 1]]}], "an op has 2 entries; write key, constant, slope, error"),
        ([{"ranks": [0], "times": [["a", 1, 1, 0, 0.5]]}], "an op has 5 entries"),
        ([{"ranks": [0], "times": [["a", -1, 1, 0]]}], "constant is -1; write a non-negative number"),
        ([{"ranks": [0], "times": [["a", 0, 0, 0]]}], "measured op a takes no time; profile again"),
        ([{"ranks": [0], "times": [["a", 1, 1, 0, 0.5, 0]]}], "a point is 0; write a positive number"),
    ],
)
def test_mistakes_are_named(ops: Any, message: str) -> None:
    spec = {"devices": [{"flops": 1, "count": 2}], "network": {"bandwidth": 1}}
    with pytest.raises(ClusterError) as caught:
        Cluster.load({**spec, "measured": {"version": 1, "ops": ops}})
    assert message in str(caught.value)
    assert str(caught.value).startswith("cluster['measured']['ops']")


def test_an_op_time_is_finite() -> None:
    with pytest.raises(ClusterError, match="slope is inf"):
        OpTime("a", 0.0, math.inf)
