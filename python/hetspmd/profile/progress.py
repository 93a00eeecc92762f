"""A progress bar on standard error, for people only: nothing is written where that is no terminal."""

from __future__ import annotations

import sys
from time import perf_counter
from typing import TextIO

__all__ = ["Progress"]

_WIDTH = 30
_EVERY = 0.1


class Progress:
    """``[#####.....]  12 s of 60 s  what``: the part of the time budget that is spent.

    Silent unless ``shown`` and ``stream`` (default: standard error) is a terminal.
    """

    def __init__(self, budget: float, shown: bool, stream: TextIO | None = None) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._shown = shown and self._stream.isatty()
        self._budget = budget
        self._start = perf_counter()
        self._next = 0.0

    def __call__(self, what: str) -> None:
        """Show what is being measured now."""
        now = perf_counter()
        if not self._shown or now < self._next:
            return
        self._next = now + _EVERY
        spent = now - self._start
        full = min(int(_WIDTH * spent / self._budget), _WIDTH)
        bar = "#" * full + "." * (_WIDTH - full)
        self._stream.write(f"\r\x1b[K[{bar}] {spent:5.0f} s of {self._budget:.0f} s  {what[:40]}")
        self._stream.flush()

    def close(self) -> None:
        """Remove the bar."""
        if self._shown:
            self._stream.write("\r\x1b[K")
            self._stream.flush()
