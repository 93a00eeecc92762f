"""What computing and collectives take from each other, in the simulation."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from cost_graphs import Builder, data_parallel, mlp, random_program
from hypothesis import given, settings
from hypothesis import strategies as st
from timeline_checks import check
from torch import nn

import hetspmd
from hetspmd.cluster.cluster import Cluster
from hetspmd.cluster.devices import Device, Network
from hetspmd.cost.model import CostModel
from hetspmd.cost.simulated_run import WAIT, WAIT_FIRST, SimulatedRun, waited
from hetspmd.cost.simulator import TwoStreams
from hetspmd.cost.step import StepModel
from hetspmd.cost.timeline import timeline
from hetspmd.errors import ClusterError
from hetspmd.placement import REPLICATE, shard
from hetspmd.program.lengths import lengths_for
from hetspmd.program.program import Communicate, Compute, Program, Result
from hetspmd.rules.theory import Theory
from scheduled import streams_of

FREE = Cluster(
    (Device("a", {"default": 1e9}), Device("b", {"default": 5e8})), Network(bandwidth=1e8, latency=1e-4)
)


class Loss(nn.Module):
    """The mean square of a model's outputs."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.model(x)
        return out.square().mean()


def slowed(computing: float, collective: float, cluster: Cluster = FREE) -> Cluster:
    return replace(
        cluster,
        devices=tuple(
            replace(
                d,
                computing_slowdown={"default": 1 + j * (computing - 1), "all_gather": computing},
                collective_slowdown={"default": collective},
            )
            for j, d in enumerate(cluster.devices)
        ),
    )


def beside_a_gather() -> tuple[Theory, Program]:
    """a in halves, gathered; b, which needs no gather, in the meantime; the loss of both."""
    made = Builder()
    x = made.input("x", (8,))
    y = made.input("y", (8,))
    a = made.op("a", "b->b", (x,), {"b": 8}, flops=16)
    b = made.op("b", "c->c", (y,), {"c": 8}, flops=64)
    theory = made.theory(made.op("loss", "b,c->", (a, b), {"b": 8, "c": 8}, flops=4), {})

    def row(instruction: int, name: str) -> Compute:
        return Compute(instruction, next(r for r in theory.rows[instruction] if r.name == name))

    sources = [
        Compute(i, next(r for r in theory.rows[i] if r.post == (REPLICATE,)))
        for i, instruction in enumerate(theory.graph.instructions)
        if instruction.is_source
    ]
    gather = Communicate(a, "all_gather", shard(0), REPLICATE)
    assert theory.graph.loss is not None
    steps = (*sources, row(2, "b"), gather, row(3, "always"), row(4, "always"))
    return theory, Program(steps, Result(theory.graph.loss, REPLICATE), (), (), ())


def seconds_of(cluster: Cluster) -> float:
    theory, program = beside_a_gather()
    step = StepModel(CostModel(theory, cluster), program)
    return step.seconds(lengths_for(theory.axes, (0.5, 0.5)))


def by_hand(collective: float) -> Cluster:
    """Devices of 1 FLOP/s: a takes 8 s, the gather 64 s, b 64 s, the loss 4 s."""
    device = Device("d", {"default": 1.0}, launch=1e-12)
    return slowed(2.0, collective, Cluster((device, device), Network(bandwidth=0.25, latency=1e-9)))


def test_a_computation_beside_a_collective_by_hand() -> None:
    plain = replace(by_hand(1.0), devices=(Device("d", {"default": 1.0}, launch=1e-12),) * 2)
    assert seconds_of(plain) == pytest.approx(8 + 64 + 4)
    # Half as fast while the gather is on its way: 32 of b's 64 seconds are done by its end.
    assert seconds_of(by_hand(1.0)) == pytest.approx(8 + 64 + 32 + 4)
    # Twice as long while b computes, which is all the time: b ends with it.
    assert seconds_of(by_hand(2.0)) == pytest.approx(8 + 128 + 4)
    # Three times as long, but b is done after 128 of the 192 seconds: the mean of 3 and 1 + 2 * 128 / 192.
    assert seconds_of(by_hand(3.0)) == pytest.approx(8 + 64 * (3 + 1 + 2 * 2 / 3) / 2 + 4)


def work_done(run: SimulatedRun, computing: np.ndarray, device: int, begin: float, end: float) -> float:
    """Seconds of work alone that a device does from begin to end."""
    done, now = 0.0, begin
    for c, (start, stop) in enumerate(zip(run.starts, run.ends, strict=True)):
        first, last = min(max(start, now), end), min(max(stop, now), end)
        done += first - now + (last - first) / computing[c, device]
        now = last
    return done + end - now


def replay(streams: TwoStreams, run: SimulatedRun, alone: np.ndarray) -> None:
    """Between events each device has done the seconds of its computations."""
    assert streams._contention is not None
    computing, world = streams._contention.computing, alone.shape[1]
    clock, done = np.zeros(world), 0
    for event, ((at, what, c), arrived) in enumerate(zip(streams.events, run.clocks, strict=True)):
        for j in range(world):
            expected = float(alone[done:at, j].sum())
            assert work_done(run, computing, j, clock[j], arrived[j]) == pytest.approx(expected, abs=1e-12)
        done, clock = at, arrived
        if what in (WAIT, WAIT_FIRST) and not run.dropped[c]:
            clock = waited(what, clock, run.ends[c])
        clock = clock + run.issued[event] if event in run.issued else clock
    for j in range(world):
        expected = float(alone[done:, j].sum())
        assert work_done(run, computing, j, clock[j], run.final[j]) == pytest.approx(expected, abs=1e-12)


