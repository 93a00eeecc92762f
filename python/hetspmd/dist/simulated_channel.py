"""The channel of ranks that are threads of one process: see :mod:`hetspmd.dist.channel`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from hetspmd.dist.channel import Answer, Channel


class Meeting(Protocol):
    """Where the words of simulated ranks meet (:class:`hetspmd.dist.simulated_world.SimulatedCommunicator`)."""

    rank: int
    world: int
    meeting: Any

    def issue_value(self, kind: tuple[Any, ...], value: Any) -> int:
        """Leave a value there; its number."""

    def collect_values(self, number: int) -> list[Any]:
        """All ranks' values of this number. Blocks."""


class SimulatedChannel(Channel):
    """One rank's channel: numbers and objects meet as those of a collective do, in a world of their own."""

    def __init__(self, part: Meeting) -> None:
        self.rank, self.world = part.rank, part.world
        self._part = part

    def listen(self, look: Callable[[], None], place: Callable[[], str]) -> None:
        self._part.meeting.look_with(self.rank, look, place)

    def start(self, numbers: Sequence[int], said: Callable[[], Any]) -> Answer:
        return _Round(self._part, self._part.issue_value(("word",), (list(numbers), said)))


class _Round:
    def __init__(self, part: Meeting, number: int) -> None:
        self._part, self._number = part, number
        self._said: list[Callable[[], Any]] = []

    def ready(self) -> bool:
        return bool(self._part.meeting.ready(self._number))

    def numbers(self) -> list[list[int]]:
        words = self._part.collect_values(self._number)
        self._said = [said for _, said in words]
        return [numbers for numbers, _ in words]

    def objects(self) -> list[Any]:
        return [said() for said in self._said]
