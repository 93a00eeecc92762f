"""Items of containers by any key, and containers that become others: ranks train as one device or name the key."""

from __future__ import annotations

import collections
import enum
from typing import Any

import numpy as np
import pytest
import torch
from beside import Beside, base, equal, train
from torch import nn

from hetspmd.errors import HetspmdError, TraceError
from hetspmd.trace.trace import trace

X = torch.randn(4, 12)


class Kind(enum.Enum):
    ONE = 1


class Number(enum.IntEnum):
    ONE = 1


class Object:
    """Something that is equal to nothing else."""


KNOWN: dict[str, Any] = {
    "an enum": Kind.ONE, "an enum of ints": Number.ONE, "a dtype": torch.float32, "a device": torch.device("cpu"),
    "a shape": torch.Size([2, 3]), "a tuple with an enum": (Kind.ONE, 1), "a set": frozenset({1, 2}), "complex": 2j,
    "a name": "n", "a tuple": (1, "n"), "none": None, "infinity": float("inf"),
}  # fmt: skip
UNKNOWN: dict[str, Any] = {
    "the class of tensors": torch.Tensor, "the class of parameters": nn.Parameter, "a class": nn.Linear,
    "bytes": b"n", "an object": Object(), "a function": print, "a number of numpy": np.int64(3),
    "not a number": float("nan"), "a tuple with a class": (torch.Tensor, 1),
}  # fmt: skip


def counts(model: Any, x: torch.Tensor) -> torch.Tensor:
    """Counts under a key, and inside of a container under a key."""
    seen, key = model.seen, model.key
    seen[key] = seen.get(key, 0) + 1
    seen["inner"][key]["n"] += 1
    return base(model, x)


def counting(key: Any) -> Beside:
    model = Beside(counts, seen={"inner": {key: {"n": 0}}})
    vars(model)["key"] = key
    return model


@pytest.mark.parametrize("name", ["an enum", "a dtype", "a tuple with an enum"])
def test_items_are_left_under_keys_of_many_kinds(name: str) -> None:
    def look(model: Any) -> Any:
        return list(model.seen.items())

    equal(lambda: counting(KNOWN[name]), steps=3, look=look, plans=1)


@pytest.mark.parametrize("name", KNOWN)
def test_keys_of_many_kinds_are_part_of_a_plan(name: str) -> None:
    graph = trace(counting(KNOWN[name]), (X,), {})
    assert len(graph.host.counters) + len(graph.host.writes) == 2


@pytest.mark.parametrize("name", UNKNOWN)
def test_other_keys_are_refused_by_name(name: str) -> None:
    with pytest.raises(TraceError, match=r"under the key .* of seen.* of Beside.*test_keys\.py:\d+"):
        trace(counting(UNKNOWN[name]), (X,), {})


def by_class(model: Any, x: torch.Tensor) -> torch.Tensor:
    model.seen[type(x)] = model.seen.get(type(x), 0) + 1
    return base(model, x) * model.seen[type(x)]


def last_by_class(model: Any, x: torch.Tensor) -> torch.Tensor:
    model.seen[type(x)] = base(model, x).detach()
    return base(model, x)


def object_by_class(model: Any, x: torch.Tensor) -> torch.Tensor:
    model.seen.setdefault(nn.Parameter, Object())
    return base(model, x)


@pytest.mark.parametrize("forward", [by_class, last_by_class, object_by_class])
def test_tables_by_the_class_of_a_tensor_are_refused(forward: Any) -> None:
    with pytest.raises(TraceError, match=r"under the key <class .*(Tensor|Parameter)'> of seen of Beside"):
        trace(Beside(forward, seen={}), (X,), {})


def test_an_object_for_the_class_of_the_traces_tensors_is_left_out() -> None:
    def forward(model: Any, x: torch.Tensor) -> torch.Tensor:
        model.seen.setdefault(type(x), Object())
        return base(model, x)

    assert not trace(Beside(forward, seen={}), (X,), {}).host.writes


def test_a_value_under_an_unknown_key_is_read_where_another_is_written() -> None:
    def forward(model: Any, x: torch.Tensor) -> torch.Tensor:
        model.seen["last"] = x.mean()
        return base(model, x) * model.seen[Object]

    def each(model: Any, step: int) -> None:
        model.seen[Object] = 1.0 + step // 2

    equal(lambda: Beside(forward, seen={Object: 1.0, "last": 0}), each, plans=2)


def grows(model: Any, x: torch.Tensor) -> torch.Tensor:
    """Adds to its list, and to nothing else."""
    if isinstance(model.given, list):
        model.given[0] = model.given[0] + 1.0
    return base(model, x) * sum(model.given)


@pytest.mark.filterwarnings("ignore::hetspmd.errors.PlanPerValueWarning")
@pytest.mark.parametrize("other", [(3.0, 2.0), {1.0, 2.0}, frozenset({3.0}), collections.deque([1.0, 2.0])])
def test_a_container_may_become_one_of_another_kind(other: Any) -> None:
    def each(model: Any, step: int) -> None:
        if step == 1:
            model.given = other

    equal(lambda: Beside(grows, given=[1.0, 2.0]), each, steps=2)


def test_a_container_that_becomes_a_tuple_fails_as_on_one_device() -> None:
    def forward(model: Any, x: torch.Tensor) -> torch.Tensor:
        model.given[0] = x.mean()
        return base(model, x)

    def each(model: Any, step: int) -> None:
        if step == 1:
            model.given = (1.0, 2.0)

    with pytest.raises((HetspmdError, TypeError), match="'tuple' object does not support item assignment"):
        train(lambda: Beside(forward, given=[1.0, 2.0]), each)
