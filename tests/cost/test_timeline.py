"""The two-stream simulation: by hand, against the stage model, and the files it writes."""

from __future__ import annotations

import json
import math
import random
import time
from dataclasses import replace
from pathlib import Path

import pytest
from cost_graphs import Builder, cluster, data_parallel, mlp, random_program
from hypothesis import given, settings
from hypothesis import strategies as st
from timeline_checks import CLOSE, check, scheduled

from hetspmd.cli.main import main
from hetspmd.cost.model import CostModel
from hetspmd.cost.step import Stages, StepModel, idle_seconds
from hetspmd.cost.timeline import IDLE_RESULTS, Timeline, timeline
from hetspmd.errors import OutputError
from hetspmd.placement import REPLICATE, shard
from hetspmd.program.lengths import Lengths, lengths_for
from hetspmd.program.program import Communicate, Compute, Program, Result, Step
from hetspmd.rules.theory import Theory
from scheduled import simulated_seconds, streams_of


def row(theory: Theory, instruction: int, name: str) -> Compute:
    return Compute(instruction, next(r for r in theory.rows[instruction] if r.name == name))


def sources(theory: Theory) -> list[Step]:
    return [
        Compute(i.id, next(r for r in theory.rows[i.id] if r.post == (REPLICATE,)))
        for i in theory.graph.instructions
        if i.is_source
    ]


def three_instructions() -> tuple[Theory, Program]:
    """a and b in halves, each gathered; the loss of both, whole. 16, 8 and 4 FLOPs; 32 bytes per gather."""
    made = Builder()
    x = made.input("x", (8,))
    a = made.op("a", "b->b", (x,), {"b": 8}, flops=16)
    b = made.op("b", "b->b", (x,), {"b": 8}, flops=8)
    loss = made.op("loss", "b,b->", (a, b), {"b": 8}, flops=4)
    theory = made.theory(loss, {})
    half = shard(0)
    steps: list[Step] = [
        *sources(theory), row(theory, 1, "b"), row(theory, 2, "b"),
        Communicate(a, "all_gather", half, REPLICATE), Communicate(b, "all_gather", half, REPLICATE),
        row(theory, 3, "always"),
    ]  # fmt: skip
    return theory, Program(tuple(steps), Result(loss, REPLICATE), (), (), ())


def by_hand(bandwidth: float) -> Timeline:
    """Devices of 1 and 2 FLOP/s with 1 s per launch, a network of 0.5 s latency."""
    theory, made = three_instructions()
    devices = cluster(1.0, 2.0, bandwidth=bandwidth, latency=0.5, launch=1.0, memory_bandwidth=1e300)
    return timeline(StepModel(CostModel(theory, devices), made), lengths_for(theory.axes, (0.5, 0.5)))


def test_three_instructions_and_two_collectives_by_hand() -> None:
    """a takes 9 and 5 s, b 5 and 3 s, the loss 5 and 3 s, each gather 0.5 + 16 / 4 = 4.5 s."""
    found = by_hand(bandwidth=4.0)
    assert [(t.name, t.issued, t.ready, t.last, t.start, t.end) for t in found.transfers] == [
        ("All-Gather(a, 0)", 5.0, 9.0, 0, 9.0, 13.5),
        ("All-Gather(b, 0)", 8.0, 14.0, 0, 14.0, 18.5),
    ]
    assert found.step_seconds == found.forward_seconds == 23.5
    assert found.stage_seconds == 14.0 + 4.5 + 4.5 + 5.0
    assert found.communication_seconds == 9.0
    assert found.compute_seconds == (19.0, 11.0)
    assert found.end_seconds == (23.5, 21.5)
    assert found.exposed_seconds == (4.5, 9.0)  # rank 0 computes b while a is gathered
    assert found.waits_for == ((0.0, 0.0), (1.5, 0.0))  # from 8 to 9 for a, from 13.5 to 14 for b
    assert found.waiting_seconds == (4.5, 10.5)
    assert [t.waited for t in found.transfers] == [5.5, 4.5 + 5.0]
    assert [(e.stream, e.name, e.start, e.end) for e in found.events if e.device == 1] == [
        ("compute", "a", 0.0, 5.0), ("compute", "b", 5.0, 8.0), ("compute", "loss", 18.5, 21.5),
        ("waiting", "All-Gather(a, 0)", 8.0, 13.5), ("waiting", "All-Gather(b, 0)", 13.5, 18.5),
        ("communication", "All-Gather(a, 0)", 9.0, 13.5), ("communication", "All-Gather(b, 0)", 14.0, 18.5),
    ]  # fmt: skip


