"""Functions of torch, numpy and Python that are replaced between steps, as who patches a library does."""

from __future__ import annotations

import builtins
import math
import operator
import sys
import types
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from beside import Beside, X, base, equal
from torch import nn

from hetspmd.errors import TraceError
from hetspmd.trace.trace import trace

pytestmark = pytest.mark.filterwarnings("ignore::hetspmd.errors.PlanPerValueWarning")
PARTS = types.ModuleType("parts_of_a_package")
SUB = types.ModuleType("parts_of_a_package.sub")
PARTS.__file__ = SUB.__file__ = __file__
PARTS.sub = SUB  # type: ignore[attr-defined]  # set by this test
sys.modules[PARTS.__name__], sys.modules[SUB.__name__] = PARTS, SUB
SUB.ONE = SUB.TWO = "once"  # type: ignore[attr-defined]  # set by this test


FACTORS = {"once": 1.0, "thrice": 3.0}
"""Texts for numbers: a number may be an input of a plan, and the threads of these ranks share what they set."""


def twice(value: Any, *_: Any, **__: Any) -> Any:
    return value * 2.0


def thrice(value: Any, *_: Any, **__: Any) -> Any:
    return value * 3.0


def imported(model: Any, x: torch.Tensor) -> torch.Tensor:
    from torch.nn import functional

    return base(model, x) + functional.softplus(model.up(x)).mean()


