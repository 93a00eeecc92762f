"""Functions of libraries that forward reaches by computed names, and that are replaced between steps."""

from __future__ import annotations

import builtins
import functools
import math
import operator
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from beside import Beside, X, base, equal

from hetspmd.trace.host.replaced import functions_of
from hetspmd.trace.trace import trace

pytestmark = pytest.mark.filterwarnings("ignore::hetspmd.errors.PlanPerValueWarning")

HELD: list[tuple[Any, str, Any]] = [
    (F, "silu", F.silu),
    (torch, "tanh", torch.tanh),
    (math, "sqrt", math.sqrt),
]


@pytest.fixture(autouse=True)
def _put_back() -> Iterator[None]:
    yield
    for holder, name, function in HELD:
        setattr(holder, name, function)


WORDS = {"once": 1.0, "thrice": 3.0}


def thrice(value: Any, *_: Any, **__: Any) -> Any:
    return value * 3.0


def of_the_model(m: Any, x: torch.Tensor) -> torch.Tensor:
    return base(m, x) + getattr(F, m.word)(m.up(x)).mean()


def in_parts(m: Any, x: torch.Tensor) -> torch.Tensor:
    return base(m, x) + getattr(F, "si" + m.rest)(m.up(x)).mean()


def by_vars(m: Any, x: torch.Tensor) -> torch.Tensor:
    return base(m, x) + vars(F)[m.word](m.up(x)).mean()


def by_dict(m: Any, x: torch.Tensor) -> torch.Tensor:
    return base(m, x) + F.__dict__[m.word](m.up(x)).mean()


def by_getter(m: Any, x: torch.Tensor) -> torch.Tensor:
    return base(m, x) + operator.attrgetter("functional." + m.word)(torch.nn)(m.up(x)).mean()


def by_module(m: Any, x: torch.Tensor) -> torch.Tensor:
    return base(m, x) + getattr(sys.modules["torch.nn." + "functional"], m.word)(m.up(x)).mean()


def of_torch(m: Any, x: torch.Tensor) -> torch.Tensor:
    return base(m, x) + getattr(torch, "ta" + m.tail)(m.up(x)).mean()


def of_python(m: Any, x: torch.Tensor) -> torch.Tensor:
    return base(m, x) * float(getattr(math, "sq" + m.root)(4.0))


FORWARDS: dict[str, tuple[Callable[..., Any], Any, str]] = {
    "of the model": (of_the_model, F, "silu"),
    "in parts": (in_parts, F, "silu"),
    "vars": (by_vars, F, "silu"),
    "__dict__": (by_dict, F, "silu"),
    "attrgetter": (by_getter, F, "silu"),
    "sys.modules": (by_module, F, "silu"),
    "torch": (of_torch, torch, "tanh"),
    "math": (of_python, math, "sqrt"),
}


@pytest.mark.parametrize("kind", FORWARDS)
def test_a_function_that_is_replaced_is_noticed(kind: str) -> None:
    forward, holder, name = FORWARDS[kind]
    members = {"word": "silu", "rest": "lu", "tail": "nh", "root": "rt"}

    def each(_model: Any, step: int) -> None:
        was = next(function for of, called, function in HELD if (of, called) == (holder, name))
        setattr(holder, name, was if step < 2 else thrice)

    equal(lambda: Beside(forward, **members), each)


def times(value: Any, factor: float) -> Any:
    return value * factor


PARTIALS: dict[str, Callable[[float], Any]] = {
    "of the user's": lambda factor: functools.partial(times, factor=factor),
    "of torch's": lambda factor: functools.partial(torch.mul, other=factor),
    "of a partial": lambda factor: functools.partial(functools.partial(times, factor=0.0), factor=factor),
}


@pytest.mark.parametrize("kind", PARTIALS)
def test_a_partial_function_in_the_place_of_another_is_noticed(kind: str) -> None:
    def each(_model: Any, step: int) -> None:
        setattr(F, "silu", PARTIALS[kind](2.0 if step < 2 else 3.0))  # noqa: B010  # its type is a function's

    each(None, 0)
    equal(lambda: Beside(of_the_model, word="silu"), each)


def test_a_function_under_another_name_is_noticed() -> None:
    variables: dict[str, Any] = {"kept": math.sqrt}
    assert not functions_of(variables)
    variables["once"] = thrice
    assert functions_of(variables).startswith("once: ")
    variables["twice"] = variables.pop("once")
    assert functions_of(variables).startswith("twice: ")


class Strict:
    """Answers nothing that it is asked."""

    def __getattribute__(self, name: str) -> Any:
        raise KeyError(name)


def test_what_does_not_answer_in_another_module_is_passed_by(monkeypatch: pytest.MonkeyPatch) -> None:
    other = types.ModuleType("module_with_a_strict_object")
    other.__file__ = __file__
    other.STRICT = Strict()  # type: ignore[attr-defined]  # set by this test
    monkeypatch.setitem(sys.modules, other.__name__, other)

    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        return base(m, x) * len(getattr(sys.modules[m.word], "__name__"[:]))

    trace(Beside(forward, word="math"), (X,), {})


def test_a_builtin_with_the_name_of_a_module(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "factor_of_this_test", types.ModuleType("factor_of_this_test"))

    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        return base(m, x) * WORDS[factor_of_this_test]  # type: ignore[name-defined]  # noqa: F821  # set by this test

    def each(_model: Any, step: int) -> None:
        builtins.factor_of_this_test = "once" if step < 2 else "thrice"  # type: ignore[attr-defined]  # set by this test

    each(None, 0)
    try:
        equal(lambda: Beside(forward), each)
    finally:
        del builtins.factor_of_this_test  # type: ignore[attr-defined]  # set by this test
