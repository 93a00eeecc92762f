"""Objects in what holds them as text alone, and members that no code names: their methods read variables, too."""

from __future__ import annotations

import asyncio
import collections
import concurrent.futures
import contextvars
import copy
import ctypes
import functools
import importlib
import operator
import sys
import types
import typing
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from beside import Beside, base, equal

FACTOR = 1.0
"""What every method below reads."""
OTHER = sys.modules["module_found_by_name"] = types.ModuleType("module_found_by_name")
OTHER.__file__ = __file__
OTHER.FACTOR = 1.0  # type: ignore[attr-defined]  # what the test is about

pytestmark = pytest.mark.filterwarnings("ignore::hetspmd.errors.PlanPerValueWarning")


class Held:
    """An object with a number of its own."""

    def __init__(self) -> None:
        self.own = 1.0

    def read(self) -> float:
        return FACTOR * self.own

    @property
    def shown(self) -> float:
        return FACTOR * self.own


class Number(float):
    def read(self) -> float:
        return FACTOR


class Text(str):
    __slots__ = ()

    def read(self) -> float:
        return FACTOR


class Items(list[float]):
    def read(self) -> float:
        return FACTOR


class Table(dict[str, float]):
    def read(self) -> float:
        return FACTOR


class Pair(typing.NamedTuple):
    one: float

    def read(self) -> float:
        return FACTOR


class Old(collections.namedtuple("Old", "one")):  # the other way to make one
    __slots__ = ()

    def read(self) -> float:
        return FACTOR


class Array(np.ndarray[Any, Any]):
    def read(self) -> float:
        return FACTOR


class Meta(type):
    @property
    def read_of_class(cls) -> float:
        return FACTOR

    def __getitem__(cls, key: int) -> float:
        return FACTOR

    def __len__(cls) -> int:
        return int(FACTOR * 2)


class WithMeta(metaclass=Meta):
    pass


@functools.singledispatch
def chosen(value: object) -> float:
    return 0.0


@chosen.register
def _(value: float) -> float:
    return FACTOR


class Choosing:
    @functools.singledispatchmethod
    def read(self, value: object) -> float:
        return 0.0

    @read.register
    def _(self, value: float) -> float:
        return FACTOR


def objects() -> Any:
    made = np.empty(1, dtype=object)
    made[0] = ONE
    return made


def future(kind: Callable[[], Any]) -> Any:
    made = kind()
    made.set_result(ONE)
    return made


ONE = Held()
LOOP = asyncio.new_event_loop()
LOOP.close()
VARIABLE = contextvars.ContextVar("VARIABLE", default=ONE)
ASKING, CALLING = operator.attrgetter("shown"), operator.methodcaller("read")
HOLDERS: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "reference": (weakref.ref(ONE), lambda h: h()),
    "proxy": (weakref.proxy(ONE), lambda h: h),
    "weak values": (weakref.WeakValueDictionary({"x": ONE}), lambda h: h["x"]),
    "weak keys": (weakref.WeakKeyDictionary({ONE: ONE}), lambda h: next(iter(h.values()))),
    "weak set": (weakref.WeakSet([ONE]), lambda h: next(iter(h))),
    "context": (VARIABLE, lambda h: h.get()),
    "read only": (types.MappingProxyType({"x": ONE}), lambda h: h["x"]),
    "array": (objects(), lambda h: h[0]),
    "pointer": (ctypes.py_object(ONE), lambda h: h.value),
    "set": ({ONE}, lambda h: next(iter(h))),
    "frozen set": (frozenset([ONE]), lambda h: next(iter(h))),
    "key": ({ONE: 1}, lambda h: next(iter(h))),
    "values": ({"x": ONE}.values(), lambda h: next(iter(h))),
    "items": ({"x": ONE}.items(), lambda h: next(iter(h))[1]),
    "future": (future(concurrent.futures.Future), lambda h: h.result()),
    "awaited": (future(lambda: asyncio.Future(loop=LOOP)), lambda h: h.result()),
}
OF_BASES: dict[str, Any] = {
    "number": Number(1.0), "text": Text("x"), "list": Items([1.0]), "dict": Table(a=1.0), "named tuple": Pair(1.0),
    "old named tuple": Old(1.0), "array of a class": np.ones(1).view(Array), "number in a list": [Number(1.0)],
    "list in a list": [Items([1.0])], "named tuple in a dict": {0: Pair(1.0)},
}  # fmt: skip
NAME = ["fac", "tor"]


