"""Functions of torch, numpy and Python that are replaced between steps, as who patches a library does."""

from __future__ import annotations

import builtins
import math
import operator
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from beside import Beside, base, equal
from torch import nn

pytestmark = pytest.mark.filterwarnings("ignore::hetspmd.errors.PlanPerValueWarning")
PARTS = types.ModuleType("parts_of_a_package")
SUB = types.ModuleType("parts_of_a_package.sub")
PARTS.__file__ = SUB.__file__ = __file__
PARTS.sub = SUB  # type: ignore[attr-defined]
sys.modules[PARTS.__name__], sys.modules[SUB.__name__] = PARTS, SUB
SUB.ONE = SUB.TWO = "once"  # type: ignore[attr-defined]


FACTORS = {"once": 1.0, "thrice": 3.0}
"""Texts for numbers: a number may be an input of a plan, and the threads of these ranks share what they set."""


def twice(value: Any, *_: Any, **__: Any) -> Any:
    return value * 2.0


def thrice(value: Any, *_: Any, **__: Any) -> Any:
    return value * 3.0


def imported(model: Any, x: torch.Tensor) -> torch.Tensor:
    from torch.nn import functional

    return base(model, x) + functional.softplus(model.up(x)).mean()


def without_bias(self: Any, x: torch.Tensor) -> torch.Tensor:
    return x @ self.weight.T


def first(model: Any, x: torch.Tensor) -> torch.Tensor:
    return base(model, x) * FACTORS[PARTS.sub.ONE]  # type: ignore[attr-defined]


def second(model: Any, x: torch.Tensor) -> torch.Tensor:
    return first(model, x) * FACTORS[PARTS.sub.TWO]  # type: ignore[attr-defined]


Forward = Callable[[Any, torch.Tensor], torch.Tensor]
PLACES: dict[str, tuple[Forward, Any, str, Any]] = {
    "torch": (base, torch, "tanh", twice),
    "functional": (lambda m, x: base(m, x) + F.silu(m.up(x)).mean(), F, "silu", twice),
    "by a path": (lambda m, x: base(m, x) + torch.nn.functional.elu(m.up(x)).mean(), F, "elu", twice),
    "imported in forward": (imported, F, "softplus", twice),
    "special": (lambda m, x: base(m, x) + torch.special.expit(m.up(x)).mean(), torch.special, "expit", twice),
    "called by a layer": (lambda m, x: base(m, x) + m.act(m.up(x)).mean(), F, "gelu", twice),
    "forward of a layer": (base, nn.Linear, "forward", without_bias),
    "math": (lambda m, x: base(m, x) * math.sqrt(4.0), math, "sqrt", thrice),
    "ufunc": (lambda m, x: base(m, x) * float(np.sqrt(4.0)), np, "sqrt", thrice),
    "numpy": (lambda m, x: base(m, x) * float(np.mean([4.0])), np, "mean", lambda _: 3.0),
    "operator": (lambda m, x: base(m, x) * operator.neg(-2.0), operator, "neg", lambda _: 3.0),
    "a name of torch": (lambda m, x: base(m, x) * FACTORS[torch.of_this_test], torch, "of_this_test", "thrice"),  # type: ignore[attr-defined]
    "a name of sys": (lambda m, x: base(m, x) * FACTORS[sys.of_this_test], sys, "of_this_test", "thrice"),  # type: ignore[attr-defined]
    "a builtin": (lambda m, x: base(m, x) * FACTORS[of_this_test], builtins, "of_this_test", "thrice"),  # type: ignore[name-defined]  # noqa: F821
    "a part of the user's package": (second, SUB, "TWO", "thrice"),
}  # fmt: skip


@pytest.fixture(autouse=True)
def names() -> Iterator[None]:
    for module in (sys, builtins, torch):
        module.of_this_test = "once"  # type: ignore[attr-defined]
    yield
    for module in (sys, builtins, torch):
        del module.of_this_test  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", PLACES)
def test_what_is_replaced_in_a_library_counts(name: str) -> None:
    forward, holder, attribute, other = PLACES[name]
    before = vars(holder)[attribute]
    steps = [before, other, other, before]
    try:
        equal(
            lambda: Beside(forward, act=nn.GELU()),
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
