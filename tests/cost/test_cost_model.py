"""Seconds of triples and collectives against formulas worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest
from cost_graphs import Builder, cluster, mlp
from hypothesis import given
from hypothesis import strategies as st

from hetspmd.cost.model import CostModel
from hetspmd.placement import PARTIAL, REPLICATE, shard
from hetspmd.program.lengths import Lengths, lengths_for
from hetspmd.program.program import communications
from hetspmd.rules.theory import Theory

S0, S1 = shard(0), shard(1)
LATENCY, BANDWIDTH, LAUNCH = 1e-5, 1e9, 1e-6


def product() -> Theory:
    """c[40, 30] = a[40, 20] b[20, 30] in float32: 48,000 FLOPs; 3,200 + 2,400 + 4,800 bytes."""
    b = Builder()
    a, w = b.input("a", (40, 20)), b.parameter("w", (20, 30))
    b.mm("c", "mk,kn->mn", a, w, {"m": 40, "k": 20, "n": 30})
    return b.theory(None, {})


def row(theory: Theory, instruction: int, name: str) -> int:
    return [r.name for r in theory.rows[instruction]].index(name)


def units(theory: Theory, *counts: int) -> Lengths:
    """Every axis divided in the proportion of counts."""
    total = sum(counts)
    return Lengths(len(counts), tuple(tuple(c * a.units // total for c in counts) for a in theory.axes.axes))


def test_rows_by_hand() -> None:
    theory = product()
    model = CostModel(theory, cluster(1e9, 4e9, memory_bandwidth=1e8))
    lengths = Lengths(2, tuple((3 * a.units // 5, 2 * a.units // 5) for a in theory.axes.axes))
    a, b, c = 3200, 2400, 4800  # bytes; the op has 48,000 FLOPs
    always = model.row_seconds(2, 0, lengths)
    assert always == pytest.approx((max(48e-6, (a + b + c) / 1e8) + LAUNCH, (a + b + c) / 1e8 + LAUNCH))
    m = model.row_seconds(2, row(theory, 2, "m"), lengths)
    assert m == pytest.approx(((0.6 * (a + c) + b) / 1e8 + LAUNCH, (0.4 * (a + c) + b) / 1e8 + LAUNCH))
    k = model.row_seconds(2, row(theory, 2, "k"), lengths)
    assert k == pytest.approx(((0.6 * (a + b) + c) / 1e8 + LAUNCH, (0.4 * (a + b) + c) / 1e8 + LAUNCH))
    linear = model.row_seconds(2, row(theory, 2, "linear(0)"), lengths)
    assert linear == pytest.approx(always)
    fast = CostModel(theory, cluster(1e9, 4e9, memory_bandwidth=1e12))
    assert fast.row_seconds(2, row(theory, 2, "n"), lengths) == pytest.approx(
        (28.8e-6 + LAUNCH, 4.8e-6 + LAUNCH)
    )
    assert model.row_seconds(0, 0, lengths) == (0.0, 0.0)
    assert [float(x) for x in fast.row_costs(lengths)[2]] == pytest.approx(
        [max(fast.row_seconds(2, r, lengths)) for r in range(len(theory.rows[2]))]
    )


def test_a_device_without_units_does_no_work() -> None:
    theory = product()
    model = CostModel(theory, cluster(1e9, 1e9))
    lengths = Lengths(2, tuple((a.units, 0) for a in theory.axes.axes))
    assert model.row_seconds(2, row(theory, 2, "m"), lengths) == pytest.approx((48e-6 + LAUNCH, 0.0))
    assert model.row_seconds(2, 0, lengths) == pytest.approx((48e-6 + LAUNCH,) * 2)


def test_views_are_free_and_a_tensor_read_twice_counts_once() -> None:
    b = Builder()
    x = b.input("x", (8, 4))
    b.op("v", "ab->ba", (x,), {"a": 8, "b": 4}, alias=True)
    b.op("s", "ab,ab->ab", (x, x), {"a": 8, "b": 4})
    theory = b.theory(None, {})
    model = CostModel(theory, cluster(1e9, 1e9, memory_bandwidth=1e6))
    lengths = units(theory, 1, 1)
    assert model.row_seconds(1, 0, lengths) == (0.0, 0.0)
    assert model.row_seconds(2, 0, lengths) == pytest.approx((256e-6 + LAUNCH,) * 2)


def test_a_lookup_reads_what_it_writes() -> None:
    b = Builder()
    w, i = b.parameter("w", (1000, 4)), b.input("i", (10,), "int64")
    b.op("e", "vd,b->bd", (w, i), {"v": 1000, "d": 4, "b": 10}, op="aten.embedding.default")
    theory = b.theory(None, {})
    model = CostModel(theory, cluster(1e9, 1e9, memory_bandwidth=1e6))
    lengths = units(theory, 1, 1)
    assert model.row_seconds(2, 0, lengths) == pytest.approx((400e-6 + LAUNCH,) * 2)  # 160 + 80 + 160 bytes
    assert model.row_seconds(2, row(theory, 2, "b"), lengths) == pytest.approx((200e-6 + LAUNCH,) * 2)
    assert model.row_seconds(2, row(theory, 2, "v"), lengths) == pytest.approx((400e-6 + LAUNCH,) * 2)


def test_rates_follow_the_dtype() -> None:
    b = Builder()
    x = b.input("x", (8, 8), "bfloat16")
    b.mm("y", "mk,kn->mn", x, x, {"m": 8, "k": 8, "n": 8}, dtype="bfloat16")
    theory = b.theory(None, {})
    from hetspmd.cluster.cluster import Cluster
    from hetspmd.cluster.devices import Device

    model = CostModel(theory, Cluster((Device("d", {"bfloat16": 4e6, "default": 1e6}, launch=LAUNCH),)))
    assert model.dominant_dtype() == "bfloat16"
    assert model.row_seconds(1, 0, units(theory, 1)) == pytest.approx((1024 / 4e6 + LAUNCH,))


@given(st.lists(st.floats(1e6, 1e12), min_size=2, max_size=2), st.floats(1e5, 1e12), st.integers(0, 40))
def test_lines_support_the_seconds(rates: list[float], bandwidth: float, at: int) -> None:
    theory = product()
    model = CostModel(theory, cluster(*rates, memory_bandwidth=bandwidth))
    ratios = (at / 40, 1 - at / 40)
    for r in range(len(theory.rows[2])):
        signature = np.array([model.signature(2, r)])
        (slope,), (constant,) = model.supports(signature, model.even_shares(ratios))
        for share in (1e-9, 0.1, ratios[0], 0.5, 0.9, 1.0):
            here = (share, 1 - share)
            exact = model.seconds(signature, model.even_shares(here))[0]
            for j in range(2):
                line = constant[j] + slope[j] * here[j]
                if here[j] > 0:
                    assert line <= exact[j] * (1 + 1e-9)
                    if here == ratios:
                        assert line == pytest.approx(exact[j])


def test_collectives_by_hand() -> None:
    theory = product()
    model = CostModel(theory, cluster(1e9, 1e9, 1e9, 1e9))
    lengths = Lengths(4, tuple((a.units // 2, a.units // 2, 0, 0) for a in theory.axes.axes))
    c, nbytes = 2, 4800
    assert theory.graph.tensors[c].nbytes == nbytes

    def move(source: int, target: int, kind: str) -> float:
        return model.move_seconds(c, source, target, kind, lengths)

    assert move(PARTIAL, REPLICATE, "all_reduce") == pytest.approx(2 * LATENCY + 1.5 * nbytes / BANDWIDTH)
    assert move(S0, REPLICATE, "all_gather") == pytest.approx(LATENCY + 3 * 0.5 * nbytes / BANDWIDTH)
    assert move(PARTIAL, S1, "reduce_scatter") == pytest.approx(LATENCY + 3 * 0.5 * nbytes / BANDWIDTH)
    assert move(S0, REPLICATE, "grouped_broadcast") == pytest.approx(2 * LATENCY + nbytes / BANDWIDTH)
    assert move(PARTIAL, S0, "grouped_reduce") == pytest.approx(2 * LATENCY + nbytes / BANDWIDTH)
    assert move(S0, S1, "all_to_all") == pytest.approx(LATENCY + 0.25 * nbytes / BANDWIDTH)


def test_all_to_all_between_unlike_divisions() -> None:
    theory = product()
    model = CostModel(theory, cluster(1e9, 1e9, bandwidth=1.0, latency=1e-9))
    by_axis = {theory.axes.of[2, 0]: (40, 0), theory.axes.of[2, 1]: (10, 20)}
    lengths = Lengths(2, tuple(by_axis.get(a.id, (a.units, 0)) for a in theory.axes.axes))
    assert model.move_seconds(2, S0, S1, "all_to_all", lengths) == pytest.approx(4800 * 2 / 3)
    assert model.move_seconds(2, S1, S0, "all_to_all", lengths) == pytest.approx(4800 * 2 / 3)


def test_one_device_communicates_for_nothing() -> None:
    theory = product()
    model = CostModel(theory, cluster(1e9))
    moves = communications((0, 1), summable=True)
    assert model.move_costs(2, moves, units(theory, 1)) == [0.0] * len(moves)


@given(st.lists(st.floats(0, 1), min_size=3, max_size=3).filter(lambda r: sum(r) > 0.1))
def test_linear_forms_agree_with_move_costs(ratios: list[float]) -> None:
    theory = product()
    model = CostModel(theory, cluster(1e9, 1e9, 1e9))
    lengths = lengths_for(theory.axes, ratios)
    moves = communications((0, 1), summable=True)
    found = [model.form_seconds(model.move_form(2, s, t, k), model.shares(lengths)) for s, t, k in moves]
    assert model.move_costs(2, moves, lengths) == pytest.approx(found)
    assert min(found) >= LATENCY


def test_misuse() -> None:
    theory = product()
    model = CostModel(theory, cluster(1e9, 1e9))
    with pytest.raises(ValueError, match="lengths of"):
        model.row_costs(Lengths(3, ()))
    with pytest.raises(ValueError, match="never sharded"):
        model.move_form(0, shard(5), REPLICATE, "all_gather")
    with pytest.raises(ValueError, match="no triple of instruction 0"):
        model.row_index(0, theory.rows[2][1])


def test_the_whole_step_on_each_device() -> None:
    theory = mlp(batch=32, width=8, hidden=16)
    model = CostModel(theory, cluster(1e6, 2e6, launch=1e-9))
    total = sum(rule.flops for rule in theory.rules.values())
    assert total == 5 * 2 * 32 * 8 * 16 + 2 * 32 * 16 + 32 * 8
    step = 20 * 2 * 4 * 8 * 16 / 1e11 + 10 * 1e-9  # of the optimizer on two parameters; and 10 launches
    assert model.alone() == pytest.approx([total / 1e6 + step, total / 2e6 + step], rel=1e-9)
