"""A collective that was started, and what it holds until it is waited for.

Memory follows completion: a started collective holds its source, or a padded copy of it, only until the backend
is done with it. Whenever a collective is started or waited for, those that have completed meanwhile let go of
all but their results, and padding is cut off, however much later they are waited for. A plan has predicted when
that is; the start of another collective waits for those that should have completed by then
(:func:`hetspmd.lower.calls.start`), so that a slow link does not make a rank hold more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, TypeAlias, TypeVar

import torch

from hetspmd.dist.communicator import Communicator, Work

Result = TypeVar("Result")


class Pending(Generic[Result]):
    """A collective on its way; :func:`wait` gives its result, once.

    ``finish`` makes the result of the primitives' outputs when all ``works`` are complete. ``early``: it makes
    what is held smaller, so that it is called as soon as they are found to be.
    """

    __slots__ = ("_communicator", "_early", "_finish", "_result", "_works")

    def __init__(
        self,
        works: Sequence[Work],
        finish: Callable[[], Result],
        communicator: Communicator | None = None,
        *,
        early: bool = False,
    ) -> None:
        self._works = list(works)
        self._finish: Callable[[], Result] | None = finish
        self._communicator = communicator
        self._early = early
        self._result: Result | None = None
        if communicator is not None:
            communicator.in_flight.append(self)

    def settle(self) -> bool:
        """Let go of what complete primitives needed; whether all of them are complete. Never blocks."""
        self._works = [work for work in self._works if not _over(work)]
        if self._works:
            return False
        if self._early:
            self._complete()
        return True

    def arrive(self) -> None:
        """Wait until all primitives are complete, and let go of what they needed; the result is waited for later."""
        while self._works:
            self._works[0].wait()
            del self._works[0]
        if self._early:
            self._complete()

    def wait(self) -> Result:
        """Wait and give the result."""
        while self._works:
            self._works[0].wait()
            del self._works[0]
        if self._communicator is not None:
            self._communicator.settle()
        self._complete()
        result, self._result = self._result, None
        assert result is not None, "a collective is waited for once"
        return result

    def _complete(self) -> None:
        if self._finish is not None:
            self._result, self._finish = self._finish(), None


PendingTensor: TypeAlias = Pending[torch.Tensor]


def _over(work: Work) -> bool:
    """Whether work is complete, and waited for then: its error is raised, a GPU's stream is told."""
    if not work.is_completed():
        return False
    work.wait()
    return True