def test_a_busy_stream_delays_the_next_collective() -> None:
    """Each gather takes 0.5 + 16 / 1 = 16.5 s, so that the second is issued long before it can start."""
    found = by_hand(bandwidth=1.0)
    assert [(t.ready, t.start, t.end) for t in found.transfers] == [(9.0, 9.0, 25.5), (14.0, 25.5, 42.0)]
    assert found.end_seconds == (47.0, 45.0)
    assert found.exposed_seconds == (28.0, 33.0)
    assert found.waits_for == ((0.0, 0.0), (1.0, 0.0))


TEXT = """\
Two streams: 23.5 s a step, 16 % less than without overlap (28 s in the stage model), forward until 23.5 s, \
communication stream busy for 9 s
  rank  device  computes  waits for transfers  for devices  mostly                                      busy
  0     d1          19 s                4.5 s          0 s          |##########################------|  81 %
  1     d2          11 s                  9 s        1.5 s  rank 0  |###############------------..   |  47 %
  # computes   - waits for a transfer   . waits for a device   (blank: has finished)

Waits
  collective        of         takes  waited  begins when
  All-Gather(b, 0)  the model  4.5 s   9.5 s  rank 0 issues it, 6 s after the first
  All-Gather(a, 0)  the model  4.5 s   5.5 s  rank 0 issues it, 4 s after the first"""


def test_text() -> None:
    found = by_hand(bandwidth=4.0)
    assert found.text() == str(found) == TEXT
    assert "the stream is free, 11.5 s late" in by_hand(bandwidth=1.0).text()


def test_without_overlap_it_is_the_stage_model() -> None:
    """A chain: every result is divided along rows and columns in turns, so that each is gathered for the next."""
    made = Builder()
    sizes = {"i": 6, "j": 9}
    t = made.input("x", (6, 9))
    for i in range(6):
        t = made.op(f"a{i}", "ij->ij", (t,), sizes, flops=float(5 + 7 * i % 11))
    theory = made.theory(made.op("loss", "ij->", (t,), sizes, flops=3), {})
    steps = sources(theory)
    for i in theory.graph.instructions[1:-1]:
        (t,), dim = i.outputs, i.id % 2
        steps += [row(theory, i.id, "ij"[dim]), Communicate(t, "all_gather", shard(dim), REPLICATE)]
    steps.append(row(theory, len(theory.graph.instructions) - 1, "always"))
    assert theory.graph.loss is not None
    chain = Program(tuple(steps), Result(theory.graph.loss, REPLICATE), (), (), ())
    model = CostModel(theory, cluster(1.0, 2.0, 3.0, bandwidth=100.0, latency=0.25, launch=0.5))
    found = timeline(StepModel(model, chain), lengths_for(theory.axes, (0.2, 0.3, 0.5)))
    assert len(found.transfers) == 6
    assert found.step_seconds == pytest.approx(found.stage_seconds, **CLOSE)


