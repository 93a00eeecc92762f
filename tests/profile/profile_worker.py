"""What one gloo process does in tests/profile/test_measure.py; its findings go to a file."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import torch

from hetspmd.errors import ProfileError
from hetspmd.profile import collective_times as collectives
from hetspmd.profile import measure
from hetspmd.profile.measure import Options
from hetspmd.profile.session import joined

TINY = Options(budget=0.5, dtypes=("float32",))


def worker(rank: int, world: int, ports: tuple[int, int, int], folder: str) -> None:
    """A whole profile; a rank that fails in its own measurement; one that fails between collectives."""
    torch.set_num_threads(1)
    report = Path(folder) / f"{rank}.txt"
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1"}

    def say(text: str) -> None:
        with report.open("a", encoding="utf-8") as file:
            file.write(text + "\n")

    os.environ["MASTER_PORT"] = str(ports[0])
    with joined("cpu") as session:
        whole = measure.measure(session, TINY)
    (Path(folder) / f"{rank}.yaml").write_text(whole.to_text(), encoding="utf-8")

    os.environ["MASTER_PORT"] = str(ports[1])
    real = measure.measure_device
    if rank == 1:
        measure.measure_device = _broken
    with contextlib.suppress(ProfileError), joined("cpu") as session:
        try:
            measure.measure(session, TINY)
        except ProfileError as error:
            say(f"device: {error}")
            raise
    measure.measure_device = real

    os.environ["MASTER_PORT"] = str(ports[2])
    if rank == 1:
        collectives.start = _unplugged
    try:
        with joined("cpu") as session:
            measure.measure(session, TINY)
    except ProfileError as error:
        say(f"collective: {error}")


def _broken(*arguments: object) -> None:
    raise RuntimeError("the fan is off")


def _unplugged(*arguments: object) -> None:
    raise RuntimeError("no cable")
