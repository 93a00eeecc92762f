"""Lowering: a plan becomes one forward and one backward torch.fx graph per rank."""

from __future__ import annotations

from hetspmd.lower.local_program import LocalProgram, LocalTensor
from hetspmd.lower.lowering import active_ranks, lower_place, lower_plan

__all__ = ["LocalProgram", "LocalTensor", "active_ranks", "lower", "lower_place", "lower_plan"]
