"""The ``measured:`` part of a cluster file: what is read, refused, interpolated, and used by the cost model."""

from __future__ import annotations

from typing import Any, get_args

import pytest
from cost_graphs import Builder, cluster

from hetspmd.cluster.cluster import Cluster
from hetspmd.cluster.collective_kinds import KINDS, Kind
from hetspmd.cluster.curves import (
    COLLECTIVES,
    Curve,
    Fit,
    MeasuredFigures,
    Point,
    Rate,
    at_devices,
    curve_for,
    read_measured,
)
from hetspmd.cluster.devices import Device, Network
from hetspmd.cluster.file import read_object
from hetspmd.codec.records import decode, encode
from hetspmd.cost.model import CostModel
from hetspmd.errors import ClusterError
from hetspmd.placement import PARTIAL, REPLICATE, shard
from hetspmd.program.lengths import Lengths
from hetspmd.program.program import Communicate, Compute, Program, Result
from hetspmd.ratios.ratios import optimise_ratios
from hetspmd.rules.theory import Theory

S0, S1 = shard(0), shard(1)
C, NBYTES = 2, 4800


def product() -> Theory:
    """c[40, 30] = a[40, 20] b[20, 30] in float32: 48,000 FLOPs; c has 4,800 bytes."""
    b = Builder()
    a, w = b.input("a", (40, 20)), b.parameter("w", (20, 30))
    b.mm("c", "mk,kn->mn", a, w, {"m": 40, "k": 20, "n": 30})
    return b.theory(None, {})


def curve(kind: Kind, devices: int, *numbers: float) -> Curve:
    return Curve(kind, devices, **dict(zip(KINDS[kind].terms, numbers, strict=False)))


def curves(devices: int) -> tuple[Curve, ...]:
    """Every term of every collective at once, each another number."""
    return tuple(
        curve(kind, devices, *(1e-3 * (10 * k + t + 1) / devices for t in range(len(KINDS[kind].terms))))
        for k, kind in enumerate(COLLECTIVES)
    )


def measured(n: int, *parts: tuple[Curve, ...]) -> Cluster:
    return Cluster(cluster(*([1e9] * n)).devices, Network(1e9), sum(parts, ()))


def test_every_collective_can_be_measured() -> None:
    # A rebalance is an all_to_all.
    assert set(COLLECTIVES) == set(get_args(Kind)) - {"rebalance"}


