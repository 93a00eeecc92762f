"""A rank that dies, hangs or raises, in real gloo processes: the others stop in time and say which one it was."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from fault_worker import LONE, WORLD

from hetspmd.run.run_options import RunOptions

Trial = dict[str, Any]
Result = dict[str, Any]
HERE = Path(__file__).parent
TIMEOUT = 30.0
SHORT = 4.0


def run_trials(folder: Path, trials: list[Trial]) -> list[Result]:
    """Each trial's result with what each rank wrote, by rank."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-W", "error", str(HERE / "fault_worker.py"), str(folder), json.dumps(trials)]
    done = subprocess.run(
        command, env=environment, check=False, capture_output=True, text=True, timeout=60 + 70 * len(trials)
    )
    assert done.returncode == 0, done.stderr[-4000:]
    results: list[Result] = json.loads((folder / "trials.json").read_text())
    for index, result in enumerate(results):
        result["ranks"] = [
            json.loads(path.read_text()) if (path := folder / f"{index}-{rank}.json").exists() else None
            for rank in range(WORLD)
        ]
        result["stderr"] = done.stderr
    return results


def check_survivors(trial: Trial, result: Result) -> None:
    """Every other rank raised the named error, which names the victim, and was gone in time."""
    victim = trial["victim"]
    for rank in range(WORLD):
        if rank == victim:
            continue
        met = result["ranks"][rank]
        assert met is not None, f"rank {rank} wrote nothing: {result}"
        assert met["error"] == "RankFailedError", met
        assert met["ranks"] == [victim], met
        assert f"rank {victim}" in met["reason"]
        assert f"rank {rank} waited" in met["text"]
        named = ("of module", "loss", "gradient of", "of the step")
        assert not met["where"] or any(text in met["where"] for text in named), met
        assert re.fullmatch(r"(the backward of )?step \d+", met["call"]), met
        assert f" in {met['call']} (" in met["text"], met
        assert met["time"] - result["began"] <= trial["timeout"]
        assert result["ended"][str(rank)] <= TIMEOUT + 5.0, "the process ends, too"
        assert result["status"][str(rank)] == 7, result["stderr"]


def kill(victim: int, delay: float = 0.0) -> Trial:
    return {"kind": "kill", "victim": victim, "timeout": TIMEOUT, "delay": delay}


def test_a_rank_that_dies(tmp_path: Path) -> None:
    (result,) = run_trials(tmp_path, [kill(2)])
    check_survivors(kill(2), result)


@pytest.mark.slow
def test_a_rank_that_is_killed_or_raises(tmp_path: Path) -> None:
    """Killed: another one and the one that hosts the store. An error: in the user's code and inside a program."""
    trials = [
        kill(2),
        kill(0),
        {"kind": "raise", "victim": 1, "timeout": TIMEOUT},
        {"kind": "raise", "victim": 0, "timeout": TIMEOUT},
        {"kind": "inside", "victim": 1, "timeout": TIMEOUT},
    ]
    killed, host, raised, raised_host, inside = run_trials(tmp_path, trials)
    for trial, result in zip(trials, (killed, host, raised, raised_host, inside), strict=True):
        check_survivors(trial, result)
    for result, victim in ((killed, 2), (host, 0)):
        assert all("has died" in met["reason"] for rank, met in enumerate(result["ranks"]) if rank != victim)
    for result, victim in ((raised, 1), (raised_host, 0)):
        told = [met["reason"] for rank, met in enumerate(result["ranks"]) if rank != victim]
        assert any("ValueError: the loader is broken" in reason for reason in told), told
    told = [met["reason"] for rank, met in enumerate(inside["ranks"]) if rank != 1]
    assert all("failed: RuntimeError" in reason for reason in told), told
    own = inside["ranks"][1]
    assert own["error"] == "RuntimeError"
    (note,) = own["notes"]
    assert "aten." in note
    assert "small_models.py:" in note
    assert "of module a" in note


@pytest.mark.slow
def test_the_only_active_rank_dies_or_raises(tmp_path: Path) -> None:
    """It runs the model itself, the others are idle and wait for the loss."""
    kinds = ("kill", "raise", "inside", "backward")
    trials = [{"kind": kind, "victim": LONE, "timeout": TIMEOUT, "lone": True} for kind in kinds]
    results = run_trials(tmp_path, trials)
    for trial, result in zip(trials, results, strict=True):
        check_survivors(trial, result)
    for result, text in zip(
        results, ("has died", "the loader is broken", "RuntimeError", "of the backward"), strict=True
    ):
        told = [met["reason"] for rank, met in enumerate(result["ranks"]) if rank != LONE]
        assert any(text in reason for reason in told), told


@pytest.mark.slow
def test_a_rank_that_hangs_and_one_that_is_busy(tmp_path: Path) -> None:
    trials = [
        {"kind": "stop", "victim": 2, "timeout": SHORT},
        {"kind": "stop", "victim": 0, "timeout": SHORT},
        {"kind": "busy", "victim": 1, "timeout": SHORT},
    ]
    stopped, host, busy = run_trials(tmp_path, trials)
    check_survivors(trials[0], stopped)
    check_survivors(trials[1], host)
    assert all("is stopped" in met["reason"] for rank, met in enumerate(stopped["ranks"]) if rank != 2)
    assert all(met["error"] == "" for met in busy["ranks"]), "a rank that compiles is waited for"
    assert set(busy["status"].values()) == {0}


@pytest.mark.slow
def test_a_rank_that_does_something_else_between_two_steps(tmp_path: Path) -> None:
    """The others stop after their timeout, and say that it lives: nothing was lost on the way."""
    trials = [{"kind": "elsewhere", "victim": victim, "timeout": SHORT} for victim in (1, 0)]
    for trial, result in zip(trials, run_trials(tmp_path, trials), strict=True):
        check_survivors(trial, result)
        text = f"rank {trial['victim']} is alive but does not come: it is busy between two steps, or hangs"
        for rank, met in enumerate(result["ranks"]):
            if rank != trial["victim"]:
                assert text in met["reason"], met
                assert text in met["text"], met


def test_who_is_busy_for_minutes_ends_no_run_by_default() -> None:
    """A checkpoint that one rank writes, an evaluation: forty seconds ended runs."""
    assert RunOptions().timeout >= 600.0
    assert f"HAP(..., timeout={RunOptions().timeout})" in (HERE.parents[1] / "README.md").read_text("utf-8")


@pytest.mark.slow
def test_kills_at_random_moments(tmp_path: Path) -> None:
    dice = random.Random(0)
    trials = [kill(index % WORLD, dice.random() * 0.5) for index in range(8)]
    for trial, result in zip(trials, run_trials(tmp_path, trials), strict=True):
        check_survivors(trial, result)
