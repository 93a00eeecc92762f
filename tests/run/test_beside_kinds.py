"""Values of many kinds that forward reads and that change between steps: none stays as the trace has found it."""

from __future__ import annotations

import array
import collections
import copy
import ctypes
import dataclasses
import datetime
import decimal
import fractions
import functools
import logging
import multiprocessing
import os
import re
import sys
import threading
import types
import weakref
from contextvars import ContextVar
from typing import Any

import numpy as np
import pytest
import torch
from beside import Beside, X, base, equal, train
from torch import nn

from hetspmd.errors import TraceError
from hetspmd.trace.trace import trace

pytestmark = pytest.mark.filterwarnings("ignore::hetspmd.errors.PlanPerValueWarning")

VARIABLE: ContextVar[float] = ContextVar("VARIABLE", default=1.0)


class Slotted:
    """An object without a dict."""

    __slots__ = ("k",)

    def __init__(self) -> None:
        self.k = 1.0


@dataclasses.dataclass(slots=True)
class Settings:
    """A dataclass without a dict."""

    k: float = 1.0


class Named(dict[str, Any]):
    """A dict whose items are attributes, as configurations are; what it does not have raises KeyError."""

    __getattr__ = dict.__getitem__
    __setattr__ = dict.__setitem__  # type: ignore[assignment]  # as those do

    def __deepcopy__(self, memo: Any) -> Named:
        return Named(copy.deepcopy(dict(self), memo))


class Annotated(list[float]):
    """A list with an attribute."""

    k: float


class Level(float):
    """A number with a name."""


class Mode(str):
    """A string of its own class."""


class Held:
    """An object."""

    def __init__(self, k: float = 1.0) -> None:
        self.k = k

    def scale(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden * self.k

    def loss(self, model: Any, x: torch.Tensor) -> torch.Tensor:
        return base(model, x) * self.k


class Unknown:
    """Stands for an object of a library in C: it has no attributes, and cannot be pickled."""

    __slots__ = ()

    def __reduce_ex__(self, _protocol: Any) -> Any:
        raise TypeError("cannot be pickled")


def _annotated() -> Annotated:
    made = Annotated()
    made.k = 1.0
    return made


def _nested(depth: int, inner: Any) -> list[Any]:
    return [inner] if not depth else [_nested(depth - 1, inner)]


def _innermost(value: Any) -> Any:
    while isinstance(value[0], list):
        value = value[0]
    return value


def _optimizer() -> list[torch.optim.Optimizer]:
    return [torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)]


Kind = tuple[Any, Any, Any]
"""What the model holds, how forward reads it, and how it gets another value."""

KINDS: dict[str, Kind] = {
    "slots": (Slotted, lambda v: v.k, lambda v, k: setattr(v, "k", k)),
    "a dataclass of slots": (Settings, lambda v: v.k, lambda v, k: setattr(v, "k", k)),
    "a dict with attributes": (lambda: Named(k=1.0), lambda v: v.k, lambda v, k: v.update(k=k)),
    "one in another": (lambda: Named(m=Named(k=1.0)), lambda v: v.m.k, lambda v, k: v["m"].update(k=k)),
    "a list with an attribute": (_annotated, lambda v: v.k, lambda v, k: setattr(v, "k", k)),
    "UserDict": (lambda: collections.UserDict(k=1.0), lambda v: v["k"], lambda v, k: v.update(k=k)),
    "ChainMap": (lambda: collections.ChainMap({"k": 1.0}), lambda v: v["k"], lambda v, k: v.update(k=k)),
    "array": (lambda: array.array("d", [1.0]), lambda v: v[0], lambda v, k: v.__setitem__(0, k)),
    "bytearray": (lambda: bytearray(b"\1"), lambda v: v[0], lambda v, k: v.__setitem__(0, int(k))),
    "numpy": (lambda: np.ones(200_000), lambda v: float(v[7]), lambda v, k: v.__setitem__(7, k)),
    "ctypes": (lambda: ctypes.c_double(1.0), lambda v: v.value, lambda v, k: setattr(v, "value", k)),
    "deep lists": (
        lambda: _nested(9, 1.0), lambda v: _innermost(v)[0], lambda v, k: _innermost(v).__setitem__(0, k),
    ),
    "an object in deep lists": (
        lambda: _nested(9, Held()), lambda v: _innermost(v)[0].k, lambda v, k: setattr(_innermost(v)[0], "k", k),
    ),
    "an object in a set": (
        lambda: {Held()}, lambda v: next(iter(v)).k, lambda v, k: setattr(next(iter(v)), "k", k),
    ),
    "an optimizer": (
        _optimizer, lambda v: v[0].param_groups[0]["lr"],
        lambda v, k: v[0].param_groups[0].__setitem__("lr", k),
    ),
    "a tensor by its data": (lambda: torch.ones(2), lambda v: v, lambda v, k: v.data.fill_(k).sum()),
    "a tensor by numpy": (lambda: torch.ones(2), lambda v: v, lambda v, k: v.numpy().fill(k)),
    "a large tensor": (lambda: torch.ones(600_000), lambda v: v[5], lambda v, k: v.data[5].fill_(k)),
    "a method of an object": (
        lambda: Held().scale, lambda v: v(torch.ones(1)).sum(), lambda v, k: setattr(v.__self__, "k", k),
    ),
    "a partial of an object": (
        lambda: functools.partial(Held.scale, Held()), lambda v: v(torch.ones(1)).sum(),
        lambda v, k: setattr(v.args[0], "k", k),
    ),
    "a method of a dict": (lambda: {"k": 1.0}.__getitem__, lambda v: v("k"), lambda v, k: v.__self__.update(k=k)),
}  # fmt: skip

