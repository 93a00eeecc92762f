"""A container with more members than a trace looks into: its plain values are compared, objects in it refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from hetspmd.errors import TraceError
from hetspmd.trace.trace import trace

X = torch.ones(2, 3)
MANY = 10_001


class Entry:
    def __init__(self, scale: float) -> None:
        self.scale = scale


class Tabled(nn.Module):
    """It scales by an entry of a table that it has."""

    def __init__(self, table: Any, key: Any = 7) -> None:
        super().__init__()
        self.linear, self.table, self.key = nn.Linear(3, 3), table, key

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.table[self.key]
        while isinstance(found, (tuple, list)):
            found = found[0]
        return self.linear(x).sum() * getattr(found, "scale", found)


def deep(value: Any, depth: int) -> Any:
    return [value] if not depth else [deep(value, depth - 1)]


OF_OBJECTS: dict[str, Tabled] = {
    "a list": Tabled([Entry(float(i)) for i in range(MANY)]),
    "a dict": Tabled({i: Entry(float(i)) for i in range(MANY)}),
    "a tuple of pairs": Tabled(tuple((Entry(2.0), i) for i in range(MANY))),
    "one within another": Tabled([0, [Entry(2.0)] * MANY], 1),
    "deep": Tabled([deep(Entry(2.0), 50)], 0),
}
PLAIN: dict[str, Tabled] = {
    "numbers": Tabled([float(i) for i in range(MANY)]),
    "pairs": Tabled({i: (float(i), "a") for i in range(MANY)}),
    "tensors": Tabled([torch.tensor(1.0)] * MANY),
    "few objects": Tabled([Entry(float(i)) for i in range(100)]),
    "deep numbers": Tabled([deep(2.0, 50)], 0),
}


@pytest.mark.parametrize("name", OF_OBJECTS)
def test_objects_in_it_are_refused(name: str) -> None:
    with pytest.raises(
        TraceError, match=r"reads table.*cannot tell when the .*(Entry|tuple|list) in it changes"
    ):
        trace(OF_OBJECTS[name], (X,), {})


@pytest.mark.parametrize("name", PLAIN)
def test_plain_values_are_compared(name: str) -> None:
    graph = trace(PLAIN[name], (X,), {})
    assert graph.tensors


class Linked:
    def __init__(self, after: Linked | None, scale: float) -> None:
        self.after, self.scale = after, scale


class OfLinked(nn.Module):
    def __init__(self, length: int) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.first: Any = None
        for index in range(length):
            self.first = Linked(self.first, float(index))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        entry, scale = self.first, 1.0
        while entry is not None:
            entry, scale = entry.after, scale + entry.scale
        return self.linear(x).sum() * scale


def test_objects_that_are_linked() -> None:
    assert trace(OfLinked(20), (X,), {}).tensors
    with pytest.raises(TraceError, match=r"cannot tell when the .*Linked in it changes"):
        trace(OfLinked(60), (X,), {})
