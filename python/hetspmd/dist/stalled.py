"""Ranks that wait for each other at different places: found out before their patience ends, and said by name.

A rank that left out a backward waits for the words of the others at its next step, and they wait for it inside of
that backward. Nobody failed, and no word comes. So a rank that has waited for long writes on a board where it waits,
and counts how often it has looked. All ranks have parted if all of them are seen to wait on, in the same wait, at
places that are not the same. A large tensor on a slow network is no such case: those that still send or receive it
are at the same place, but for what the system has taken from the sender, which is little.
"""

from __future__ import annotations

import json
import time
from typing import Any, Final

from hetspmd.dist.board import Board
from hetspmd.dist.parting import apart

_EVERY: Final = 1.0
"""Seconds between two looks."""

_LOOKS: Final = 2
"""Looks of every rank that are seen within one wait of all."""


class Stalled:
    """This rank's view of the ranks that wait. ``board`` is of these ranks alone."""

    def __init__(self, board: Board) -> None:
        self._board = board
        self._looked, self._looks = 0.0, 0
        self._first: dict[int, dict[str, Any]] = {}

    def look(self, begin: float, place: str) -> str:
        """How the ranks have parted, "" if they have not; this one waits at ``place`` since ``begin``."""
        board = self._board
        if time.monotonic() - self._looked < _EVERY or board.silent:
            return ""
        self._looked, self._looks = time.monotonic(), self._looks + 1
        own = {"begin": begin, "place": place, "looks": self._looks}
        board.write("waits", json.dumps(own))
        for told in map(json.loads, board.read("parted").values()):
            if told["begins"][board.rank] == begin:
                return str(told["text"])
        waits = {rank: json.loads(text) for rank, text in board.read("waits").items()} | {board.rank: own}
        if len(waits) < board.world or not self._same_waits(waits):
            self._first = waits
            return ""
        text = apart({rank: waits[rank]["place"] for rank in sorted(waits)})
        if not text or any(waits[rank]["looks"] < self._first[rank]["looks"] + _LOOKS for rank in waits):
            return ""
        begins = [waits[rank]["begin"] for rank in range(board.world)]
        board.write("parted", json.dumps({"text": text, "begins": begins}))
        time.sleep(2.0 * _EVERY)  # the others look meanwhile, and not at a rank that has left
        return text

    def _same_waits(self, waits_by_rank: dict[int, dict[str, Any]]) -> bool:
        waits = [(waits_by_rank[rank]["begin"], waits_by_rank[rank]["place"]) for rank in sorted(waits_by_rank)]
        return waits == [(self._first[r]["begin"], self._first[r]["place"]) for r in sorted(self._first)]
