"""Whole steps of a model until memory ends: examples of other sizes, limits, what is left, ranks that differ."""

from __future__ import annotations

import gc
import time
import weakref
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from steps_worker import SLOW, Body, build, worker
from torch import nn

import hetspmd
from hetspmd.cli.target import load_target
from hetspmd.cluster.cluster import Cluster
from hetspmd.cluster.curves import MeasuredFigures
from hetspmd.cluster.devices import Device, Network
from hetspmd.cluster.step_curves import StepCurve, StepPoint
from hetspmd.dist.communicator import LoneCommunicator
from hetspmd.dist.simulated_world import run_ranks
from hetspmd.errors import HetspmdError, ProfileError, StepMemoryError
from hetspmd.profile.live_bytes import LiveBytes
from hetspmd.profile.measure import Options, Profile
from hetspmd.profile.plot import profile_svg
from hetspmd.profile.session import Session
from hetspmd.profile.show import profile_text
from hetspmd.profile.step_runs import Attempt, StepRunner
from hetspmd.profile.whole_steps import measure_curves, step_case, with_steps
from hetspmd.trace.autocast import autocast_for
from processes import free_ports, spawn

TARGETS = Path(__file__).parents[1] / "cli" / "targets.py"
CPU = torch.device("cpu")


def runner(memory: int, model: nn.Module | None = None, optimizer: str = "adamw") -> StepRunner:
    own, example = build()
    return StepRunner(step_case("body", model or own, example), CPU, memory, optimizer, 0.5)