@settings(max_examples=60)
@given(
    st.integers(0, 10**6),
    st.lists(st.floats(0.01, 1), min_size=3, max_size=3),
    st.floats(1e6, 1e11),
    st.sampled_from([math.inf, 1e6, 1e8]),
    st.booleans(),
)
def test_never_longer_than_the_stage_model(
    seed: int, weights: list[float], bandwidth: float, copied: float, parallel: bool
) -> None:
    theory = mlp(batch=12, width=6, hidden=10, layers=2)
    of = cluster(1e8, 2e8, 5e7, bandwidth=bandwidth)
    copying = (replace(d, issue_bandwidth=copied * k) for k, d in enumerate(of.devices, 1))
    model = CostModel(theory, replace(of, devices=tuple(copying)))
    made = data_parallel(theory) if parallel else random_program(theory, seed)
    lengths = lengths_for(theory.axes, weights)
    found = timeline(StepModel(model, made), lengths)
    check(found, streams_of(model, made), lengths)
    assert found.step_seconds == simulated_seconds(model, made, lengths)
    stages = Stages(model, scheduled(theory, made)).seconds(model.shares(lengths))
    assert found.step_seconds <= stages * (1 + 1e-12)
    assert timeline(StepModel(model, made), lengths) == found


def test_gradients_travel_behind_the_rest_of_backward() -> None:
    """Data parallelism: only the last All-Reduce and part of the others is exposed."""
    theory = mlp(batch=64, width=32, hidden=64, layers=4)
    model = CostModel(theory, cluster(1e8, 1e8, bandwidth=1e7, launch=1e-9))
    found = timeline(StepModel(model, data_parallel(theory)), lengths_for(theory.axes, (0.5, 0.5)))
    reduced = [t for t in found.transfers if t.name.startswith("All-Reduce(g")]
    assert len(reduced) == 8
    last = reduced[-1].end - reduced[-1].start
    loss = found.transfers[0].end - found.transfers[0].start
    assert found.exposed_seconds == pytest.approx((last + loss, last + loss), **CLOSE)
    hidden = found.communication_seconds - last - loss
    assert found.stage_seconds - found.step_seconds == pytest.approx(hidden, **CLOSE)
    assert hidden > 0.1 * found.stage_seconds


def test_devices_may_change_places() -> None:
    theory = mlp(batch=24, width=6, hidden=10, layers=3)
    rates, weights = (1e8, 2e8, 2e8, 4e8), (0.1, 0.2, 0.3, 0.4)
    made = data_parallel(theory)
    plain = timeline(StepModel(CostModel(theory, cluster(*rates)), made), lengths_for(theory.axes, weights))
    for order in ((1, 0, 2, 3), (3, 2, 1, 0), (0, 2, 1, 3)):
        units = lengths_for(theory.axes, weights).units
        moved = Lengths(4, tuple(tuple(u[r] for r in order) for u in units))
        model = CostModel(theory, cluster(*(rates[r] for r in order)))
        found = timeline(StepModel(model, made), moved)
        assert found.step_seconds == pytest.approx(plain.step_seconds, **CLOSE)
        for name in ("compute_seconds", "waiting_seconds", "exposed_seconds", "end_seconds"):
            want = [getattr(plain, name)[r] for r in order]
            assert getattr(found, name) == pytest.approx(want, **CLOSE), name
        assert [order[t.last] for t in found.transfers] == [t.last for t in plain.transfers]


def test_idle_devices_get_the_results_between_forward_and_backward() -> None:
    theory = mlp(batch=24, width=6, hidden=10)
    whole = cluster(2e8, 1e8, 3e8)
    active = (0, 2)
    model = CostModel(theory, whole.part(active))
    made, lengths = data_parallel(theory), lengths_for(theory.axes, (0.4, 0.6))
    idle = idle_seconds(theory.graph, made, whole, active)
    found = timeline(StepModel(model, made, idle=idle), lengths, whole, active)
    alone = timeline(StepModel(model, made), lengths)
    assert idle > 0
    (sent,) = (t for t in found.transfers if t.step is None)
    assert (sent.name, sent.end - sent.start) == (IDLE_RESULTS, pytest.approx(idle))
    assert sent.start == pytest.approx(alone.forward_seconds, **CLOSE)
    assert sent.end == found.forward_seconds
    assert found.step_seconds == pytest.approx(
        alone.step_seconds + idle, **CLOSE
    )  # the loss is reduced first
    assert found.step_seconds == simulated_seconds(model, made, lengths, idle=idle)
    assert found.active == active
    assert (found.compute_seconds[1], found.waiting_seconds[1], found.end_seconds[1]) == (0.0, 0.0, 0.0)
    assert [(e.stream, e.name) for e in found.events if e.device == 1] == [("communication", IDLE_RESULTS)]
    assert "idle" in found.text().splitlines()[3]
    check(found, streams_of(model, made, idle=idle), lengths)
    with pytest.raises(ValueError, match="2 active devices and a cost model of 3"):
        timeline(
            StepModel(CostModel(theory, whole), made),
            lengths_for(theory.axes, (0.4, 0.3, 0.3)),
            whole,
            active,
        )