@settings(max_examples=60)
@given(
    st.integers(0, 10**6), st.floats(1.01, 3.0), st.sampled_from([1.0, 1.3, 2.0]), st.floats(1e6, 1e10),
    st.booleans(), st.booleans(),
)  # fmt: skip
def test_random_programs_against_a_replay(
    seed: int, computing: float, collective: float, bandwidth: float, parallel: bool, issuing: bool
) -> None:
    theory = mlp(batch=12, width=6, hidden=10, layers=2)
    program = data_parallel(theory) if parallel else random_program(theory, seed)
    cluster = replace(slowed(computing, collective), network=Network(bandwidth, 1e-6))
    if issuing:
        cluster = replace(cluster, devices=tuple(replace(d, issue=1e-6) for d in cluster.devices))
    model = CostModel(theory, cluster)
    lengths = lengths_for(theory.axes, (0.6, 0.4))
    step = StepModel(model, program)
    run = step.streams.run(model.shares(lengths))
    alone = streams_of(CostModel(theory, replace(FREE, network=cluster.network)), program).run(
        model.shares(lengths)
    )
    replay(step.streams, run, alone.seconds)
    assert run.final.max() >= alone.final.max() * (1 - 1e-12)
    for c, (start, end) in enumerate(zip(run.starts, run.ends, strict=True)):
        longer = (end - start) / (alone.ends[c] - alone.starts[c]) if alone.ends[c] > alone.starts[c] else 1.0
        assert 1 - 1e-9 <= longer <= collective * (1 + 1e-9)
    found = timeline(step, lengths)
    for j in range(2):
        assert found.end_seconds[j] == pytest.approx(found.compute_seconds[j] + found.waiting_seconds[j])
    if collective == 1.0:
        check(found, step.streams, lengths)


def test_a_slowdown_of_1_is_none() -> None:
    theory, program = beside_a_gather()
    lengths = lengths_for(theory.axes, (0.5, 0.5))
    ones = streams_of(CostModel(theory, slowed(1.0, 1.0)), program)
    assert ones._contention is None
    none = streams_of(CostModel(theory, FREE), program)
    shares = ones.model.shares(lengths)
    assert ones.run(shares).clocks[-1].tolist() == none.run(shares).clocks[-1].tolist()
    assert ones.on(CostModel(theory, slowed(2.0, 1.0)))._contention is not None


def test_plans_are_priced_with_it(tmp_path: Path) -> None:
    """The same decisions on every run, stored, and a step that is never predicted to be shorter for a slowdown."""
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 1))
    loss = Loss(model)
    seconds = []
    for computing, collective in ((1.0, 1.0), (1.5, 1.2), (4.0, 3.0)):
        cluster = slowed(computing, collective, replace(FREE, network=Network(bandwidth=2e8, latency=1e-5)))
        plans = [hetspmd.compile(loss, (torch.ones(512, 64),), cluster) for _ in range(2)]
        texts = []
        for number, plan in enumerate(plans):
            plan.save(tmp_path / f"{number}.json")
            texts.append((tmp_path / f"{number}.json").read_bytes())
        assert texts[0] == texts[1]
        loaded = hetspmd.Plan.load(tmp_path / "0.json")
        assert loaded.cluster == cluster
        assert loaded.cost == plans[0].cost
        assert plans[0].cost.step_seconds == pytest.approx(plans[0].timeline().step_seconds)
        assert len(plans[0].active) == 2, "a plan that divides"
        seconds.append(plans[0].cost.step_seconds)
    assert seconds[0] < seconds[1] < seconds[2]


def test_in_a_cluster_file() -> None:
    cluster = slowed(1.5, 1.25)
    assert Cluster.from_text(cluster.to_text()) == cluster
    assert "slowdown" not in FREE.to_text()
    one = Cluster.from_text(
        "devices: [{flops: 1e9, computing_slowdown: 1.5, collective_slowdown: {all_gather: 2}}]"
    )
    assert one.devices[0].slowdowns("all_reduce") == (1.5, 1.0)
    assert one.devices[0].slowdowns("all_gather") == (1.5, 2.0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("computing_slowdown: 0.5", "computing_slowdown is 0.5; it must be finite and at least 1"),
        ("collective_slowdown: {all_reduce: 0}", "collective_slowdown of all_reduce is 0"),
        ("collective_slowdown: {all_reduse: 2}", "all_reduse"),
        ("computing_slowdown: slow", "computing_slowdown"),
    ],
)
def test_what_is_no_slowdown_is_refused(text: str, message: str) -> None:
    with pytest.raises(ClusterError, match=message):
        Cluster.from_text(f"devices: [{{flops: 1e9, {text}}}]")
    with pytest.raises(ClusterError, match="at least 1"):
        Device("d", {"default": 1.0}, computing_slowdown={"default": 0.5})
    with pytest.raises(ClusterError, match="no kind of collectives"):
        Device("d", {"default": 1.0}, collective_slowdown={"all_reduse": 2.0})
