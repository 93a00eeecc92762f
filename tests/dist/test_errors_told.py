"""Errors of rank 0 reach the other ranks as they are, whatever their classes are made of."""

from __future__ import annotations

import pickle
from types import SimpleNamespace
from typing import Any

import pytest

from hetspmd import errors
from hetspmd.dist.agreement import agreed_content, agreed_plan
from hetspmd.errors import (
    HetspmdError,
    MemoryBoundError,
    MemoryLimitError,
    RankFailedError,
    StepMemoryError,
)

CLASSES = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, HetspmdError)]
MADE = {
    MemoryLimitError: MemoryLimitError({1: (3, 4)}, ["a", "b"]).leave_out({"recompute"}),
    MemoryBoundError: MemoryBoundError({"parameters": 7}, 3, [("a", 2), ("b", 1)], micro_batches={}, enough=None),
    StepMemoryError: StepMemoryError(5, 4),
    RankFailedError: RankFailedError([2], "died", 0, 1.5, "seen", "where", "step 3"),
}


def error_of(kind: type[HetspmdError]) -> HetspmdError:
    return MADE[kind] if kind in MADE else kind("what, where and how to mend it")


class Local(HetspmdError):
    """Of a user's own rule, with something that cannot be sent."""

    def __init__(self, place: int) -> None:
        self.held = lambda: place
        super().__init__(f"at {place}")


def told(error: BaseException, agreed: Any) -> tuple[BaseException, BaseException]:
    """What rank 0 and rank 1 raise where rank 0 fails with an error."""
    sent: list[Any] = []

    def failing() -> Any:
        raise error

    def exchange(value: Any) -> list[Any]:
        sent.append(value)
        return [pickle.loads(pickle.dumps(sent[0])), None]

    caught = []
    for rank in (0, 1):
        communicator = SimpleNamespace(world=2, rank=rank, exchange=exchange)
        with pytest.raises(BaseException) as raised:
            agreed(communicator, failing)
        caught.append(raised.value)
    return caught[0], caught[1]


@pytest.mark.parametrize("agreed", [agreed_plan, agreed_content])
@pytest.mark.parametrize("kind", CLASSES)
def test_every_error_is_the_same_on_other_ranks(kind: type[HetspmdError], agreed: Any) -> None:
    error = error_of(kind)
    first, other = told(error, agreed)
    assert first is error
    assert other is not error
    assert type(other) is kind
    assert str(other) == str(error)
    assert other.args == error.args
    assert vars(other) == vars(error)


def test_classes_with_arguments_of_their_own_are_among_them() -> None:
    assert {kind for kind in CLASSES if "__init__" in vars(kind)} == set(MADE)


@pytest.mark.parametrize("agreed", [agreed_plan, agreed_content])
def test_an_error_that_cannot_be_sent_is_told_in_words(agreed: Any) -> None:
    _, other = told(Local(3), agreed)
    assert type(other) is HetspmdError
    assert str(other) == "at 3"
    first, other = told(ZeroDivisionError("no"), agreed)
    assert isinstance(first, ZeroDivisionError)
    assert type(other) is HetspmdError
    assert "ZeroDivisionError: no" in str(other)


def test_mends_can_be_left_out_of_an_error_that_was_told() -> None:
    _, other = told(error_of(MemoryLimitError), agreed_plan)
    assert isinstance(other, MemoryLimitError)
    assert "micro_batches" in str(other)
    assert "micro_batches" not in str(other.leave_out({"micro_batches"}))
