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

NUMBERS: Final = 8
"""Numbers of a word, 64 bits each."""


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

    def stalled(self, begin: float, place: str) -> str:
        """Whether all ranks wait for each other, this one at ``place`` since ``begin`` (of the monotonic clock): ""
        or how the ranks have parted, the same on every rank."""
        return ""

    def listen(  # noqa: B027  # some are looked at by a watch
        self, look: Callable[[], None], place: Callable[[], str]
    ) -> None:
        """Have ``look`` called now and then while this rank waits in a collective; what it raises ends the wait.
        ``place`` says where the rank is."""
