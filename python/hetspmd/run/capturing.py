"""What captures the steps of a HAP module, and what its user is told of it: warnings, each once, and counts."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from threading import Lock
from typing import Final, Literal, TypeAlias

import torch

from hetspmd.errors import CudaGraphsWarning, OptionError
from hetspmd.lower.local_program import numbered
from hetspmd.run.capturer import Capturer, CudaCapturer

CudaGraphs: TypeAlias = bool | Literal["auto"] | Capturer
"""What ``HAP(..., cuda_graphs=)`` takes; a Capturer is for tests."""

IDLE: Final = "this device is idle"
_COMPILED: Final = "compile= is given: what torch.compile has made is not captured yet"


class Reasons:
    """Why something runs uncaptured that might not have to: each reason is warned about once."""

    def __init__(self) -> None:
        self._told: set[str] = set()

    def tell(self, reason: str) -> None:
        """Warn, unless this was said before."""
        if reason not in self._told:
            self._told.add(reason)
            warnings.warn(
                f"cuda_graphs: {reason}. Where that is so the step runs without CUDA graphs, and is right",
                CudaGraphsWarning,
                stacklevel=2,
            )


@dataclass(frozen=True)
class Capturing:
    """What captures the steps of a HAP module; None: nothing does, for a ``reason``."""

    capturer: Capturer | None = None
    reason: str = "cuda_graphs=False"
    reasons: Reasons = field(default_factory=Reasons)
    busy: Lock = field(default_factory=Lock)
    """Whoever runs captured has it: captures have their memory, and their stream, in common."""

    @classmethod
    def of(cls, asked: CudaGraphs, device: torch.device, *, compiled: bool) -> Capturing:
        """What captures on ``device``. Raises OptionError where the user requires what is not possible."""
        if asked is False:
            return cls()
        reason = _COMPILED if compiled else ""
        if isinstance(asked, Capturer):
            if not reason and asked.device_type == device.type:
                return cls(asked, "")
            raise OptionError(f"cuda_graphs: {reason or f'the capturer is not one for {device.type}'}")
        if not reason and device.type != "cuda":
            reason = f"CUDA graphs are of GPUs, and this is {device}"
        if reason and asked is True:
            raise OptionError(f"cuda_graphs=True, but {reason}; leave it out, or say 'auto'")
        if reason:
            return cls(None, reason)
        return cls(CudaCapturer(device), "")


@dataclass(frozen=True)
class TurnCaptures:
    """What is captured of turns that share a graph: ``turns`` are their numbers on this rank, ``stretches`` are of
    the graph, and ``captured`` so many of these."""

    turns: tuple[int, ...]
    stretches: int
    captured: int

    def __str__(self) -> str:
        shared = ", by the same captures" if len(self.turns) > 1 else ""
        return (
            f"{numbered('turn', self.turns)}{shared}: {self.captured} of {self.stretches} stretches captured"
        )


@dataclass(frozen=True)
class PlanCaptures:
    """How a plan runs on this rank.

    Attributes:
        stretches: Pieces of the local graphs that could be captured. Turns that are alike share a graph.
        captured: Those that are.
        calls: Calls of the local graphs within stretches.
        between: Calls between them: collectives, their waits, and what cannot be captured.
        steps: The number of forwards by why they ran uncaptured; "" are those that did not, warm-ups included.
        refused: Stretches that are not captured, or not in all steps, with the reason of each.
        turns: Of a step in micro-batches, what is captured of its turns.
        reason: Why nothing of the plan is captured; "" where something may be.
    """

    stretches: int = 0
    captured: int = 0
    calls: int = 0
    between: int = 0
    steps: Mapping[str, int] = field(default_factory=dict)
    refused: tuple[str, ...] = ()
    turns: tuple[TurnCaptures, ...] = ()
    reason: str = ""

    def __str__(self) -> str:
        if self.reason:
            return f"nothing is captured: {self.reason}"
        lines = [
            f"{self.captured} of {self.stretches} stretches captured, which have {self.calls} calls; "
            f"{self.between} calls between them; {self.steps.get('', 0)} steps by captures"
        ]
        lines += map(str, self.turns)
        lines += [f"{count} steps without: {why}" for why, count in self.steps.items() if why]
        lines += [f"not captured: {why}" for why in self.refused]
        return "\n  ".join(lines)