REPLACED: dict[str, Kind] = {
    "Fraction": (lambda k: fractions.Fraction(int(k)), float, None),
    "Decimal": (lambda k: decimal.Decimal(int(k)), float, None),
    "timedelta": (lambda k: datetime.timedelta(seconds=k), lambda v: v.total_seconds(), None),
    "a float of its own class": (Level, lambda v: v, None),
    "a string of its own class": (lambda k: Mode(f"mode {k}"), lambda v: float(v[5:]), None),
    "a bound method": (lambda k: Held(k).scale, lambda v: v(torch.ones(1)).sum(), None),
    "an object": (Held, lambda v: v.k, None),
    "a slotted dataclass": (Settings, lambda v: v.k, None),
}
"""As above, but each value is a new one, made of a number."""

SHARED: dict[str, Kind] = {
    "a view of a dict": (lambda: 0, lambda v: VIEW["k"], lambda v, k: VIEWED.update(k=k)),
    "a weak reference": (lambda: weakref.ref(WEAKLY), lambda v: v().k, lambda v, k: setattr(WEAKLY, "k", k)),
    "a context variable": (lambda: 0, lambda v: VARIABLE.get(), lambda v, k: VARIABLE.set(k)),
    "the environment": (
        lambda: 0, lambda v: float(os.environ["HETSPMD_TEST_K"]),
        lambda v, k: os.environ.__setitem__("HETSPMD_TEST_K", str(k)),
    ),
    "shared memory": (lambda: 0, lambda v: COUNT.value, lambda v, k: setattr(COUNT, "value", k)),
}  # fmt: skip
"""Values that lie outside the model, which all ranks of a test share."""
VIEWED, WEAKLY, COUNT = {"k": 1.0}, Held(), multiprocessing.Value("d", 1.0)
VIEW = types.MappingProxyType(VIEWED)


def _groups(table: dict[str, Kind], size: int) -> list[tuple[str, ...]]:
    names = list(table)
    return [tuple(names[i : i + size]) for i in range(0, len(names), size)]


@pytest.mark.parametrize("names", _groups(KINDS | SHARED, 4), ids=", ".join)
def test_what_is_changed_in_place_is_seen(names: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step changes one value of the group."""
    monkeypatch.setenv("HETSPMD_TEST_K", "1.0")
    kinds = [(KINDS | SHARED)[name] for name in names]

    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        loss = base(m, x)
        for index, (_, read, _) in enumerate(kinds):
            loss = loss * read(getattr(m, f"v{index}"))
        return loss.sum()

    def each(m: Any, step: int) -> None:
        for index, (_, _, change) in enumerate(kinds):
            change(getattr(m, f"v{index}"), 2.0 if index < step else 1.0)

    equal(
        lambda: Beside(forward, **{f"v{i}": make() for i, (make, _, _) in enumerate(kinds)}),
        each,
        steps=len(names) + 1,
    )


@pytest.mark.parametrize("names", _groups(REPLACED, 4), ids=", ".join)
def test_what_is_replaced_is_seen(names: tuple[str, ...]) -> None:
    kinds = [REPLACED[name] for name in names]

    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        loss = base(m, x)
        for index, (_, read, _) in enumerate(kinds):
            loss = loss * read(getattr(m, f"v{index}"))
        return loss.sum()

    def each(m: Any, step: int) -> None:
        for index, (make, _, _) in enumerate(kinds):
            setattr(m, f"v{index}", make(2.0 if index < step else 1.0))

    equal(
        lambda: Beside(forward, **{f"v{i}": make(1.0) for i, (make, _, _) in enumerate(kinds)}), each, steps=5
    )


LOSSES: dict[str, Any] = {
    "a method": lambda held: held.loss,
    "a partial of a function": lambda held: functools.partial(Held.loss, held),
    "a partial of a method": lambda held: functools.partial(held.loss),
    "a function around": lambda held: lambda model, x: held.loss(model, x),
}


@pytest.mark.parametrize("name", LOSSES)
def test_the_object_of_a_loss_is_followed(name: str) -> None:
    held = Held()
    loss = LOSSES[name](held)
    _, ranks = train(
        lambda: Beside(base),
        lambda m, i: setattr(held, "k", 1.0 + i),
        steps=3,
        loss=loss,
    )
    single, _ = train(
        lambda: Beside(lambda m, x: loss(m, x)), lambda m, i: setattr(held, "k", 1.0 + i), steps=3
    )
    for rank in ranks:
        torch.testing.assert_close(rank.losses, single.losses, rtol=1e-5, atol=1e-7)


def test_what_cannot_be_compared_is_refused() -> None:
    """An object of a library in C that says nothing of itself."""
    with pytest.raises(
        TraceError, match=r"reads unknown of Beside at .*test_beside_kinds\.py:\d+, and a plan cannot"
    ):
        trace(Beside(lambda m, x: base(m, x) * (m.unknown is not None), unknown=Unknown()), (X,), {})


def test_tools_are_no_values() -> None:
    """Locks, loggers, files, patterns and the like neither change a plan nor are refused."""
    tools = (
        threading.Lock(),
        threading.Event(),
        logging.getLogger("a"),
        re.compile("a"),
        sys.stdout,
        np.float32,
    )

    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        lock, event, logger, pattern, stream, kind = tools
        with lock:
            event.set()
            logger.debug("no one listens")
            stream.write("")
            return base(m, x) * len(pattern.findall("aa")) * float(kind(1.0))

    equal(lambda: Beside(forward), plans=1)
