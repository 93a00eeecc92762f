"""The earlier place of :mod:`hetspmd.dist.simulate`, for scripts that import it from here."""

from __future__ import annotations

from hetspmd.dist.simulate import run_ranks

__all__ = ["run_ranks"]
