"""The channel of ranks that are processes: see :mod:`hetspmd.dist.channel`."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from hetspmd.dist.board import Board
from hetspmd.dist.channel import NUMBERS, Answer, Channel
from hetspmd.dist.communicator import Communicator, Work
from hetspmd.dist.stalled import Stalled

_LATE: Final = 10.0
"""Seconds in which a rank whose word is here has put the object behind it on the board."""


class BoardChannel(Channel):
    """Numbers by an all-gather of a group of the host's own, objects by keys of a store. A wait looks at ``quick``,
    the same keys with less patience for the store, which may hang with the rank that hosts it."""

    def __init__(self, group: Communicator, board: Board, quick: Board) -> None:
        self.rank, self.world = group.rank, group.world
        self._group, self._board = group, board
        self._round = 0
        self._stalled = Stalled(quick)

    def stalled(self, begin: float, place: str) -> str:
        return self._stalled.look(begin, place)

    def start(self, numbers: Sequence[int], said: Callable[[], Any]) -> Answer:
        self._round += 1
        own = torch.tensor(numbers, dtype=torch.int64)
        every = torch.empty(self.world * NUMBERS, dtype=torch.int64)
        work = self._group.all_gather(every, own)
        return _Round(self._board, self._round, work, every, said)


@dataclass
class _Round:
    board: Board
    round: int
    work: Work
    every: torch.Tensor
    said: Callable[[], Any]

    def ready(self) -> bool:
        return self.work.is_completed()

    def numbers(self) -> list[list[int]]:
        self.work.wait()
        rows: list[list[int]] = self.every.view(-1, NUMBERS).tolist()
        return rows

    def objects(self) -> list[Any]:
        kind = f"round {self.round}"
        own = json.dumps(self.said())
        self.board.write(kind, own)
        words: dict[int, Any] = {self.board.rank: json.loads(own)}
        end = time.monotonic() + _LATE
        while len(words) < self.board.world and time.monotonic() < end and not self.board.silent:
            words.update((rank, json.loads(text)) for rank, text in self.board.read(kind).items())
            if len(words) < self.board.world:
                time.sleep(0.02)
        return [words.get(rank) for rank in range(self.board.world)]
