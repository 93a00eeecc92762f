"""What forward changes in place: kept right, or refused by name; a trace changes nothing."""

from __future__ import annotations

import array
import collections
import ctypes
import dataclasses
import io
import multiprocessing
import queue
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from beside import Beside, X, base, equal
from small_plans import cluster

import hetspmd
from hetspmd.errors import TraceError


class Slotted:
    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 1


@dataclasses.dataclass(slots=True)
class Record:
    count: int = 1


class Derived(Slotted):
    """Has a dict beside its slots."""


class Late(Slotted):
    __slots__ = ("table",)


def _counted(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.state.count += 1
    return base(m, x)


def _scaled(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.state.count += 1
    return base(m, x) * m.state.count


def _cached(m: Any, x: torch.Tensor) -> torch.Tensor:
    if not hasattr(m.state, "table"):
        m.state.table = torch.arange(12.0)
    return m.down(m.up(x * m.state.table)).square().mean()  # type: ignore[no-any-return]


def _item(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.state["n"] = m.state.get("n", 0) + 1
    return base(m, x) * m.state["n"]


def _put(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.state.put(1)
    return base(m, x)


KEPT: dict[str, tuple[Any, Callable[[], Any], Callable[[Any], Any]]] = {
    "slots": (_scaled, Slotted, lambda s: s.count),
    "slots of a dataclass": (_counted, Record, lambda s: s.count),
    "slots and a dict": (_counted, Derived, lambda s: s.count),
    "a slot that is filled": (_cached, Late, lambda s: s.table.tolist()),
    "a UserDict": (_item, collections.UserDict, lambda s: s["n"]),
    "a ChainMap": (_item, lambda: collections.ChainMap({}), lambda s: s["n"]),
    "a queue": (_put, queue.Queue, lambda s: s.qsize()),
}


@pytest.mark.filterwarnings("ignore::hetspmd.errors.PlanPerValueWarning")
@pytest.mark.parametrize("name", KEPT)
def test_what_an_object_holds_is_kept_right(name: str) -> None:
    forward, make, look = KEPT[name]

    class Model(Beside):
        def __deepcopy__(self, _memo: Any) -> Model:
            made = Model(forward, state=make())
            made.load_state_dict(self.state_dict())
            return made

    equal(lambda: Model(forward, state=make()), look=lambda m: look(m.state), steps=3)


@pytest.mark.parametrize("kind", [Slotted, Record, Derived])
def test_what_an_object_holds_may_change(kind: Any) -> None:
    def each(model: Any, step: int) -> None:
        model.state.count = 1 + step // 2

    equal(lambda: Beside(lambda m, x: base(m, x) * m.state.count, state=kind()), each)


# functions -------------------------------------------------------------------------------------------------------


def _attribute() -> tuple[Any, Callable[[], Any]]:
    def f(m: Any, x: torch.Tensor) -> torch.Tensor:
        f.n += 1  # type: ignore[attr-defined]
        return base(m, x) * f.n  # type: ignore[attr-defined, no-any-return]

    f.n = 0  # type: ignore[attr-defined]
    return f, lambda: f.n  # type: ignore[attr-defined]


def _new_attribute() -> tuple[Any, Callable[[], Any]]:
    def f(m: Any, x: torch.Tensor) -> torch.Tensor:
        f.n = getattr(f, "n", 0) + 1  # type: ignore[attr-defined]
        return base(m, x)

    return f, lambda: f.n  # type: ignore[attr-defined]


def _default() -> tuple[Any, Callable[[], Any]]:
    def f(m: Any, x: torch.Tensor, cache: dict[str, int] = {}) -> torch.Tensor:  # noqa: B006  # as some models do
        cache["n"] = cache.get("n", 0) + 1
        return base(m, x) * cache["n"]

    return f, lambda: f.__defaults__[0]["n"]  # type: ignore[index]


def _keyword() -> tuple[Any, Callable[[], Any]]:
    def f(m: Any, x: torch.Tensor, *, cache: dict[str, int] = {}) -> torch.Tensor:  # noqa: B006  # as some models do
        cache["n"] = cache.get("n", 0) + 1
        return base(m, x)

    return f, lambda: f.__kwdefaults__["cache"]["n"]


def _object() -> tuple[Any, Callable[[], Any]]:
    state = Slotted()

    def f(m: Any, x: torch.Tensor, state: Slotted = state) -> torch.Tensor:
        state.count += 1
        return base(m, x) * state.count

    return f, lambda: state.count


@pytest.mark.filterwarnings("ignore::hetspmd.errors.PlanPerValueWarning")
@pytest.mark.parametrize("make", [_attribute, _new_attribute, _default, _keyword, _object])
def test_what_a_function_holds_is_kept_right(make: Callable[[], tuple[Any, Callable[[], Any]]]) -> None:
    class Model(Beside):
        def __init__(self) -> None:
            forward, look = make()
            super().__init__(forward, look=look)

        def __deepcopy__(self, _memo: Any) -> Model:
            made = Model()
            made.load_state_dict(self.state_dict())
            return made

    equal(Model, look=lambda m: m.look(), steps=3)


# what is refused -------------------------------------------------------------------------------------------------


def _added(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.state[0] += 1
    return base(m, x)


def _value(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.state.value += 1
    return base(m, x)


def _written(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.state.write("x")
    return base(m, x)


def _in_a_list(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.state[0][0] += 1
    return base(m, x)


REFUSED: dict[str, tuple[Any, Callable[[], Any], Callable[[Any], Any]]] = {
    "numpy": (_added, lambda: np.zeros(2), lambda s: s.tolist()),
    "numpy in a list": (_in_a_list, lambda: [np.zeros(2)], lambda s: s[0].tolist()),
    "an array": (_added, lambda: array.array("d", [0.0]), lambda s: s.tolist()),
    "bytes": (_added, lambda: bytearray(2), bytes),
    "a number of C": (_value, lambda: ctypes.c_int(0), lambda s: s.value),
    "a shared number": (_value, lambda: multiprocessing.Value("d", 0.0), lambda s: s.value),
    "a file": (_written, io.StringIO, lambda s: (s.getvalue(), s.tell())),
    "a queue of C": (_put, queue.SimpleQueue, lambda s: s.qsize()),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_changed_in_place_is_refused_and_left_as_it_was(name: str) -> None:
    forward, make, look = REFUSED[name]
    model = Beside(forward, state=make())
    before = look(model.state)
    with pytest.raises(
        TraceError, match=r"forward changes state(\[0\])? of Beside at .*test_in_place.py:\d+"
    ):
        hetspmd.compile(model, (X,), cluster(4, 2, 1, 1))
    assert look(model.state) == before


def test_a_compilation_changes_nothing() -> None:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        m.state.count += 1
        m.items["n"] = m.items.get("n", 0) + 1
        return base(m, x)

    model = Beside(forward, state=Slotted(), items=collections.UserDict())
    hetspmd.compile(model, (X,), cluster(4, 2, 1, 1))
    assert model.state.count == 1
    assert not model.items


def test_an_array_that_is_scratch_is_no_state() -> None:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        rows = np.zeros(2)
        rows[0] += m.rows[0]
        return base(m, x) * float(rows[0])

    equal(lambda: Beside(forward, rows=np.ones(2)), steps=2)
