"""Measuring for real: one process, simulated ranks, and gloo processes that finish or fail together."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from profile_worker import worker
from synthetic import rates_of

from hetspmd.cluster.cluster import Cluster
from hetspmd.cluster.collective_kinds import KINDS, Kind
from hetspmd.cluster.curves import COLLECTIVES, Point
from hetspmd.dist.communicator import Communicator
from hetspmd.dist.pending import PendingTensor
from hetspmd.dist.runtime import Runtime
from hetspmd.dist.simulated_world import run_ranks
from hetspmd.errors import ProfileError
from hetspmd.profile import collective_times as collectives
from hetspmd.profile import measure as measuring
from hetspmd.profile.collective_times import measure_group
from hetspmd.profile.collective_trials import Trial
from hetspmd.profile.measure import Options, Profile, measure
from hetspmd.profile.profile_thresholds import THRESHOLDS
from hetspmd.profile.session import Session
from processes import free_ports, spawn

TARGETS = Path(__file__).parents[1] / "cli" / "targets.py"
CPU = torch.device("cpu")


def test_one_process_measures_its_device(
    command: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    path = tmp_path / "one.yaml"
    outcome = command("profile", "--out", path, "--budget", "500ms", "--device", "cpu")
    assert outcome.status == 0, outcome.err
    assert "Measuring one device, for about 0.5 s: each median until its 95 % interval" in outcome.err
    made = Profile.load(str(path))
    assert made.cluster.world == 1
    assert made.cluster.network is None
    (device,) = made.cluster.devices
    assert 1e7 < device.rate("float32") < 1e15
    assert 1e6 < device.memory_bandwidth < 1e14
    assert 1e-8 < device.launch < 1e-2
    assert 2**20 < device.memory < 2**50
    assert {(r.what, r.dtype) for r in made.measured.rates} >= {
        ("matmul", "float32"), ("convolution", "float32"), ("memory", "float32"), ("launch", "float32"),
        ("matmul", "bfloat16"),
    }  # fmt: skip
    assert all(r.samples >= 3 and r.low <= r.seconds <= r.high for r in made.measured.rates)
    assert command("compile", TARGETS, "--cluster", path).status == 0


def between_two(monkeypatch: pytest.MonkeyPatch, start: Any) -> list[tuple[Kind, Point]]:
    """What is measured between two simulated ranks, of three sizes, where collectives start so."""

    def body(communicator: Communicator) -> list[tuple[Kind, Point]]:
        return measure_group(Session(communicator, CPU), [0, 1], [0, 1], 0.0, 0.05, lambda what: None)

    monkeypatch.setattr(collectives, "start", start)
    few = replace(THRESHOLDS, level_bytes=THRESHOLDS.level_bytes[:3])
    monkeypatch.setattr(collectives, "THRESHOLDS", few)
    (found, other) = run_ranks(2, body)
    assert found == other
    return found


def test_what_a_group_does_once_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first six of each collective take 50 ms longer, as when connections and threads are made."""
    real, seen = collectives.start, Counter[tuple[int, str]]()

    def start(runtime: Runtime, trial: Trial, operand: torch.Tensor) -> PendingTensor:
        seen[runtime.communicator.rank, trial.kind] += 1
        if seen[runtime.communicator.rank, trial.kind] <= THRESHOLDS.first_samples:
            time.sleep(0.05)
        return real(runtime, trial, operand)

    found = between_two(monkeypatch, start)
    assert {kind for kind, _ in found} == set(COLLECTIVES)
    assert max(point.seconds for _, point in found if point.nbytes == THRESHOLDS.level_bytes[0]) < 0.04


class Clock(threading.local):
    """Seconds that each thread believes to have passed."""

    now = 0.0

    def read(self) -> float:
        return self.now


class Slow:
    """A collective that takes some seconds of a clock, thrice as many if it begins while another is on its way."""

    def __init__(self, pending: PendingTensor, seconds: float, flying: list[None], clock: Clock) -> None:
        self.pending, self.flying, self.clock = pending, flying, clock
        self.seconds = 3 * seconds if flying else seconds
        flying.append(None)

    def wait(self) -> torch.Tensor:
        self.clock.now += self.seconds
        self.flying.pop()
        return self.pending.wait()


