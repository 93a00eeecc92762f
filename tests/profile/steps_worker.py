"""What one gloo process does in tests/profile/test_steps.py; its findings go to a file."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hetspmd.errors import ProfileError
from hetspmd.profile.measure import Options, Profile
from hetspmd.profile.rows import Batch
from hetspmd.profile.session import joined
from hetspmd.profile.step_runs import StepRunner
from hetspmd.profile.whole_steps import step_case, with_steps

OPTIONS = Options(budget=60.0, tolerance=0.5)
SLOW = 3e-4
"""Seconds that a row takes longer on the slow device."""


class Body(nn.Module):
    """A layer whose rows are large beside its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 4)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.down(self.up(x).tanh()), y)


def build() -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    return Body(), {"x": torch.randn(6, 64), "y": torch.randint(0, 4, (6,))}


def worker(rank: int, world: int, ports: tuple[int, int], folder: str) -> None:
    """The curves of unlike devices; then a rank that fails for another reason than memory."""
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1"}
    plain = StepRunner._step
    if rank == 1:
        StepRunner._step = _slowed(plain)  # type: ignore[method-assign]  # a slow device

    os.environ["MASTER_PORT"] = str(ports[0])
    with joined("cpu") as session:
        profile = Profile.open(str(Path(folder) / "cluster.yaml"))
        made = with_steps(session, profile, [step_case("body", *build())], OPTIONS)
    (Path(folder) / f"{rank}.yaml").write_text(made.to_text(), encoding="utf-8")

    os.environ["MASTER_PORT"] = str(ports[1])
    if rank == 1:
        StepRunner._step = _broken(plain)  # type: ignore[method-assign]  # as above
    try:
        with joined("cpu") as session:
            with_steps(session, profile, [step_case("body", *build())], replace(OPTIONS, budget=20.0))
    except ProfileError as error:
        (Path(folder) / f"{rank}.txt").write_text(str(error), encoding="utf-8")


def _slowed(plain: Callable[..., Callable[[], None]]) -> Callable[..., Callable[[], None]]:
    def made(self: StepRunner, model: nn.Module, plan: Any, batch: Batch) -> Callable[[], None]:
        step, rows = plain(self, model, plan, batch), len(batch[1]["x"])

        def slow() -> None:
            step()
            time.sleep(SLOW * rows)

        return slow

    return made


def _broken(plain: Callable[..., Callable[[], None]]) -> Callable[..., Callable[[], None]]:
    def made(self: StepRunner, model: nn.Module, plan: Any, batch: Batch) -> Callable[[], None]:
        if len(batch[1]["x"]) == 8:
            raise RuntimeError("the fan is off")
        return plain(self, model, plan, batch)

    return made