class Halved:
    """A function that is an object, with a number."""

    def __init__(self, word: str = "once") -> None:
        self.word = word

    def __call__(self, value: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return value * FACTORS[self.word]


def around(factor: float) -> Callable[..., torch.Tensor]:
    def inside(value: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return torch.tanh(value) * factor

    return inside


def attends(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return (query @ key.mT) @ value


def in_rows(model: Any, x: torch.Tensor) -> torch.Tensor:
    rows = model.up(x).unflatten(1, (3, 8))
    return model.attention(rows, rows, rows, need_weights=False)[0].square().mean() + base(model, x)


def convolved(model: Any, x: torch.Tensor) -> torch.Tensor:
    return base(model, x) + model.convolution(x.unsqueeze(1)).square().mean()


def without_bias(self: Any, x: torch.Tensor) -> torch.Tensor:
    return x @ self.weight.T


def first(model: Any, x: torch.Tensor) -> torch.Tensor:
    return base(model, x) * FACTORS[PARTS.sub.ONE]  # type: ignore[attr-defined]  # set by this test


def second(model: Any, x: torch.Tensor) -> torch.Tensor:
    return first(model, x) * FACTORS[PARTS.sub.TWO]  # type: ignore[attr-defined]  # set by this test


Forward = Callable[[Any, torch.Tensor], torch.Tensor]
PLACES: dict[str, tuple[Forward, Any, str, Any]] = {
    "torch": (base, torch, "tanh", twice),
    "functional": (lambda m, x: base(m, x) + F.silu(m.up(x)).mean(), F, "silu", twice),
    "by a path": (lambda m, x: base(m, x) + torch.nn.functional.elu(m.up(x)).mean(), F, "elu", twice),
    "imported in forward": (imported, F, "softplus", twice),
    "special": (lambda m, x: base(m, x) + torch.special.expit(m.up(x)).mean(), torch.special, "expit", twice),
    "called by a layer": (lambda m, x: base(m, x) + m.act(m.up(x)).mean(), F, "gelu", twice),
    "forward of a layer": (base, nn.Linear, "forward", without_bias),
    "a closure called by a layer": (lambda m, x: base(m, x) + m.soft(m.up(x)).mean(), F, "softmax", around(2.0)),
    "a partial function": (lambda m, x: base(m, x) + F.silu(m.up(x)).mean(), F, "silu", partial(twice)),
    "an object": (lambda m, x: base(m, x) + F.silu(m.up(x)).mean(), F, "silu", Halved()),
    "a bound method": (lambda m, x: base(m, x) + F.silu(m.up(x)).mean(), F, "silu", Halved("thrice").__call__),
    "a class": (lambda m, x: base(m, x) + nn.Identity()(m.up(x)).mean(), nn, "Identity", nn.Tanh),
    "attention inside a layer": (in_rows, F, "scaled_dot_product_attention", attends),
    "a method of a layer": (convolved, nn.Conv1d, "_conv_forward", lambda s, x, w, b: x.tile(1, 2, 1)),
    "a function of a layer's method": (convolved, F, "conv1d", lambda x, *_: x.tile(1, 2, 1)),
    "math": (lambda m, x: base(m, x) * math.sqrt(4.0), math, "sqrt", thrice),
    "ufunc": (lambda m, x: base(m, x) * float(np.sqrt(4.0)), np, "sqrt", thrice),
    "numpy": (lambda m, x: base(m, x) * float(np.mean([4.0])), np, "mean", lambda _: 3.0),
    "operator": (lambda m, x: base(m, x) * operator.neg(-2.0), operator, "neg", lambda _: 3.0),
    "a name of torch": (lambda m, x: base(m, x) * FACTORS[torch.of_this_test], torch, "of_this_test", "thrice"),  # type: ignore[attr-defined]  # set by this test
    "a name of sys": (lambda m, x: base(m, x) * FACTORS[sys.of_this_test], sys, "of_this_test", "thrice"),  # type: ignore[attr-defined]  # set by this test
    "a builtin": (lambda m, x: base(m, x) * FACTORS[of_this_test], builtins, "of_this_test", "thrice"),  # type: ignore[name-defined]  # noqa: F821  # set by this test
    "a part of the user's package": (second, SUB, "TWO", "thrice"),
}  # fmt: skip


def layers() -> dict[str, nn.Module]:
    attention = nn.MultiheadAttention(8, 2, batch_first=True)
    return {
        "act": nn.GELU(), "soft": nn.Softmax(-1), "attention": attention, "convolution": nn.Conv1d(1, 2, 1),
    }  # fmt: skip


@pytest.fixture(autouse=True)
def names() -> Iterator[None]:
    for module in (sys, builtins, torch):
        module.of_this_test = "once"  # type: ignore[attr-defined]  # set by this test
    yield
    for module in (sys, builtins, torch):
        del module.of_this_test  # type: ignore[attr-defined]  # set by this test


@pytest.mark.parametrize("name", PLACES)
def test_what_is_replaced_in_a_library_counts(name: str) -> None:
    forward, holder, attribute, other = PLACES[name]
    before = vars(holder)[attribute]
    steps = [before, other, other, before]
    try:
        equal(
            lambda: Beside(forward, **layers()),
            lambda model, step: setattr(holder, attribute, steps[step]),
            plans=2,
        )
    finally:
        setattr(holder, attribute, before)


def test_each_of_several_replacements_counts() -> None:
    steps = [F.mish, twice, thrice, twice]
    before = F.mish
    try:
        equal(
            lambda: Beside(lambda m, x: base(m, x) + F.mish(m.up(x)).mean()),
            lambda model, step: setattr(F, "mish", steps[step]),
            plans=3,
        )
    finally:
        F.mish = before


@pytest.mark.parametrize(
    "other", [partial(twice), Halved(), Halved("thrice").__call__], ids=["partial", "object", "method"]
)
def test_what_was_replaced_before_may_be_put_back(other: Any) -> None:
    before = F.silu
    steps = [other, before, other, before]
    F.silu = other
    try:
        equal(
            lambda: Beside(lambda m, x: base(m, x) + F.silu(m.up(x)).mean()),
            lambda model, step: setattr(F, "silu", steps[step]),
        )
    finally:
        F.silu = before


def test_a_wrapper_of_a_function_that_torch_calls_by_name_is_refused() -> None:
    before = F.silu

    def half(value: torch.Tensor, inplace: bool = False) -> torch.Tensor:
        return before(value, inplace) * 0.5

    F.silu = half
    try:
        with pytest.raises(
            TraceError, match=r"half of test_beside_library stands in the place .* count twice"
        ):
            trace(Beside(lambda m, x: base(m, x) + F.silu(m.up(x)).mean()), (X,), {})
    finally:
        F.silu = before


METHODS: dict[str, tuple[Any, Any, Callable[[Any, torch.Tensor], torch.Tensor]]] = {
    "a method": (twice, thrice, lambda m, x: base(m, x) + m.up(x).of_this_test().mean()),
    "a method of torch's": (None, thrice, lambda m, x: base(m, x) + m.up(x).sigmoid().mean()),
    "a property": (
        property(twice), property(thrice), lambda m, x: base(m, x) + m.up(x).of_this_test.mean()
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", METHODS)
def test_a_method_of_tensors_that_is_replaced_counts(kind: str) -> None:
    one, other, forward = METHODS[kind]
    name = "sigmoid" if one is None else "of_this_test"
    steps = [one, other, other, one]

    def each(_: Any, step: int) -> None:
        if steps[step] is not None:
            setattr(torch.Tensor, name, steps[step])
        elif name in vars(torch.Tensor):
            delattr(torch.Tensor, name)

    try:
        equal(lambda: Beside(forward), each, plans=2)
    finally:
        if name in vars(torch.Tensor):
            delattr(torch.Tensor, name)