# files -----------------------------------------------------------------------------------------------------------


def test_chrome_trace(tmp_path: Path) -> None:
    found = by_hand(bandwidth=4.0)
    path = tmp_path / "step.json"
    found.save(path)
    assert [p.name for p in tmp_path.iterdir()] == ["step.json"]
    document = json.loads(path.read_text())
    entries = document["traceEvents"]
    names = {(e["pid"], e["args"]["name"]) for e in entries if e["name"] == "process_name"}
    assert names == {(0, "rank 0: d1"), (1, "rank 1: d2")}
    shown = [e for e in entries if e["ph"] == "X"]
    assert len(shown) == len(found.events)
    for rank in (0, 1):
        for kind, thread, want in (
            ("compute", 0, found.compute_seconds[rank]),
            ("waiting", 0, found.waiting_seconds[rank]),
            ("communication", 1, found.communication_seconds),
        ):
            mine = [e for e in shown if e["pid"] == rank and e["cat"] == kind]
            assert {e["tid"] for e in mine} == {thread}
            assert sum(e["dur"] for e in mine) == pytest.approx(want * 1e6)
    assert {e["name"] for e in shown if e["cat"] == "waiting"} == {
        "wait for All-Gather(a, 0)", "wait for All-Gather(b, 0)",
    }  # fmt: skip
    with pytest.raises(OutputError, match="cannot be written"):
        found.save(tmp_path / "missing" / "step.json")


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    devices = tmp_path / "cluster.yaml"
    devices.write_text(
        "devices:\n  - {name: fast, flops: 4e9}\n  - {name: slow, count: 2, flops: 1e9}\n"
        "network: {bandwidth: 1Gbit/s, latency: 1us}\n"
    )
    target = Path(__file__).parent.parent / "cli" / "targets.py"
    out = tmp_path / "step.json"
    arguments = ["compile", str(target), "--cluster", str(devices), "--timeline"]
    assert main([*arguments, str(out)]) == 0
    assert "Two streams: " in capsys.readouterr().out
    assert {e["pid"] for e in json.loads(out.read_text())["traceEvents"]} == {0, 1, 2}
    assert main([*arguments, str(tmp_path / "missing" / "step.json")]) == 2
    assert "there is no folder" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(("layers", "devices", "limit"), [(170, 8, 0.05), (500, 64, 0.5)])
def test_it_is_fast(layers: int, devices: int, limit: float) -> None:
    """Programs of 2,000 and 6,000 steps, the better of five runs, in seconds of this process."""
    theory = mlp(batch=256, width=64, hidden=64, layers=layers)
    dice = random.Random(0)
    model = CostModel(theory, cluster(*(dice.uniform(1e9, 4e9) for _ in range(devices))))
    lengths = lengths_for(theory.axes, [1.0 + i % 4 for i in range(devices)])
    made = data_parallel(theory)
    best = float("inf")
    for _ in range(5):
        begin = time.process_time()
        simulated_seconds(model, made, lengths)
        best = min(best, time.process_time() - begin)
    assert best < limit, f"{len(made.steps)} steps on {devices} devices"
