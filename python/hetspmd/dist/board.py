"""A board on which the ranks leave notes for each other: keys of the process group's store.

Calls of the store are made on a thread that is given up after a while, since the store may hang with the rank that
hosts it; the end of the process waits for it a little longer.
"""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, TypeVar

if TYPE_CHECKING:
    from hetspmd.trace.compat.groups import Store

T = TypeVar("T")


class Board:
    """This rank's view of the notes of ``world`` ranks; ``limit`` is in seconds, of an answer.

    ``prefix`` is of this set of ranks alone. ``silent``: the store has not answered once, and is not asked again.
    """

    def __init__(self, store: Store, prefix: str, rank: int, world: int, limit: float) -> None:
        self.store, self.prefix, self.rank, self.world, self.limit = store, prefix, rank, world, limit
        self._silences: list[bool] = []

    @property
    def silent(self) -> bool:
        """Whether the store has not answered once."""
        return bool(self._silences)

    def part(self, name: str) -> Board:
        """A board with keys of its own, which falls silent with this one."""
        other = Board(self.store, f"{self.prefix}/{name}", self.rank, self.world, self.limit)
        other._silences = self._silences
        return other

    def key(self, kind: str, rank: int) -> str:
        """Where a rank's note of a kind is."""
        return f"{self.prefix}/{kind}/{rank}"

    def write(self, kind: str, text: str) -> None:
        """Leave this rank's note of a kind; it is there when this returns."""

        def send() -> bool:
            self.store.set(self.key(kind, self.rank), text)
            return bool(self.store.check([self.key(kind, self.rank)]))  # set does not wait for an answer

        self.ask(send)

    def read(self, kind: str) -> dict[int, bytes]:
        """The other ranks' notes of a kind, those that there are."""

        def read() -> dict[int, bytes]:
            keys = {r: self.key(kind, r) for r in range(self.world) if r != self.rank}
            return {r: self.store.get(key) for r, key in keys.items() if self.store.check([key])}

        return self.ask(read) or {}

    def ask(self, call: Callable[[], T]) -> T | None:
        """What the store answers; None, from then on, if it does not."""
        if self.silent:
            return None
        answers: list[T] = []

        def body() -> None:
            try:
                answers.append(call())
            except RuntimeError:
                return  # the connection is lost

        thread = threading.Thread(target=body, daemon=True, name="hetspmd store")
        thread.start()
        thread.join(self.limit)
        if thread.is_alive():
            give_up(thread)
        if not answers:
            self._silences.append(True)
        return answers[0] if answers else None


_GIVEN_UP: list[threading.Thread] = []
"""Threads that still wait for a store's answer, or did when they were given up."""
_LEAVE: Final = 3.0
"""Seconds that a process which ends gives them."""


def give_up(thread: threading.Thread) -> None:
    """Go on without a thread that waits for the store."""
    _GIVEN_UP.append(thread)


@atexit.register
def _leave() -> None:
    """Let late answers come before the interpreter ends: a thread that comes back from the store to one that is
    gone ends the process by SIGABRT."""
    end = time.monotonic() + _LEAVE
    for thread in _GIVEN_UP:
        thread.join(max(0.0, end - time.monotonic()))
