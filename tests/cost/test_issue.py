"""Issuing collectives takes time of the devices themselves."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from cost_graphs import data_parallel, mlp

from hetspmd.balance.lengths import lengths_for
from hetspmd.cost.cluster import Cluster, Device, Network
from hetspmd.cost.model import CostModel
from hetspmd.cost.overlap import START, TwoStreams
from hetspmd.cost.step import step_cost
from hetspmd.cost.timeline import timeline
from hetspmd.errors import ClusterError
from hetspmd.profile.grouping import issuing
from hetspmd.synth.buckets import members

FREE = Cluster(
    (Device("a", {"default": 1e9}), Device("b", {"default": 5e8})), Network(bandwidth=1e8, latency=1e-4)
)
BUSY = replace(
    FREE, devices=tuple(replace(d, issue=s) for d, s in zip(FREE.devices, (2e-5, 7e-5), strict=True))
)
THEORY = mlp(batch=12, width=6, hidden=10, layers=3)
LENGTHS = lengths_for(THEORY.axes, (2 / 3, 1 / 3))


def test_each_collective_takes_its_issue_of_every_device() -> None:
    model = CostModel(THEORY, BUSY)
    model.bucket_bytes = 0  # several collectives
    two = TwoStreams(model, data_parallel(THEORY))
    run = two.run(model.shares(LENGTHS))
    issues = [e for e, (_, what, _) in enumerate(two.events) if what == START]
    assert sorted(run.issued) == issues
    assert len(issues) > 4
    for event in issues:
        assert run.issued[event] == pytest.approx([2e-5, 7e-5])
    assert run.issuing == pytest.approx(len(issues) * np.array([2e-5, 7e-5]))
    plain = CostModel(THEORY, FREE)
    plain.bucket_bytes = 0
    free = TwoStreams(plain, data_parallel(THEORY)).run(model.shares(LENGTHS))
    first = issues[0]
    assert run.starts[0] == pytest.approx(free.starts[0]), "the collective's own seconds have its issue"
    later = run.clocks[first + 1] - run.clocks[first]
    assert (later >= np.array([2e-5, 7e-5]) * (1 - 1e-9)).all()
    assert run.final.max() >= free.final.max()


@pytest.mark.parametrize("cluster", [FREE, BUSY, replace(BUSY, network=Network(1e12, 1e-9))])
def test_the_step_stays_within_the_stage_model_and_the_timeline_adds_up(cluster: Cluster) -> None:
    """Also where issuing would take longer than the collective, which then takes all of it."""
    model, program = CostModel(THEORY, cluster), data_parallel(THEORY)
    cost = step_cost(model, program, LENGTHS)
    found = timeline(model, program, LENGTHS)
    assert cost.step_seconds == pytest.approx(found.step_seconds)
    assert found.step_seconds <= found.stage_seconds * (1 + 1e-9)
    for j in range(2):
        assert found.end_seconds[j] == pytest.approx(found.compute_seconds[j] + found.waiting_seconds[j])
    last = max(e.end for e in found.events if e.device == 0 and e.stream == "compute")
    assert last <= found.end_seconds[0] * (1 + 1e-9)


def test_large_tensors_take_longer_to_issue() -> None:
    slow = replace(FREE, devices=tuple(replace(d, issue=1e-6, issue_bandwidth=1e8) for d in FREE.devices))
    model = CostModel(THEORY, slow)
    two = TwoStreams(model, data_parallel(THEORY))
    run = two.run(model.shares(LENGTHS))
    sizes = [sum(THEORY.graph.tensors[m.tensor].nbytes for m in members(c)) for c in two.collectives if c]
    assert len(set(sizes)) > 1
    assert [float(own[0]) for own in run.issued.values()] == pytest.approx([1e-6 + n / 1e8 for n in sizes])


def test_issue_in_a_cluster_file() -> None:
    assert Cluster.from_text(BUSY.to_text()) == BUSY
    copies = replace(FREE, devices=tuple(replace(d, issue_bandwidth=1e8) for d in FREE.devices))
    assert Cluster.from_text(copies.to_text()) == copies
    assert "issue" not in FREE.to_text()
    with pytest.raises(ClusterError, match="issue_bandwidth"):
        replace(FREE.devices[0], issue_bandwidth=0.0)
    with pytest.raises(ClusterError, match="issue"):
        replace(FREE.devices[0], issue=-1.0)


def test_devices_of_a_kind_take_the_median() -> None:
    devices = (FREE.devices[0], FREE.devices[1], FREE.devices[0], FREE.devices[0])
    found = issuing(devices, ((1e-4, 1e-9), (5e-4, 0.0), (3e-4, 3e-9), (2e-4, 2e-9)))
    assert [d.issue for d in found] == [2e-4, 5e-4, 2e-4, 2e-4]
    assert [d.issue_bandwidth for d in found] == [5e8, math.inf, 5e8, 5e8]
    assert issuing(devices, ((0.0, 0.0),) * 4) == devices
