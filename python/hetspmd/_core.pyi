"""The search core, written in Rust (rust/core); JSON text in, JSON text out."""

from collections.abc import Callable

__all__ = ["solve", "version"]

def solve(
    problem: str,
    *,
    time_limit: float,
    max_expansions: int,
    memory_limit: int,
    incumbent: str | None = None,
    progress: Callable[[float, int, int | None], object] | None = None,
) -> str:
    """Find the SPMD program of least cost.

    ``problem`` is the JSON text described in ``rust/core/src/problem.rs``; the result is that of
    ``rust/core/src/solution.rs``. ``time_limit`` is in seconds, ``memory_limit`` in bytes.
    ``incumbent`` is an earlier solution (``{"rows": ..., "moves": ...}``) to start from.
    ``progress(seconds, lower_bound, cost)`` is called about twenty times a second.

    Raises ValueError for a malformed problem or incumbent, KeyboardInterrupt on Ctrl-C, and whatever
    ``progress`` raises.
    """

def version() -> str:
    """Version of the search core."""