def test_what_takes_longer_in_a_row_counts_as_it_does_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four grouped broadcasts in a row take 1 + 3 + 3 + 3 times as long as one."""
    real, clock = collectives.start, Clock()
    flying: dict[int, list[None]] = {0: [], 1: []}

    def start(runtime: Runtime, trial: Trial, operand: torch.Tensor) -> Slow:
        own = flying[runtime.communicator.rank] if trial.kind == "grouped_broadcast" else []
        return Slow(real(runtime, trial, operand), 1e-8 * trial.nbytes, own, clock)

    monkeypatch.setattr(collectives, "perf_counter", clock.read)
    found = between_two(monkeypatch, start)
    seconds = {(kind, p.nbytes): p.seconds for kind, p in found if p.skew == "even"}

    def ratio(kind: Kind, nbytes: int) -> float:
        return seconds[kind, nbytes] / seconds["all_gather", nbytes]

    latency, *sizes = THRESHOLDS.level_bytes[:3]
    assert ratio("grouped_broadcast", latency) == pytest.approx(1.0), "one alone"
    for nbytes in sizes:
        assert ratio("grouped_broadcast", nbytes) == pytest.approx(2.5)
        assert ratio("ring_gather", nbytes) == pytest.approx(1.0)
    assert all(p.low <= p.seconds <= p.high for _, p in found)


def test_simulated_ranks_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    """Speeds 1 : 4 : 1 : 4: collectives between all four, and between ranks 1 and 3."""
    speeds = (1e12, 4e12, 1e12, 4e12)
    monkeypatch.setattr(
        measuring, "measure_device", lambda rank, *rest: rates_of(rank, speeds[rank], jitter=1 + 0.01 * rank)
    )
    few = replace(THRESHOLDS, level_bytes=THRESHOLDS.level_bytes[:3], first_samples=2)
    monkeypatch.setattr("hetspmd.profile.collective_times.THRESHOLDS", few)

    def run(comm: Any) -> Profile:
        return measure(Session(comm, CPU, "simulated", start=time.perf_counter()), Options(budget=0.01))

    for attempt in range(8):
        try:
            profiles = run_ranks(4, run)
            break
        except ProfileError as error:  # other work on the machine can hide that times grow with sizes
            if attempt == 7 or "too busy" not in str(error):
                raise
    made = profiles[0]
    assert all(p == made for p in profiles)
    dropped = str((made.measured.about or {}).get("dropped", ""))
    points: dict[tuple[str, int], list[Point]] = {}  # two curves of a collective where its times have a step
    for fit in made.measured.fits:
        points.setdefault((fit.curve.kind, fit.curve.devices), []).extend(fit.points)
    assert list(points) == [(kind, n) for kind in COLLECTIVES if kind not in dropped for n in (2, 4)]
    slow, fast, *rest = made.cluster.devices
    assert rest == [slow, fast]
    for (kind, devices), found in points.items():
        sizes = {p.nbytes for p in found}
        assert max(sizes) <= THRESHOLDS.level_bytes[2]
        assert len(sizes) == 3
        skews = 1 if kind == "all_reduce" else (3 if devices == 2 else 4) - (KINDS[kind].lone is not None)
        assert len(found) == 3 * skews
        assert all(0 < p.low <= p.seconds <= p.high and p.samples >= 2 for p in found)
    assert Cluster.from_text(made.to_text()) == made.cluster
    assert made.cluster.part((1, 3)).curves == tuple(c for c in made.cluster.curves if c.devices == 2)


@pytest.mark.slow
def test_gloo_ranks_finish_or_fail_together(command: Any, tmp_path: Path) -> None:
    began = time.monotonic()
    spawn(worker, (2, free_ports(3), str(tmp_path)), nprocs=2)
    # Nobody waits for a timeout; where the machine is busy, bandwidths take a minute.
    assert time.monotonic() - began < 250
    texts = [(tmp_path / f"{rank}.yaml").read_text() for rank in range(2)]
    assert texts[0] == texts[1]
    made = Profile.load(str(tmp_path / "0.yaml"))
    assert made.cluster.world == 2
    assert {f.curve.kind for f in made.measured.fits if f.curve.devices == 2} == set(COLLECTIVES)
    assert command("compile", TARGETS, "--cluster", tmp_path / "0.yaml").status == 0

    reports = [(tmp_path / f"{rank}.txt").read_text().splitlines() for rank in range(2)]
    assert [line.split(":")[0] for line in reports[0]] == ["device", "collective"]
    assert reports[0] == reports[1]
    device, collective = reports[0]
    assert device.startswith("device: rank 1 on ")
    assert device.endswith("failed in measuring its device: RuntimeError: the fan is off")
    assert collective.startswith("collective: rank 1 on ")
    assert collective.endswith("failed in the collectives between 2 devices: RuntimeError: no cable")


@pytest.mark.slow
def test_the_command_under_torchrun(tmp_path: Path) -> None:
    """What the documentation says to type."""
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    path = tmp_path / "two.yaml"
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    done = subprocess.run(
        [*launch, "hetspmd", "profile", "--out", str(path), "--budget", "3s", "--device", "cpu"],
        capture_output=True, text=True, timeout=120, env=environment, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Cluster of 2 devices") == 1  # rank 0 speaks for all
    assert "\r" not in done.stderr  # no terminal, no bar
    cluster = Cluster.load(path)
    assert cluster.world == 2
    assert {c.kind for c in cluster.curves} == set(COLLECTIVES)
    bad = subprocess.run(
        [*launch, "hetspmd", "profile", "--out", str(tmp_path / "no" / "x.yaml"), "--device", "cpu"],
        capture_output=True, text=True, timeout=120, env=environment, check=False,
    )  # fmt: skip
    assert bad.returncode != 0
    assert bad.stderr.count("hetspmd profile: ProfileError: rank 0 on ") >= 1
    assert "there is no folder" in bad.stderr
