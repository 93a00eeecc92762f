"""What a command is doing, in one line on standard error, for people only: nothing is written where that is no
terminal."""

from __future__ import annotations

import sys
import threading
from time import perf_counter
from types import TracebackType
from typing import TextIO

_BAR_CHARACTERS = 30
"""Characters of the bar, beside which a line has room for its text."""
_BAR_SECONDS = 0.1
"""Seconds between two states of the bar: more of them would take time from what is measured."""
_CLOCK_SECONDS = 0.5
"""Seconds between two states of the line that shows whole seconds."""


class _Line:
    """A line that is written over, by what others write as well, and removed in the end.

    ``stream``: standard error by default.
    """

    def __init__(self, shown: bool, stream: TextIO | None) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._shown = shown and self._stream.isatty()
        self._start = perf_counter()

    def _write(self, text: str) -> None:
        self._stream.write(f"\x1b[K{text}\r")
        self._stream.flush()

    def close(self) -> None:
        """Remove the line."""
        if self._shown:
            self._write("")


class Progress(_Line):
    """``[#####.....]  12 s of 60 s  what``: the part of the time budget, in seconds, that is spent.

    Silent unless ``shown`` and ``stream`` is a terminal.
    """

    def __init__(self, budget: float, shown: bool, stream: TextIO | None = None) -> None:
        super().__init__(shown, stream)
        self._budget = budget
        self._next = 0.0

    def __call__(self, what: str) -> None:
        """Show what is being measured now."""
        now = perf_counter()
        if not self._shown or now < self._next:
            return
        self._next = now + _BAR_SECONDS
        spent = now - self._start
        full = min(int(_BAR_CHARACTERS * spent / self._budget), _BAR_CHARACTERS)
        bar = "#" * full + "." * (_BAR_CHARACTERS - full)
        self._write(f"[{bar}] {spent:5.0f} s of {self._budget:.0f} s  {what[:40]}")


class Elapsed(_Line):
    """``   12 s  what``: the seconds since the beginning, and what is being done, where no end is known.

    A context manager. The seconds go on while one thing takes long; silent unless ``stream`` is a terminal.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        super().__init__(True, stream)
        self._what = ""
        self._ended = threading.Event()
        self._ticking = threading.Thread(target=self._tick, name="hetspmd progress", daemon=True)

    def __call__(self, what: str) -> None:
        """What is being done from now on."""
        self._what = what

    def __enter__(self) -> Elapsed:
        if self._shown:
            self._ticking.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        if self._shown:
            self._ticking.join()
        self.close()

    def _tick(self) -> None:
        while not self._ended.wait(_CLOCK_SECONDS):
            self._write(f"{perf_counter() - self._start:5.0f} s  {self._what}")
