"""The two-stream simulation against the lowered graphs it stands for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from cost_graphs import cluster
from timeline_checks import CLOSE, check, scheduled
from torch import fx

import workbench  # isort: split

from hetspmd.cost.model import CostModel
from hetspmd.cost.simulated_run import BOUNDARY, START, WAIT
from hetspmd.cost.simulator import TwoStreams
from hetspmd.cost.step import Stages, StepModel
from hetspmd.cost.timeline import timeline
from hetspmd.lower import calls
from hetspmd.lower.emit import GraphWriter
from hetspmd.optimize.compiler import plan_for
from hetspmd.program.lengths import Lengths
from hetspmd.program.program import Compute, Program
from hetspmd.rules.theory import Theory
from hetspmd.search import constraints as known
from scheduled import lower, streams_of

import program_builder  # isort: skip  # workbench puts its folder on the path
import small_models  # isort: skip


def lowered_events(
    theory: Theory, made: Program, lengths: Lengths, rank: int, patch: pytest.MonkeyPatch, bucket_bytes: int
) -> list[list[Any]]:
    """Per local graph, in order: instruction ids, ("start", n-th collective), ("wait", n-th collective)."""
    logs: dict[int, list[Any]] = {}
    started: dict[fx.Node, int] = {}
    write, call = GraphWriter._compute, GraphWriter.call

    def logged_compute(self: GraphWriter, step: Compute) -> None:
        write(self, step)
        logs.setdefault(id(self), []).append(step.instruction)

    def logged_call(self: GraphWriter, name: str, target: Any, *rest: Any, **kwargs: Any) -> fx.Node:
        node = call(self, name, target, *rest, **kwargs)
        if target in (calls.wait, calls.take):
            log, event = logs.setdefault(id(self), []), ("wait", started[rest[0][0]])
            if event not in log:  # a bucket is waited for once
                log.append(event)
        elif target in (calls.start, calls.start_bucket):
            started[node] = len(started)
            logs.setdefault(id(self), []).append(("start", started[node]))
        return node

    made_writers: list[GraphWriter] = []
    begin = GraphWriter.__init__

    def logged_init(self: GraphWriter, *args: Any) -> None:
        begin(self, *args)
        made_writers.append(self)

    with patch.context() as m:
        m.setattr(GraphWriter, "_compute", logged_compute)
        m.setattr(GraphWriter, "call", logged_call)
        m.setattr(GraphWriter, "__init__", logged_init)
        lower(theory, made, lengths, rank, workbench.CPU, bucket_bytes=bucket_bytes)
    return [logs.get(id(w), []) for w in made_writers]


def simulated_events(streams: TwoStreams, rank: int) -> list[list[Any]]:
    """The same from the simulation, as ``rank`` sees it; sources are not written."""
    graph = streams.model.theory.graph
    found: list[list[Any]] = [[]]
    done, waited = 0, set()
    for at, what, collective in [*streams.events, (len(streams.instructions), BOUNDARY, -1)]:
        computed = streams.instructions[done:at]
        found[-1] += [i for i in computed if not graph.instructions[i].is_source]
        done = at
        if what == START:
            found[-1].append(("start", collective))
        elif what == BOUNDARY:
            found.append([])
        elif (what == WAIT or rank == 0) and collective not in waited:
            waited.add(collective)
            found[-1].append(("wait", collective))
    return found[:-1]


def ended(events: list[Any]) -> list[Any]:
    """Waits at the end of a graph in any one order: nothing is computed between them."""
    kept = list(events)
    tail = []
    while kept and isinstance(kept[-1], tuple) and kept[-1][0] == "wait":
        tail.append(kept.pop())
    return kept + sorted(tail)


def test_it_follows_the_lowered_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Starts, waits and computations of both local graphs, of random programs: slices and masks of gathered
    values, collectives of collectives, what backward reads of forward."""
    compared = masked = 0
    for name in ("mlp", "conv", "attention"):
        theory = small_models.case(name).theory
        for seed in range(6):
            make: Callable[[Theory, int], Program] = (
                program_builder.random_program if seed % 2 else program_builder.cheap_random_program
            )
            made, lengths = make(theory, seed), program_builder.uneven(theory, 2, seed)
            model = CostModel(theory, cluster(1e8, 2e8))
            streams = streams_of(model, made)
            views = []
            for rank in range(2):
                graphs = lowered_events(theory, made, lengths, rank, monkeypatch, model.bucket_bytes)
                want = simulated_events(streams, rank)
                assert [ended(g) for g in want[: len(graphs)]] == [ended(g) for g in graphs], (name, seed)
                assert not any(want[len(graphs) :])
                views.append(want)
                compared += sum(isinstance(e, tuple) for g in graphs for e in g)
            masked += views[0] != views[1]
            check(timeline(StepModel(model, made), lengths), streams, lengths)
    assert compared > 900
    assert masked > 0, "no program in which rank 0 alone waits for a mask"


@pytest.mark.parametrize("name", ["gpt2", "vgg19"])
def test_a_real_model(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    theory = workbench.traced(name).theory
    ratios = (0.5, 0.25, 0.25)
    devices = workbench.cluster(4, 2, 2)
    plan = plan_for(theory, devices, known.data_parallel(theory), ratios)
    found = plan.timeline()
    streams = streams_of(plan.costs, plan.program)
    check(found, streams, plan.lengths)
    for rank in range(2):
        graphs = lowered_events(
            theory, plan.program, plan.lengths, rank, monkeypatch, plan.costs.bucket_bytes
        )
        want = simulated_events(streams, rank)
        assert [ended(g) for g in want] == [ended(g) for g in graphs]
    stages = Stages(plan.costs, scheduled(theory, plan.program)).seconds(plan.costs.shares(plan.lengths))
    assert found.step_seconds < stages
    assert found.stage_seconds == pytest.approx(plan.cost.stage_seconds, **CLOSE)
    assert found.step_seconds == pytest.approx(plan.cost.step_seconds, **CLOSE)
    assert 0 < found.forward_seconds < found.step_seconds
    backward = [what for _, what, _ in streams.events[[e[1] for e in streams.events].index(BOUNDARY) + 1 :]]
    assert WAIT not in backward[: backward.count(START)], "nothing in backward needs a whole gradient"