def test_curves_take_the_place_of_the_network() -> None:
    theory = product()
    assert theory.graph.tensors[C].nbytes == NBYTES
    found = curves(4)
    model = CostModel(theory, measured(4, found, curves(2)))
    lengths = Lengths(4, tuple((a.units // 2, a.units // 2, 0, 0) for a in theory.axes.axes))
    sources = {"partial": PARTIAL, "shard": S0}
    targets = {"replicated": REPLICATE, "shard": S1}
    for of in found:
        source, target = sources[KINDS[of.kind].source], targets[KINDS[of.kind].target]
        want = of.seconds(NBYTES, 2, 0.5, 0.25)
        assert model.move_seconds(C, source, target, of.kind, lengths) == pytest.approx(want, rel=1e-12)
        form = model.move_form(C, source, target, of.kind)
        assert model.form_seconds(form, model.shares(lengths)) == pytest.approx(want, rel=1e-12)


def test_a_collective_without_a_curve_is_priced_by_the_network() -> None:
    theory = product()
    plain = CostModel(theory, measured(2))
    some = CostModel(theory, measured(2, (curve("all_reduce", 2, 7.0, 0.0),)))
    lengths = Lengths(2, tuple((a.units // 2, a.units // 2) for a in theory.axes.axes))
    assert some.move_seconds(C, PARTIAL, REPLICATE, "all_reduce", lengths) == 7.0
    for kind in ("all_gather", "grouped_broadcast"):
        assert some.move_seconds(C, S0, REPLICATE, kind, lengths) == plain.move_seconds(
            C, S0, REPLICATE, kind, lengths
        )
    with pytest.raises(ValueError, match="never sharded"):
        CostModel(theory, measured(2, curves(2))).move_form(0, shard(5), REPLICATE, "all_gather")


def test_a_ring_that_was_not_measured_costs_what_the_grouped_does() -> None:
    theory = product()
    slow = tuple(curve(kind, 2, 3.0, 0.0) for kind in ("grouped_broadcast", "grouped_reduce"))
    ring = (curve("ring_gather", 2, 1.0, 0.0), curve("ring_reduce", 2, 2.0, 0.0))
    lengths = Lengths(2, tuple((a.units // 2, a.units // 2) for a in theory.axes.axes))
    for found, wanted in (((), None), (slow, (3.0, 3.0)), ((*slow, *ring), (1.0, 2.0))):
        model = CostModel(theory, measured(2, found))
        gather = [
            model.move_seconds(C, S0, REPLICATE, k, lengths) for k in ("grouped_broadcast", "ring_gather")
        ]
        reduce = [model.move_seconds(C, PARTIAL, S0, k, lengths) for k in ("grouped_reduce", "ring_reduce")]
        assert (gather[1], reduce[1]) == ((gather[0], reduce[0]) if wanted is None else wanted)


def test_ratios_see_the_curves() -> None:
    """Dear bytes of the largest shard: the linear program cuts more evenly than the speeds say."""
    theory = product()
    fast, slow = Device("fast", {"default": 3e6}, launch=1e-9), Device("slow", {"default": 1e6}, launch=1e-9)
    row = next(r for r in theory.rows[2] if r.post == (S0,))
    free = [next(r for r in theory.rows[i] if r.post == (REPLICATE,)) for i in (0, 1)]
    program = Program(
        (Compute(0, free[0]), Compute(1, free[1]), Compute(2, row), Communicate(C, "all_gather", S0, REPLICATE)),
        None, (Result(C, REPLICATE),), (), (),
    )  # fmt: skip
    ratios = {}
    for name, per_largest in (("cheap", 1e-12), ("dear", 1e-3)):
        made = Cluster((fast, slow), Network(1e9), (curve("all_gather", 2, 1e-6, 0.0, per_largest),))
        ratios[name] = optimise_ratios(theory, CostModel(theory, made), program, (0.5, 0.5))
    assert ratios["cheap"][0] == pytest.approx(0.75, abs=0.01)
    assert ratios["dear"][0] == pytest.approx(0.5, abs=0.01)


def test_between_measured_counts() -> None:
    low, high = curve("all_gather", 2, 1.0, 10.0, 100.0), curve("all_gather", 6, 3.0, 30.0, 500.0)
    only = curve("all_reduce", 6, 5.0, 5.0)
    assert at_devices((high, low, only), 3) == (low, curve("all_gather", 3, 1.5, 15.0, 200.0))
    assert at_devices((high, low, only), 2) == (low,)
    assert at_devices((high, low, only), 1) == ()
    assert at_devices((high, low), 6) == (low, high)
    part = measured(6, (low, high, only)).part((0, 2, 5))
    assert part.curves == (low, curve("all_gather", 3, 1.5, 15.0, 200.0))
    assert measured(6, (low, high, only)).part(range(6)).curves == (low, high, only)


def test_curves_by_size() -> None:
    small = curve("all_reduce", 2, 1.0, 0.0)
    large = Curve("all_reduce", 2, 5.0, above=4000.0)
    larger = Curve("all_reduce", 2, 7.0, above=4800.0)
    theory = product()
    for order in ((small, large, larger), (larger, large, small)):
        model = CostModel(theory, measured(2, order))
        assert model.move_form(C, PARTIAL, REPLICATE, "all_reduce").constant == 5.0
    assert [curve_for((small, large, larger), n) for n in (1, 4000, 4001, 4800, 4801)] == [
        small, small, large, large, larger,
    ]  # fmt: skip
    five = (Curve("all_reduce", 5, 10.0), Curve("all_reduce", 5, 14.0, above=1000.0))
    assert at_devices((*five, small, large), 3)[2:] == (
        Curve("all_reduce", 3, 4.0),
        Curve("all_reduce", 3, 1 + (14 - 1) / 3, above=1000.0),
        Curve("all_reduce", 3, 5 + (14 - 5) / 3, above=4000.0),
    )
    made = measured(2, (small, large, larger))
    assert Cluster.from_text(made.to_text()) == made
    with pytest.raises(ClusterError, match="no curve for tensors up to 4000 bytes"):
        measured(2, (large,))


def test_text_and_plan_round_trip() -> None:
    made = measured(4, curves(2), curves(4))
    made = Cluster(
        made.devices, made.network, tuple(sorted(made.curves, key=lambda c: COLLECTIVES.index(c.kind)))
    )
    assert Cluster.from_text(made.to_text()) == made
    assert Cluster.load(made.to_dict()) == made
    assert decode(encode(made), Cluster) == made
    assert str(made).endswith("measured collectives between 2, 4 devices")
    assert hash(made.curves)


def test_all_that_was_measured_round_trips() -> None:
    point = Point("lone", 4096, 1, 1.0, 0.5, 1e-4, 9e-5, 2e-4, 12)
    whole = MeasuredFigures(
        (Fit(curve("all_to_all", 2, 1e-4, 0.0, 1e-9), -0.5, 0.1, (point, point)),),
        (Rate(1, "matmul", "float32", 2e6, 1e-3, 9e-4, 2e-3, 7),),
        {"backend": "gloo", "budget": 60.0},
    )
    assert read_measured(read_object(whole.to_dict()), 2) == whole
    assert read_measured(read_object({"version": 1}), 2) == MeasuredFigures()


GOOD = {"kind": "all_reduce", "devices": 2, "latency": 1e-4, "per_byte": 1e-9}
RATE = {
    "rank": 0, "what": "matmul", "dtype": "float32", "amount": 1, "seconds": 1, "low": 1, "high": 1, "samples": 3,
}  # fmt: skip


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (5, "measured is 5; write a mapping"),
        ({}, "measured lacks the key 'version'"),
        ({"version": 2}, "['version']: the part measured is of version 2; this release reads 1: profile again"),
        ({"version": 2, "new": 1}, "is of version 2"),
        ({"version": 1, "curvs": []}, "unknown key 'curvs' (did you mean 'curves'?)"),
        ({"version": 1, "about": {"weather": 1}}, "about has the unknown key 'weather'"),
        ({"version": 1, "curves": 3}, "curves is 3; write a list"),
        ({"version": 1, "curves": [{**GOOD, "kind": "all_reduc"}]}, "did you mean 'all_reduce'?"),
        ({"version": 1, "curves": [{**GOOD, "slope": 1}]}, "a curve has the unknown key 'slope'"),
        ({"version": 1, "curves": [{"kind": "all_reduce", "devices": 2}]}, "lacks the key 'latency'"),
        ({"version": 1, "curves": [{**GOOD, "latency": -1}]}, "latency is -1; write a non-negative number"),
        ({"version": 1, "curves": [{**GOOD, "latency": "fast"}]}, "latency is 'fast'; write a non-negative"),
        ({"version": 1, "curves": [{**GOOD, "latency": True}]}, "latency is True; write"),
        ({"version": 1, "curves": [{**GOOD, "latency": float("nan")}]}, "latency is nan; write"),
        ({"version": 1, "curves": [{**GOOD, "per_shard": 1}]}, "per_shard has no meaning there"),
        ({"version": 1, "curves": [{**GOOD, "latency": 0, "per_byte": 0}]}, "every term is 0"),
        ({"version": 1, "curves": [{**GOOD, "devices": 1}]}, "devices is 1; write a whole number from 2"),
        ({"version": 1, "curves": [{**GOOD, "devices": 2.5}]}, "devices is 2.5; write a whole number"),
        ({"version": 1, "curves": [{**GOOD, "devices": 3}]}, "between 3 devices, the cluster has 2"),
        ({"version": 1, "curves": [GOOD, GOOD]}, "all_reduce between 2 devices stands twice"),
        ({"version": 1, "curves": [{**GOOD, "points": [[1, 2]]}]}, "a point has 2 numbers; write skew, bytes"),
        (
            {"version": 1, "curves": [{**GOOD, "points": [["even", 0, 1, 1, 0, 1, 1, 1, 6]]}]},
            "bytes is 0; write a whole number from 1",
        ),
        ({"version": 1, "rates": [{**RATE, "rank": 2}]}, "rank is 2; the cluster has 2 devices"),
        ({"version": 1, "rates": [{**RATE, "what": "speed"}]}, "what is 'speed'; allowed are matmul"),
        ({"version": 1, "rates": [{**RATE, "seconds": 0}]}, "seconds is 0; write a positive number"),
        ({"version": 1, "rates": [{"rank": 0}]}, "a rate lacks the key 'what'"),
    ],
)  # fmt: skip
def test_mistakes_are_named(part: Any, message: str) -> None:
    spec = {"devices": [{"flops": 1, "count": 2}], "network": {"bandwidth": 1}, "measured": part}
    with pytest.raises(ClusterError) as caught:
        Cluster.load(spec)
    assert message in str(caught.value)
    assert str(caught.value).startswith("cluster['measured']")
    assert "\n" not in str(caught.value)


def test_a_smaller_cluster_needs_its_own_profile() -> None:
    spec = {"devices": [{"flops": 1, "count": 3}], "network": {"bandwidth": 1}}
    part = {"version": 1, "curves": [GOOD]}
    with pytest.raises(ClusterError, match="all_reduce has no curve between all 3 devices"):
        Cluster.load({**spec, "measured": part})
    head = "devices: [{flops: 1, count: 2}]\nnetwork: {bandwidth: 1}\n"
    text = head + "measured:\n  version: 1\n  curves: [{kind: x}]"
    with pytest.raises(ClusterError, match=r"^f\.yaml:5:12: a curve lacks the key 'devices'"):
        Cluster.from_text(text, "f.yaml")


def test_constructors_check() -> None:
    for make in (
        lambda: Curve("all_reduce", 1, 1.0), lambda: Curve("all_reduce", 2, float("inf")),
        lambda: Curve("all_reduce", 2, 1.0, per_exchange=1.0), lambda: Curve("broadcast", 2, 1.0),
        lambda: measured(2, curves(3)), lambda: measured(2, curves(2), curves(2)),
    ):  # fmt: skip
        with pytest.raises(ClusterError):
            make()
