"""What runs on each rank: the memory that a step of an arm holds, and a first short turn of it."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from emulated.arms import COUNTED
from emulated.memory import LiveBytes
from emulated.worker import Context
from versus.rank import build_arm, first, timed, warm


def peak(context: Context, *, model: str, size: str, arm: Mapping[str, Any]) -> int:
    """The most bytes of all tensors during a step that is not the first."""
    gc.collect()
    with LiveBytes() as counter:
        step = build_arm(context, model, size, arm)
        for _ in range(COUNTED):
            gc.collect()
            counter.reset_peak()
            step()
        return counter.peak


def pace(context: Context, *, model: str, size: str, arm: Mapping[str, Any]) -> float:
    """Seconds of a timed step on the slowest rank."""
    gc.collect()
    torch.distributed.barrier()
    losses: list[Tensor] = []
    step = build_arm(context, model, size, arm)
    warm(step, losses)
    context.throttle(True)
    first(step, losses)
    return timed(step, 1, losses)[1]
