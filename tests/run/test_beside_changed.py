"""What a function, a class or an object does is changed between steps, while each stays the same object."""

from __future__ import annotations

import enum
import functools
import inspect
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from beside import Beside, base, equal
from torch import nn

pytestmark = pytest.mark.filterwarnings("ignore::hetspmd.errors.PlanPerValueWarning")


def one() -> float:
    return 1.0


def two() -> float:
    return 2.0


CODES = {1.0: one.__code__, 2.0: two.__code__}
LIST = [1.0]


def coded() -> float:
    return 1.0


def positional(factor: float = 1.0) -> float:
    return factor


def named(*, factor: float = 1.0) -> float:
    return factor


def mixed(factor: float = 1.0, more: list[float] = LIST) -> float:
    return factor * more[0]


@functools.singledispatch
def chosen(value: object) -> float:
    return 1.0


class Choosing:
    @functools.singledispatchmethod
    def read(self, value: object) -> float:
        return 1.0


class One:
    def read(self) -> float:
        return 1.0


class Two:
    def read(self) -> float:
        return 2.0


class Derived(One):
    pass


class Module(nn.Module):
    def forward(self) -> float:
        return 1.0


class OtherModule(Module):
    def forward(self) -> float:
        return 2.0


class Kinds(enum.Enum):
    LIST = [1.0]  # noqa: RUF012  # what the test is about
    TABLE = {"factor": 1.0}  # noqa: RUF012  # as above
    NUMBER = 3

    def __init__(self, _value: object) -> None:
        self.factor = 1.0


class Config:
    """Keeps its fields past what it does when it is asked for an attribute."""

    def __init__(self) -> None:
        object.__setattr__(self, "_fields", {"factor": 1.0})

    def __getattr__(self, name: str) -> Any:
        try:
            return object.__getattribute__(self, "_fields")[name]
        except KeyError:
            raise AttributeError(name) from None

    def __setattr__(self, name: str, value: Any) -> None:
        self._fields[name] = value


class Plain:
    def __init__(self) -> None:
        self.factor = 1.0


FACTOR = 1.0


class Asked:
    def __getattribute__(self, name: str) -> Any:
        return FACTOR if name == "factor" else object.__getattribute__(self, name)


def module(factor: float) -> Any:
    made = types.ModuleType("module_of_a_factor")
    made.__file__ = __file__
    made.FACTOR = factor  # type: ignore[attr-defined]  # what the test is about
    return made


LAZY = sys.modules["module_with_getattr"] = types.ModuleType("module_with_getattr")
LAZY.__file__ = __file__
exec("_factor = 1.0\ndef __getattr__(name):\n    return _factor", vars(LAZY))
sys.modules["module_of_a_factor"] = module(1.0)
OBJECT, DERIVED, CHOOSING, CONFIG, PLAIN, ASKED = One(), Derived(), Choosing(), Config(), Plain(), Asked()
MODULE = Module()


def imported() -> float:
    import module_of_a_factor  # type: ignore[import-not-found]  # it was made above

    return module_of_a_factor.FACTOR  # type: ignore[no-any-return]  # as above


def register(on: Callable[..., Any], value: float) -> None:
    on(float, (lambda *_: 2.0) if value > 1 else (lambda *_: 1.0))


CHANGED: dict[str, tuple[Callable[[], Any], Callable[[float], object]]] = {
    "code": (coded, lambda v: setattr(coded, "__code__", CODES[v])),
    "defaults": (positional, lambda v: setattr(positional, "__defaults__", (v,))),
    "named defaults": (named, lambda v: setattr(named, "__kwdefaults__", {"factor": v})),
    "named default in place": (named, lambda v: (named.__kwdefaults__ or {}).__setitem__("factor", v)),
    "one of several defaults": (mixed, lambda v: setattr(mixed, "__defaults__", (v, LIST))),
    "function of a class": (lambda: chosen(1.0), lambda v: register(chosen.register, v)),
    "method of a class": (
        lambda: CHOOSING.read(1.0),
        lambda v: register(vars(Choosing)["read"].register, v),
    ),
    "bases": (lambda: DERIVED.read(), lambda v: setattr(Derived, "__bases__", (Two if v > 1 else One,))),
    "class of an object": (
        lambda: OBJECT.read(),
        lambda v: setattr(OBJECT, "__class__", Two if v > 1 else One),
    ),
    "class of a module": (
        lambda: MODULE(),
        lambda v: setattr(MODULE, "__class__", OtherModule if v > 1 else Module),
    ),
    "value of a member": (lambda: Kinds.LIST.value[0], lambda v: Kinds.LIST.value.__setitem__(0, v)),
    "member by its name": (
        lambda: Kinds["TABLE"].value["factor"],
        lambda v: Kinds.TABLE.value.__setitem__("factor", v),
    ),
    "member by its value": (lambda: Kinds(3).factor, lambda v: setattr(Kinds.NUMBER, "factor", v)),
    "past the class": (lambda: CONFIG.factor, lambda v: setattr(CONFIG, "factor", v)),
    "asked of object": (
        lambda: object.__getattribute__(PLAIN, "factor"),
        lambda v: setattr(PLAIN, "factor", v),
    ),
    "asked of inspect": (
        lambda: inspect.getattr_static(PLAIN, "factor"),
        lambda v: setattr(PLAIN, "factor", v),
    ),
    "answered by the class": (lambda: ASKED.factor, lambda v: globals().__setitem__("FACTOR", v)),
    "answered by a module": (lambda: LAZY.factor, lambda v: setattr(LAZY, "_factor", v)),
    "module": (imported, lambda v: sys.modules.__setitem__("module_of_a_factor", module(v))),
}
SHARED: dict[str, float] = {}
"""What was set last: the threads of the ranks share it, and the first of them sets it."""


def put(name: str, value: float) -> None:
    if SHARED.get(name, 1.0) != value:
        SHARED[name] = value
        CHANGED[name][1](value)


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    yield
    for name in CHANGED:
        put(name, 1.0)


@pytest.mark.parametrize("name", CHANGED)
def test_a_change_of_what_is_done_is_seen(name: str) -> None:
    read = CHANGED[name][0]
    losses = equal(
        lambda: Beside(lambda model, x: base(model, x) * read()),
        lambda _, step: put(name, 2.0 if step > 1 else 1.0),
    ).losses
    assert losses[2] > 1.5 * losses[1], "the step must read it"
