"""Lowering: a plan becomes one forward and one backward torch.fx graph per rank."""

from __future__ import annotations

from hetspmd.lower.lowering import active_ranks, lower, lower_place, lower_plan
from hetspmd.lower.program import LocalProgram, LocalTensor

__all__ = ["LocalProgram", "LocalTensor", "active_ranks", "lower", "lower_place", "lower_plan"]
