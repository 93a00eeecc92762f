"""Two hundred steps in real processes, with random delays in every rank: the same losses, and nothing grows."""

from __future__ import annotations

import json
import os
import random
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from endurance_worker import STEPS, WORLD

HERE = Path(__file__).parent


def train(folder: Path, *, delays: bool) -> list[dict[str, Any]]:
    """What each rank saw."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    outs = [folder / f"{int(delays)}-{rank}.json" for rank in range(WORLD)]
    workers = [
        subprocess.Popen(
            [
                sys.executable,
                str(HERE / "endurance_worker.py"),
                str(rank),
                str(port),
                str(out),
                str(int(delays)),
            ],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, out in enumerate(outs)
    ]
    for worker in workers:
        _, said = worker.communicate(timeout=480)
        assert worker.returncode == 0, said[-3000:]
    return [json.loads(out.read_text()) for out in outs]


@pytest.mark.slow
def test_delays_change_nothing_and_nothing_grows(tmp_path: Path) -> None:
    calm, delayed = train(tmp_path, delays=False), train(tmp_path, delays=True)
    losses = calm[0]["losses"]
    assert len(losses) == STEPS
    assert len(set(losses)) > STEPS // 2
    for run in (calm, delayed):
        for rank in run:
            assert rank["losses"] == losses, "bit for bit, on every rank"
            first, *later = rank["held"]
            for kind in ("threads", "python threads", "files"):
                assert all(now[kind] <= first[kind] for now in later), (kind, rank["held"])
            # What is in flight at the moment of a look may differ by a tensor or two; what leaks stays and adds up.
            for kind in ("tensors", "bytes"):
                assert min(now[kind] for now in later[-10:]) <= first[kind], (kind, rank["held"])
    # What stays varies by what is in flight, by a megabyte in one run of many; what leaks does so in each.
    for delays, run in ((False, calm), (True, delayed)):
        if any(grows(rank["held"]) for rank in run):
            again = train(tmp_path, delays=delays)
            both = [[rank["held"] for rank in ranks] for ranks in zip(run, again, strict=True)]
            assert not any(grows(one) and grows(two) for one, two in both), both


def grows(held: list[dict[str, int]]) -> bool:
    """Whether the resident bytes grow, by 13 KiB a step or more. What is free is given back before each look."""
    resident = [now["resident"] for now in held[5:]]
    return min(resident[-5:]) - max(resident[:5]) > 2**19 or resident[-1] - resident[0] > 8 * 2**20


@pytest.mark.parametrize(("a_step", "leaks"), [(0, False), (13 * 2**10, True), (2**20, True)])
def test_what_grows(a_step: int, leaks: bool) -> None:
    noise = random.Random(0)
    steps = range(3, STEPS, 10)
    assert grows([{"resident": 2**28 + a_step * s + noise.randrange(2**18)} for s in steps]) == leaks
