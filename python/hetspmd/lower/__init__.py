"""Lowering: a plan becomes one forward and one backward torch.fx graph per rank."""

from __future__ import annotations

from hetspmd.lower.local import lower, lower_plan
from hetspmd.lower.program import LocalProgram, LocalTensor

__all__ = ["LocalProgram", "LocalTensor", "lower", "lower_plan"]
