"""A way of its own between the ranks, for short words that must not meet the program's collectives.

Every rank says something in every round, and the rounds are the same on all ranks, whatever else they do. What is
said travels while the rank goes on; nobody need come to the same collective of a program for it to arrive. A
word is a few numbers, which always travel, and an object behind them, which is fetched where the numbers differ.
"""

from __future__ import annotations

import json
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol

import torch

if TYPE_CHECKING:
    from hetspmd.dist.board import Board
    from hetspmd.dist.communicator import Communicator, Work

__all__ = ["NUMBERS", "Answer", "BoardChannel", "Channel"]

NUMBERS: Final = 8
"""Numbers of a word, 64 bits each."""

_LATE: Final = 10.0
"""Seconds in which a rank whose word is here has put the object behind it on the board."""


class Answer(Protocol):
    """A round on its way."""

    def ready(self) -> bool:
        """Whether :meth:`numbers` would return at once."""

    def numbers(self) -> list[list[int]]:
        """Every rank's numbers, in rank order. Blocks; asked once."""

    def objects(self) -> list[Any]:
        """The object behind every rank's word, None where it did not come. Blocks; all ranks ask in the same
        round."""


class Channel(ABC):
    """The ranks' channel."""

    rank: int
    world: int

    @abstractmethod
    def start(self, numbers: Sequence[int], said: Callable[[], Any]) -> Answer:
        """Say :data:`NUMBERS` numbers, and what makes the object, of what JSON knows; it may be called by any
        thread."""

    def listen(  # noqa: B027  # some are looked at by a watch
        self, look: Callable[[], None], place: Callable[[], str]
    ) -> None:
        """Have ``look`` called now and then while this rank waits in a collective; what it raises ends the wait.
        ``place`` says where the rank is."""


class BoardChannel(Channel):
    """Numbers by an all-gather of a group of the host's own, objects by keys of a store."""

    def __init__(self, group: Communicator, board: Board) -> None:
        self.rank, self.world = group.rank, group.world
        self._group, self._board = group, board
        self._round = 0

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
        found: list[list[int]] = self.every.view(-1, NUMBERS).tolist()
        return found

    def objects(self) -> list[Any]:
        kind = f"round {self.round}"
        own = json.dumps(self.said())
        self.board.write(kind, own)
        found: dict[int, Any] = {self.board.rank: json.loads(own)}
        end = time.monotonic() + _LATE
        while len(found) < self.board.world and time.monotonic() < end and not self.board.silent:
            found.update((rank, json.loads(text)) for rank, text in self.board.read(kind).items())
            if len(found) < self.board.world:
                time.sleep(0.02)
        return [found.get(rank) for rank in range(self.board.world)]
