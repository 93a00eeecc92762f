"""Several collectives on their way at a time: latencies hide behind one another, links are shared all the same."""

from __future__ import annotations

from dataclasses import replace

import pytest
from cost_graphs import data_parallel, mlp

from hetspmd.cluster.cluster import Cluster
from hetspmd.cluster.curves import Curve
from hetspmd.cluster.devices import Device, Network
from hetspmd.cost.model import CostModel
from hetspmd.cost.simulated_run import START
from hetspmd.cost.simulator import TwoStreams
from hetspmd.errors import ClusterError
from hetspmd.program.buckets import members
from hetspmd.program.lengths import lengths_for
from scheduled import streams_of

LATENCY = 3e-3
PAIR = Cluster(
    (Device("a", {"default": 1e12}), Device("b", {"default": 5e11})),
    Network(1e9),
    (Curve("all_reduce", 2, latency=LATENCY, per_byte=1e-9),),
)


def streams(cluster: Cluster) -> tuple[TwoStreams, CostModel]:
    theory = mlp(batch=12, width=6, hidden=10, layers=3)
    model = CostModel(theory, cluster)
    model.bucket_bytes = 0  # several collectives
    return streams_of(model, data_parallel(theory)), model


@pytest.mark.parametrize("lanes", [1, 2, 3])
def test_the_recurrence(lanes: int) -> None:
    """A collective waits for its lane and its devices, then out its latency, then for the links."""
    two, model = streams(replace(PAIR, lanes=lanes))
    run = two.run(model.shares(lengths_for(model.theory.axes, (0.5, 0.5))))
    tensors = model.theory.graph.tensors
    nbytes = [tensors[m.tensor].nbytes for c in two.collectives if c is not None for m in members(c)]
    ready = [
        float(clock.max())
        for (_, what, _), clock in zip(two.events, run.clocks, strict=True)
        if what == START
    ]
    assert len(ready) == len(nbytes) > 4
    free = 0.0
    for i, (at, size) in enumerate(zip(ready, nbytes, strict=True)):
        begun = max(at, run.ends[i - lanes]) if i >= lanes else at
        free = max(begun + LATENCY, free) + 1e-9 * size
        assert run.ends[i] == pytest.approx(free)
    assert all(b >= a for a, b in zip(run.ends, run.starts[1:], strict=False)), "one at a time, for people"


def test_more_lanes_take_less_time() -> None:
    seconds = []
    for lanes in (1, 2, 4):
        two, model = streams(replace(PAIR, lanes=lanes))
        seconds.append(two.seconds(model.shares(lengths_for(model.theory.axes, (0.5, 0.5)))))
    assert seconds[0] > 1.5 * seconds[1] > 1.5 * seconds[2]


def test_lanes_in_a_cluster_file() -> None:
    cluster = replace(PAIR, lanes=2)
    assert Cluster.from_text(cluster.to_text()) == cluster
    assert cluster.part((1, 0)).lanes == 2
    assert "lanes" not in PAIR.to_text()
    with pytest.raises(ClusterError, match="lanes"):
        Cluster.from_text(cluster.to_text().replace("lanes: 2", "lanes: 0"))
    with pytest.raises(ClusterError, match="lanes is 0"):
        replace(PAIR, lanes=0)
