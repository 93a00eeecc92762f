"""The search core, written in Rust (rust/core); JSON text in, JSON text out."""

from collections.abc import Callable
from typing import Self, final

__all__ = ["Searcher", "solve", "version"]

@final
class Searcher:
    """A problem that is searched again and again, at other costs and with some rows forbidden.

    Each search starts from the messages that the last one left. Not for several threads at once: that raises
    RuntimeError.
    """

    def __new__(cls, problem: str) -> Self:
        """``problem`` as in :func:`solve`. Raises ValueError for a malformed problem."""

    def set_costs(self, rows: bytes, moves: bytes, keep: bytes) -> None:
        """Replace all costs, given as little-endian 64-bit integers.

        Of the rows in the order of instructions; of the moves and of the prices of holding in the order of
        tensors. Raises ValueError for a wrong number of them, negative ones or too large a sum.
        """

    def fold(self, alike: bytes) -> None:
        """Prepare searches among the programs in which instructions are alike.

        ``alike`` has a little-endian 64-bit integer for each instruction: the one that it is like, which is like
        itself. Raises ValueError for another number of them, and for instructions whose rows, or moves of outputs,
        are not the same.
        """

    def solve(
        self,
        *,
        time_limit: float,
        max_expansions: int,
        memory_limit: int,
        max_sweeps: int | None = None,
        incumbent: str | None = None,
        allowed: bytes | None = None,
        folded: bool = False,
        tolerance: int = 0,
        progress: Callable[[float, int, int | None], object] | None = None,
    ) -> str:
        """As :func:`solve`; ``allowed`` has one byte per row, 0 where it is forbidden. ``max_sweeps``: message
        passing ends after so many sweeps, and the search with it.

        ``folded``: among the programs in which instructions are alike (:meth:`fold`), of which alone the bound is
        then. Raises ValueError where none are known to be. ``tolerance``: a program that costs at most this much
        more than the best one will do.
        """

    def problem(self) -> str:
        """The problem text at the present costs."""

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