class Kept:
    factor = 1.0

    @staticmethod
    def factor_now() -> float:
        return FACTOR


def factor_now() -> float:
    return FACTOR


OTHER.factor_now = lambda: FACTOR  # type: ignore[attr-defined]  # what the test is about
OTHER.factor_now.__module__ = OTHER.__name__  # type: ignore[attr-defined]  # as above
KEPT = Kept()
UNNAMED: dict[str, Callable[[], float]] = {
    "property of a metaclass": lambda: WithMeta.read_of_class,
    "item of a metaclass": lambda: WithMeta[0],
    "length of a metaclass": lambda: float(len(WithMeta)),
    "chosen by a class": lambda: chosen(1.0),
    "method chosen by a class": lambda: Choosing().read(1.0),
    "asked by C": lambda: float(ASKING(ONE)),
    "called by C": lambda: float(CALLING(ONE)),
    "own module by its name": lambda: float(sys.modules[__name__].FACTOR),
    "module by its name": lambda: float(sys.modules["module_found_by_name"].FACTOR),
    "imported by its name": lambda: float(importlib.import_module("module_found_by_name").FACTOR),
    "attribute of a class": lambda: float(getattr(Kept, "".join(NAME))),
    "variable of a class": lambda: float(vars(Kept)["".join(NAME)]),
    "attribute of an object's class": lambda: float(getattr(type(KEPT), f"{NAME[0]}{NAME[1]}")),
    "function of a class": lambda: float(getattr(Kept, f"{''.join(NAME)}_now")()),
    "function of the module": lambda: float(globals()[f"{''.join(NAME)}_now"]()),
    "function of another module": lambda: float(getattr(OTHER, f"{''.join(NAME)}_now")()),
    "through a function": lambda: float(put.__globals__["".join(NAME).upper()]),
    "module by a computed name": lambda: float(sys.modules["_by_".join(("module_found", "name"))].FACTOR),
}
SHARED = [1.0]
"""What was set last: the threads of the ranks share it, and the first of them sets it."""


def put(what: str, value: float) -> None:
    if SHARED[0] == value:
        return
    SHARED[0] = value
    if what == "own":
        ONE.own = value
    else:
        Kept.factor = value
        globals()["FACTOR"] = OTHER.FACTOR = value  # type: ignore[attr-defined]  # as above


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    yield
    SHARED[0] = 0.0
    put("", 1.0)
    ONE.own = 1.0


class Sharing(Beside):
    """Keeps what it holds when it is copied: the ranks and the one device read the same object."""

    def __init__(self, forward: Callable[[Any, torch.Tensor], Any], held: Any = None) -> None:
        super().__init__(forward)
        self.held = held

    def __deepcopy__(self, memo: dict[int, Any]) -> Sharing:
        memo[id(self.held)] = self.held
        made = type(self).__new__(type(self))
        made.__dict__ = {name: copy.deepcopy(value, memo) for name, value in self.__dict__.items()}
        return made


def check(forward: Callable[[Any, torch.Tensor], Any], held: Any, what: str) -> None:
    losses = equal(lambda: Sharing(forward, held), lambda _, step: put(what, 2.0 if step > 1 else 1.0)).losses
    assert losses[2] > 1.5 * losses[1], "the step must read it"


@pytest.mark.parametrize("what", ["own", "factor"])
@pytest.mark.parametrize("name", HOLDERS)
def test_an_object_in_a_holder(name: str, what: str) -> None:
    held, get = HOLDERS[name]
    check(lambda model, x: base(model, x) * get(model.held).read(), held, what)


@pytest.mark.parametrize("name", OF_BASES)
def test_methods_of_what_derives_from_a_base_of_python(name: str) -> None:
    def forward(model: Any, x: torch.Tensor) -> torch.Tensor:
        held = model.held if hasattr(model.held, "read") else model.held[0]
        return base(model, x) * held.read()

    check(forward, OF_BASES[name], "factor")


@pytest.mark.parametrize("name", UNNAMED)
def test_members_that_no_code_names(name: str) -> None:
    read = UNNAMED[name]
    check(lambda model, x: base(model, x) * read(), None, "factor")