def test_a_step_ends_at_the_limit_and_leaves_nothing() -> None:
    """At each limit below the peak, down to what is not even enough for the model: in forward, backward and the
    optimizer's step. Then the same runner runs on."""
    free = runner(2**30).run(32, 0.0)
    assert free.point is not None
    peak = free.point.peak
    gc.collect()
    with LiveBytes() as counter:
        for memory in (peak - 1, peak // 3):
            tight = runner(memory)
            before = counter.current
            attempt = tight.run(32, 0.0)
            assert attempt == Attempt(32, free.counted)
            assert counter.current == before, "nothing is left"
            tight.memory = peak + 64
            assert tight.run(32, 0.0).point is not None, "and the device is as before"
            assert counter.current == before


def test_the_model_and_its_modes_stay_as_they_were() -> None:
    model, example = build()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    resize = torch.UntypedStorage.resize_
    case = step_case("body", model, example)
    of = StepRunner(case, CPU, 2**30, "momentum", 0.5)
    alive = []
    plain = of._step

    def kept(*arguments: Any) -> Callable[[], None]:
        alive.append(weakref.ref(arguments[0]))
        return plain(*arguments)

    of._step = kept  # type: ignore[method-assign]  # sees the copies
    assert of.run(4, 0.0).point is not None
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert [w() for w in alive] == [None], "the copy that was trained is gone"
    assert torch.UntypedStorage.resize_ is resize


def test_the_peak_is_what_a_step_holds() -> None:
    """By hand: parameters, gradients, two moments and a temporary or two; and rows of what the backward reads."""
    points = [runner(2**30).run(rows, 0.0).point for rows in (64, 128)]
    assert points[0] is not None
    assert points[1] is not None
    parameters = 4 * sum(p.numel() for p in Body().parameters())
    each = (points[1].peak - points[0].peak) / 64
    assert 2 * 4 * 256 <= each <= 3 * 4 * 256 + 4 * 70, "the row, its hidden one, and the gradient of that"
    assert 4 * parameters <= points[0].peak - 64 * each + 2 * parameters
    assert points[0].counted == pytest.approx(points[0].peak, rel=0.1)


class Normed(Body):
    """Batch norm cannot train on one row."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(64)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return super().forward(self.norm(x), y)


def test_rows_that_are_too_few_for_a_model_are_left_out() -> None:
    of = runner(2**30, Normed())
    one = of.run(1, 0.0)
    assert one.point is None
    assert "more than 1 value per channel" in one.refused
    (curve,) = measure_curves(session(), [(0,)], [2**30], of.run, 2.5)
    assert [p.rows for p in curve.points][:1] == [2]


def session() -> Session:
    return Session(LoneCommunicator(), CPU, start=time.perf_counter())


def test_another_failure_is_an_error() -> None:
    def broken(rows: int, deadline: float) -> Attempt:
        raise ValueError("no such kernel")

    with pytest.raises(ProfileError, match="failed in measuring steps of 1 rows: ValueError: no such kernel"):
        measure_curves(session(), [(0,)], [100], broken, 1.0)


def device_of(limit: int, refused: int = 0, each: float = 10.0) -> Callable[[int, float], Attempt]:
    """A device that computes more than ``refused`` rows, of which ``limit`` fit."""

    def run(rows: int, deadline: float) -> Attempt:
        if rows <= refused:
            return Attempt(rows, refused="too few")
        nbytes = int(100 + each * rows)
        fits = rows <= limit
        return Attempt(rows, nbytes, StepPoint(rows, 1e-3, 1e-3, 1e-3, 3, nbytes, nbytes) if fits else None)

    return run


@given(st.integers(0, 3000), st.integers(0, 5), st.integers(1, 40000), st.floats(0.0, 20.0))
def test_the_limit_is_the_limit(limit: int, refused: int, memory: int, each: float) -> None:
    """Whatever the bytes say of it."""
    (curve,) = measure_curves(session(), [(0,)], [memory], device_of(limit, refused, each), 1e9)
    rows = [p.rows for p in curve.points]
    assert rows == sorted(set(rows))
    assert curve.over is not None
    if limit > refused:
        assert curve.limit in (limit, 0)
        assert curve.over[0] == limit + 1 or not rows
    assert curve.memory == memory


def test_few_rounds_find_a_limit_that_bytes_tell() -> None:
    for limit in (3, 17, 100, 999, 1500):
        asked = []

        def run(rows: int, deadline: float, limit: int = limit, asked: list[int] = asked) -> Attempt:
            asked.append(rows)
            return device_of(limit)(rows, deadline)

        (curve,) = measure_curves(session(), [(0,)], [100 + 10 * limit + 5], run, 1e9)
        assert curve.limit == limit
        assert len(asked) <= limit.bit_length() + 3


def test_a_budget_ends_the_growing() -> None:
    (curve,) = measure_curves(session(), [(0,)], [10**9], device_of(10**6), 0.0)
    assert [p.rows for p in curve.points] == [1], "one round, however small it is"
    assert curve.over is None
    slow = StepPoint(1, 10.0, 10.0, 10.0, 3, 10, 10)
    made: list[int] = []

    def run(rows: int, deadline: float) -> Attempt:
        made.append(rows)
        return Attempt(rows, 10, replace(slow, rows=rows, seconds=10.0 * rows, high=10.0 * rows))

    measure_curves(session(), [(0,)], [10**9], run, 250.0)
    assert made == [1, 2, 4], "8 rows would take 80 s, five times"


def test_unlike_devices_go_at_their_own_pace() -> None:
    """Kinds of unlike memory, in simulated ranks: a kind has the limit of its least rank, and the rounds end
    together whoever has found its limit first."""
    limits = [7, 50, 48, 0]
    given_bytes = [1000] * 4

    def run(communicator: Any) -> tuple[StepCurve, ...]:
        of = Session(communicator, CPU, "simulated", start=time.perf_counter())
        return measure_curves(of, [(0,), (1, 2), (3,)], given_bytes, device_of(limits[of.rank]), 1e9)

    found = run_ranks(4, run)
    assert found[0] == found[1] == found[2] == found[3]
    assert [(c.ranks, c.limit) for c in found[0]] == [((0,), 7), ((1, 2), 48), ((3,), 0)]
    assert [c.over[0] for c in found[0] if c.over is not None] == [8, 49, 1]
    assert {p.samples for p in found[0][1].points} == {6}, "of both ranks"


@pytest.mark.slow
def test_gloo_ranks_of_unlike_speed_and_memory(tmp_path: Path) -> None:
    """Rank 1 is slow and has half of the memory: each has its own curve, plans differ, and a failure on one rank
    ends all."""
    large, small = 800_000, 550_000
    devices = (
        Device("large", {"default": 5e10}, large, 1e10),
        Device("small", {"default": 5e10}, small, 1e10),
    )
    cluster = Cluster(devices, Network(1e9, 1e-6))
    (tmp_path / "cluster.yaml").write_text(cluster.to_text())
    spawn(worker, (2, free_ports(2), str(tmp_path)), nprocs=2)
    texts = [(tmp_path / f"{rank}.yaml").read_text() for rank in range(2)]
    assert texts[0] == texts[1]
    made = Profile.load(str(tmp_path / "0.yaml"))
    assert made.cluster.devices == devices
    ((fast, slow),) = [m.curves for m in made.cluster.steps]
    assert (fast.ranks, fast.memory, slow.ranks, slow.memory) == ((0,), large, (1,), small)
    assert fast.over is not None
    assert slow.over is not None
    assert (fast.over[0], slow.over[0]) == (fast.limit + 1, slow.limit + 1)
    assert fast.limit > 1.5 * slow.limit > 0
    assert fast.points[-1].peak <= large
    for point in slow.points:
        assert point.seconds > SLOW * point.rows
    said = [(tmp_path / f"{rank}.txt").read_text() for rank in range(2)]
    assert said[0] == said[1]
    assert "rank 1 on" in said[0]
    assert "failed in measuring steps of 8 rows: RuntimeError: the fan is off" in said[0]
    text = profile_text(made)
    assert f"Steps of body on large (rank 0): at most {fast.limit} rows fit 781.2 KiB" in text
    svg = ElementTree.fromstring(profile_svg(made))
    drawn = {t.text for t in svg.iter("{http://www.w3.org/2000/svg}text")}
    assert {"body: rows per second", "body: peak (dots), predicted (lines)"} <= drawn


def test_memory_that_is_asked_for_becomes_the_devices() -> None:
    own = Profile(Cluster((Device("d", {"default": 1e9}),)), MeasuredFigures())
    case = step_case("body", *build())
    options = Options(budget=0.0, tolerance=0.5)
    made = with_steps(session(), own, [case, case], options, memory=400_000)
    assert made.cluster.devices[0].memory == 400_000
    ((curve,),) = [m.curves for m in made.cluster.steps]
    assert curve.memory == 400_000
    assert Cluster.from_text(made.to_text()) == made.cluster
    unlimited = with_steps(session(), own, [case], options)
    assert unlimited.cluster.devices == own.cluster.devices
    assert unlimited.cluster.steps[0].curves[0].memory > 2**20, "what this machine has"
    other = step_case("wider", nn.Sequential(nn.Linear(3, 1), nn.Flatten(0), _Mean()), (torch.zeros(4, 3),))
    both = with_steps(session(), made, [other], options)
    assert [m.name for m in both.cluster.steps] == ["body", "wider"]
    again = with_steps(session(), both, [case], options)
    assert [m.name for m in again.cluster.steps] == ["wider", "body"], "measured anew"
    two = replace(own, cluster=Cluster((Device("d", {"default": 1e9}),) * 2, Network(1e9)))
    with pytest.raises(ProfileError, match="has 2 devices and there are 1 ranks; start as many"):
        with_steps(session(), two, [case], options)


class _Mean(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean()


def test_the_error_of_a_limit_is_named() -> None:
    with (
        pytest.raises(StepMemoryError, match=r"a step needs more than 0\.001 MiB") as caught,
        LiveBytes(1049),
    ):
        torch.zeros(1000)
    assert isinstance(caught.value, HetspmdError)
    assert (caught.value.needed, caught.value.memory) == (4000, 1049)


def test_the_command(command: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HETSPMD_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("RANK", raising=False)
    path = tmp_path / "one.yaml"
    path.write_text("devices: [{name: mine, flops: 5e10}]")
    measured = ("profile", "--model", TARGETS, "--cluster", path, "--budget", "20s", "--device", "cpu")
    made = command(*measured, "--memory", "4.52kB")
    assert made.status == 0, made.err
    assert "and whole steps for about 10 s" in made.err
    profile = Profile.load(str(path))
    ((curve,),) = [m.curves for m in profile.cluster.steps]
    assert curve.over is not None
    assert curve.memory == profile.cluster.devices[0].memory == 4520
    assert f"Steps of {TARGETS} on mine (rank 0): at most {curve.limit} rows fit" in made.out
    refused = command("compile", TARGETS, "--cluster", path)
    assert (refused.status, curve.limit < 12) == (2, True)
    assert "MemoryBoundError" in refused.err
    assert command("profile", "--show", path).status == 0
    ops_alone = command(*measured, "--no-steps")
    assert ops_alone.status == 0
    assert "whole steps" not in ops_alone.err
    assert Profile.load(str(path)).cluster.steps == profile.cluster.steps, "what was measured stays"


def test_the_command_under_autocast(command: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ops and steps are those of the step as autocast casts it, and plans of such steps alone use them."""
    monkeypatch.setenv("HETSPMD_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("RANK", raising=False)
    path = tmp_path / "one.yaml"
    path.write_text("devices: [{name: mine, flops: 5e10}]")
    made = command(
        "profile", "--model", TARGETS, "--cluster", path, "--budget", "20s", "--device", "cpu",
        "--autocast", "bfloat16", "--memory", "1MB",
    )  # fmt: skip
    assert made.status == 0, made.err
    cluster = Profile.load(str(path)).cluster
    assert any("bfloat16" in key for key in cluster.ops_by_rank()[0]), (
        "products are measured as autocast has them"
    )
    (curve,) = cluster.steps[0].curves
    model, example = load_target(str(TARGETS))
    for dtype, used in ((None, False), ("bfloat16", True)):
        with autocast_for(model, dtype):
            plan = hetspmd.compile(model, example, cluster)
        assert (plan.costs.measured is not None) is used
        if used:
            seconds = [p.seconds for p in curve.points]
            assert 0.95 * min(seconds) <= plan.cost.step_seconds <= 1.05 * max(seconds)
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("--out", "x.yaml", "--memory", "8GiB"),
            "--memory, --no-steps and --autocast go with --model",
        ),
        (
            ("--out", "x.yaml", "--autocast", "bfloat16"),
            "--memory, --no-steps and --autocast go with --model",
        ),
        (("--out", "x.yaml", "--no-steps"), "--memory, --no-steps and --autocast go with --model"),
        (("--model", "x.py", "--out", "x.yaml", "--no-steps", "--memory", "1GiB"), "leave one out"),
        (
            ("--model", "x.py", "--out", "x.yaml", "--memory", "much"),
            "'much' is no number of bytes; write it as",
        ),
        (
            ("--model", "fixed.py", "--cluster", "one.yaml"),
            "BatchSizeError: fixed.py: the model cannot be given",
        ),
    ],
)
def test_bad_input(
    command: Any, arguments: tuple[str, ...], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RANK", raising=False)
    one = "devices: [{flops: 1e9}]"
    (tmp_path / "one.yaml").write_text(one)
    (tmp_path / "fixed.py").write_text(
        "import torch\n"
        "class Fixed(torch.nn.Linear):\n"
        "    def forward(self, x):\n"
        "        return super().forward(x.view(6, 4)).square().mean()\n"
        "def build():\n"
        "    return Fixed(4, 4), (torch.zeros(6, 4),)\n"
    )
    outcome = command("profile", *arguments, "--device", "cpu")
    assert outcome.status == 2
    assert message in outcome.err
    assert (tmp_path / "one.yaml").read_text() == one
