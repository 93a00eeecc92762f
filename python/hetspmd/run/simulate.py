"""The earlier place of :mod:`hetspmd.dist.simulated_world`, for scripts that import it from here."""

from __future__ import annotations

from hetspmd.dist.simulated_world import run_ranks

__all__ = ["run_ranks"]
