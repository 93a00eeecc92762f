"""What one rank of three calls alone, at each place of a loop: every rank is told, none aborts, none hangs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from alone_worker import ACTS, OWN, PLACES, TIMEOUT
from forked_ranks import WORLD

from hetspmd import errors

Trial = tuple[str, str, int]
TRIALS: list[Trial] = [
    (name, PLACES[(index + rank) % len(PLACES)], rank)
    for index, name in enumerate(ACTS)
    for rank in range(WORLD)
]
"""Each call by each rank, in some place."""
CALLS_A_LAUNCHER = 7
"""Calls whose trials share a launcher: it imports and plans for a dozen seconds."""
AS_ON_ONE_DEVICE = ("does not require grad", "modified by an inplace operation")
"""What torch says to the rank itself, as it would on one device: a step without gradients, new weights between
forward and backward."""


def run_trials(folder: Path, trials: list[Trial]) -> tuple[list[list[dict[str, Any]]], list[int | None], str]:
    """What each rank of each trial met, and how it ended."""
    worker = Path(__file__).with_name("alone_worker.py")
    done = subprocess.run(
        [sys.executable, str(worker), str(folder), json.dumps(trials)], check=False, capture_output=True, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        timeout=60 + 5 * TIMEOUT * len(trials),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    met = [
        [
            json.loads(path.read_text()) if (path := folder / f"{index}-{rank}.json").exists() else {}
            for rank in range(WORLD)
        ]
        for index in range(len(trials))
    ]
    return met, json.loads((folder / "statuses.json").read_text()), done.stderr


def faults(trial: Trial, met: list[dict[str, Any]], statuses: list[int | None]) -> list[str]:
    """What is not as it should be."""
    name, _, odd = trial
    found = []
    for rank, (own, status) in enumerate(zip(met, statuses, strict=True)):
        said = f"{trial}: rank {rank} ended with {status}: {own}"
        if status not in (0, 7):
            found.append(said)
        elif rank == odd and (name in OWN or any(text in own["text"] for text in AS_ON_ONE_DEVICE)):
            continue
        elif not isinstance(getattr(errors, own["error"], None), type) or "network" in own["text"]:
            found.append(said)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, len(ACTS), CALLS_A_LAUNCHER))
def test_a_rank_alone(tmp_path: Path, first: int) -> None:
    names = list(ACTS)[first : first + CALLS_A_LAUNCHER]
    trials = [trial for trial in TRIALS if trial[0] in names]
    met, statuses, stderr = run_trials(tmp_path, trials)
    found = []
    for index, trial in enumerate(trials):
        found += faults(trial, met[index], statuses[index * WORLD : (index + 1) * WORLD])
    assert not found, "\n".join((*found, stderr[-2000:]))
