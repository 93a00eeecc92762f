"""Issuing collectives takes time of the devices themselves."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from cost_graphs import Builder, data_parallel, mlp

from hetspmd.cluster.cluster import Cluster
from hetspmd.cluster.collective_kinds import Kind, kinds_between
from hetspmd.cluster.devices import Device, Network
from hetspmd.cost.model import CostModel, MoveForm
from hetspmd.cost.simulated_run import START, WAIT
from hetspmd.cost.simulator import TwoStreams
from hetspmd.cost.step import StepModel
from hetspmd.cost.timeline import timeline
from hetspmd.errors import ClusterError
from hetspmd.placement import PARTIAL, REPLICATE, shard
from hetspmd.profile.grouping import issuing
from hetspmd.program.buckets import members
from hetspmd.program.lengths import lengths_for
from hetspmd.program.program import Communicate, Compute, Program, Result
from hetspmd.rules.theory import Theory
from scheduled import streams_of

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
    two = streams_of(model, data_parallel(THEORY))
    run = two.run(model.shares(LENGTHS))
    issues = [e for e, (_, what, _) in enumerate(two.events) if what == START]
    assert sorted(run.issued) == issues
    assert len(issues) > 4
    for event in issues:
        assert run.issued[event] == pytest.approx([2e-5, 7e-5])
    assert run.issuing == pytest.approx(len(issues) * np.array([2e-5, 7e-5]))
    plain = CostModel(THEORY, FREE)
    plain.bucket_bytes = 0
    free = streams_of(plain, data_parallel(THEORY)).run(model.shares(LENGTHS))
    first = issues[0]
    assert run.starts[0] == pytest.approx(free.starts[0]), "the collective's own seconds have its issue"
    later = run.clocks[first + 1] - run.clocks[first]
    assert (later >= np.array([2e-5, 7e-5]) * (1 - 1e-9)).all()
    assert run.final.max() >= free.final.max()


@pytest.mark.parametrize("cluster", [FREE, BUSY, replace(BUSY, network=Network(1e12, 1e-9))])
def test_the_step_stays_within_the_stage_model_and_the_timeline_adds_up(cluster: Cluster) -> None:
    """Also where issuing would take longer than the collective, which then takes all of it."""
    model, program = CostModel(THEORY, cluster), data_parallel(THEORY)
    cost = StepModel(model, program).cost(LENGTHS)
    found = timeline(StepModel(model, program), LENGTHS)
    assert cost.step_seconds == pytest.approx(found.step_seconds)
    assert found.step_seconds <= found.stage_seconds * (1 + 1e-9)
    for j in range(2):
        assert found.end_seconds[j] == pytest.approx(found.compute_seconds[j] + found.waiting_seconds[j])
    last = max(e.end for e in found.events if e.device == 0 and e.stream == "compute")
    assert last <= found.end_seconds[0] * (1 + 1e-9)


def test_large_tensors_take_longer_to_issue() -> None:
    slow = replace(FREE, devices=tuple(replace(d, issue=1e-6, issue_bandwidth=1e8) for d in FREE.devices))
    model = CostModel(THEORY, slow)
    two = streams_of(model, data_parallel(THEORY))
    run = two.run(model.shares(LENGTHS))
    sizes = [sum(THEORY.graph.tensors[m.tensor].nbytes for m in members(c)) for c in two.collectives if c]
    assert len(set(sizes)) > 1
    assert [float(own[0]) for own in run.issued.values()] == pytest.approx([1e-6 + n / 1e8 for n in sizes])


COPIES = replace(
    FREE,
    devices=tuple(replace(d, issue_bandwidth=b) for d, b in zip(FREE.devices, (4e7, 1e7), strict=True)),
)


def product() -> Theory:
    """The sum of c[40, 30] = a[40, 20] w[20, 30] in float32; c has 4,800 bytes."""
    b = Builder()
    sizes = {"m": 40, "k": 20, "n": 30}
    c = b.mm("c", "mk,kn->mn", b.input("a", (40, 20)), b.parameter("w", (20, 30)), sizes)
    return b.theory(b.op("loss", "mn->", (c,), sizes, flops=1200), {})


SCATTERED = ("reduce_scatter", "grouped_reduce", "ring_reduce", "exchange_reduce")
GATHERED = ("all_gather", "grouped_broadcast", "ring_gather")


def test_the_kinds_are_those_that_run() -> None:
    assert kinds_between("partial", "shard") == SCATTERED
    assert kinds_between("shard", "replicated") == GATHERED


@pytest.mark.parametrize("kind", [*SCATTERED, *GATHERED])
def test_slices_along_other_dims_than_the_first_are_copied(kind: Kind) -> None:
    theory = product()
    model, free = CostModel(theory, COPIES), CostModel(theory, FREE)
    nbytes = theory.graph.tensors[2].nbytes
    shares = model.shares(lengths_for(theory.axes, (0.5, 0.5)))

    def form(of: CostModel, dim: int) -> MoveForm:
        ends = (PARTIAL, shard(dim)) if kind in SCATTERED else (shard(dim), REPLICATE)
        return of.move_form(2, *ends, kind)

    for of, dim in ((model, 0), (free, 0), (free, 1)):
        assert form(of, dim).pack == form(of, dim).unpack == 0
    assert model.form_seconds(form(model, 0), shares) == free.form_seconds(form(free, 0), shares)
    copied = nbytes / 1e7  # by the slower device
    one = form(model, 1)
    assert (one.pack, one.unpack) == pytest.approx((copied, 0.0) if kind in SCATTERED else (0.0, copied))
    sent = free.form_seconds(form(free, 1), shares)
    assert model.form_seconds(one, shares) == pytest.approx(sent + copied)


def test_each_device_copies_before_a_scatter_and_after_a_gather() -> None:
    """A product, in slices along dim 1 of the sums, gathered for the loss; on devices that copy 40 and 10 MB/s."""
    theory = product()
    graph = theory.graph
    (last,) = (i for i in graph.instructions if 2 in i.inputs)
    made = next(i for i in graph.instructions if 2 in i.outputs)
    summed = next(r for r in theory.rows[made.id] if r.post == (PARTIAL,))
    given = [
        Compute(i.id, next(r for r in theory.rows[i.id] if r.post == (REPLICATE,)))
        for i in graph.instructions
        if i.is_source
    ]
    whole = next(r for r in theory.rows[last.id] if r.name == "always")
    steps = (
        *given,
        Compute(made.id, summed),
        Communicate(2, "ring_reduce", PARTIAL, shard(1)),
        Communicate(2, "ring_gather", shard(1), REPLICATE),
        Compute(last.id, whole),
    )
    program = Program(steps, Result(last.outputs[0], REPLICATE), (), (), ())
    model = CostModel(theory, COPIES)
    lengths = lengths_for(theory.axes, (0.5, 0.5))
    two = streams_of(model, program)
    run = two.run(model.shares(lengths))
    own = np.array([graph.tensors[2].nbytes / b for b in (4e7, 1e7)])
    place = {what: e for e, (_, what, c) in enumerate(two.events) if c == 0}
    computed = run.seconds[: two.events[place[START]][0]].sum(axis=0)
    assert run.clocks[place[START]] == pytest.approx(computed + own)
    assert run.starts[0] == pytest.approx(max(computed + own))
    (gather,) = (e for e, (_, what, c) in enumerate(two.events) if c == 1 and what == WAIT)
    assert run.issued[gather] == pytest.approx(own)
    assert run.issuing == pytest.approx(2 * own + run.issued[place_of(two, 1)])
    found = timeline(StepModel(model, program), lengths)
    assert found.compute_seconds == pytest.approx(tuple(run.seconds.sum(axis=0) + run.issuing))
    assert found.step_seconds <= found.stage_seconds * (1 + 1e-9)
    final = run.seconds[two.events[gather][0] :].sum(axis=0)
    assert run.final == pytest.approx(np.maximum(run.clocks[gather], run.ends[1]) + own + final)
    (event,) = (e for e in found.events if e.device == 1 and e.name == graph.instructions[last.id].name)
    assert event.end == pytest.approx(run.final[1]), "behind the copy"


def place_of(two: TwoStreams, collective: int) -> int:
    """The event at which a collective starts."""
    return next(e for e, (_, what, c) in enumerate(two.events) if what == START and c == collective)


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
