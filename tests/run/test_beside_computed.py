"""Variables that forward reads by names that it computes, and classes and functions that it keeps in sets."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest
import torch
from beside import Beside, base, equal

OWN = sys.modules["settings_of_the_model"] = types.ModuleType("settings_of_the_model")
BY_PARTS = BY_EVAL = IN_A_SET = 1.0
OWN.K1 = OWN.K2 = 1.0  # type: ignore[attr-defined]  # what the test is about


class Scaled:
    factor = 1.0


def scale() -> float:
    return IN_A_SET


def computed(m: Any, x: torch.Tensor) -> torch.Tensor:
    found = base(m, x) * globals()["BY_" + "PARTS"] * eval("BY" + "_EVAL")
    found = found * getattr(OWN, "K" + str(1)) * vars(OWN)["K" + str(2)]
    for kind in m.classes:
        found = found * kind.factor
    for function in m.functions:
        found = found * function()
    return found  # type: ignore[no-any-return]  # what eval gives


class Computing(Beside):
    def __init__(self) -> None:
        super().__init__(computed)
        self.classes, self.functions = {Scaled}, {scale}


pytestmark = pytest.mark.filterwarnings("ignore::hetspmd.errors.PlanPerValueWarning")

PLACES = [
    (globals(), "BY_PARTS"),
    (globals(), "BY_EVAL"),
    (vars(OWN), "K1"),
    (vars(OWN), "K2"),
    (Scaled, "factor"),
    (globals(), "IN_A_SET"),
]
SHARED: list[list[float]] = [[]]
"""What was set last: the threads of the ranks share it, and the first of them sets it."""


def _set(values: list[float]) -> None:
    if SHARED[-1] != values:
        SHARED[:] = [values]
        for (holder, name), value in zip(PLACES, values, strict=True):
            if isinstance(holder, dict):
                holder[name] = value
            else:
                setattr(holder, name, value)


@pytest.fixture(autouse=True)
def _as_it_was() -> Any:
    yield
    _set([1.0] * len(PLACES))


@pytest.mark.parametrize("place", range(len(PLACES)))
def test_each_is_seen(place: int) -> None:
    def each(model: Any, step: int) -> None:
        _set([1.5 if k == place and step > 1 else 1.0 for k in range(len(PLACES))])

    equal(Computing, each, steps=4)
