"""Numbers that change between steps and lie in other places than the model: ranks train as one device does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from beside import Beside, base, equal
from torch import nn

from hetspmd.trace.trace import trace

FACTOR = 1.0


class Shared:
    """A class and an object that the tests' models read."""

    factor = 1.0
    calls = 0

    def __init__(self) -> None:
        self.factor_of_it = 1.0


HELD = Shared()


@pytest.fixture(autouse=True)
def _as_it_was() -> Any:
    yield
    global FACTOR
    FACTOR, Shared.factor, Shared.calls, HELD.factor_of_it = 1.0, 1.0, 0, 1.0


def _set_factor(_model: Any, step: int) -> None:
    global FACTOR
    FACTOR = 1.0 + step


PLACES: dict[str, tuple[Any, Any]] = {
    "a global variable": (lambda m, x: base(m, x) * FACTOR, _set_factor),
    "an attribute of a class": (
        lambda m, x: base(m, x) * Shared.factor, lambda m, i: setattr(Shared, "factor", 1.0 + i),
    ),
    "an attribute of a global object": (
        lambda m, x: base(m, x) * HELD.factor_of_it, lambda m, i: setattr(HELD, "factor_of_it", 1.0 + i),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PLACES)
def test_a_number_outside_the_model_may_change(name: str) -> None:
    forward, each = PLACES[name]
    equal(lambda: Beside(forward), each, look=lambda m: (FACTOR, Shared.factor, HELD.factor_of_it), plans=2)


class _Closed(nn.Module):
    """Its forward reads a variable of ``__init__``, a number or an object of one."""

    def __init__(self, wrapped: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(12, 24), nn.Linear(24, 12)
        factor, held = 1.0, Shared()

        def change(value: float) -> None:
            nonlocal factor
            factor = held.factor_of_it = value

        self.change, self.look = change, lambda: (type(factor), type(held.factor_of_it))
        self.function = (
            (lambda x: base(self, x) * held.factor_of_it) if wrapped else (lambda x: base(self, x) * factor)
        )

    def __deepcopy__(self, memo: Any) -> _Closed:
        made = _Closed(self.function.__code__.co_freevars[0] == "held")
        made.load_state_dict(self.state_dict())
        return made

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_variable_of_a_closure_may_change(wrapped: bool) -> None:
    equal(lambda: _Closed(wrapped), lambda m, i: m.change(1.0 + i), look=lambda m: str(m.look()), plans=2)


def test_a_trace_with_numbers_leaves_no_tensor_behind() -> None:
    net, x = Beside(lambda m, x: base(m, x) * FACTOR * Shared.factor * HELD.factor_of_it), torch.zeros(16, 12)
    places = (
        (f"globals {__name__}", (".FACTOR",)), (f"class {__name__}:Shared", (".factor",)),
        (f"globals {__name__}", (".HELD", ".factor_of_it")),
    )  # fmt: skip
    assert len(trace(net, (x,), {}, numbers=places).host.numbers) == 3
    assert [type(v) for v in (FACTOR, Shared.factor, HELD.factor_of_it)] == [float] * 3


class Calls:
    """Methods that are called by the class's name."""

    factor = 2.0
    made: Any = None

    @classmethod
    def times(cls, hidden: torch.Tensor) -> torch.Tensor:
        return hidden * cls.factor

    @staticmethod
    def plus(hidden: torch.Tensor) -> torch.Tensor:
        return hidden + FACTOR


class Derived(Calls):
    """Inherits the methods, with another factor."""

    factor = 3.0


CALLS: dict[str, Any] = {
    "a class method": lambda m, x: base(m, Calls.times(x)),
    "an inherited class method": lambda m, x: base(m, Derived.times(x)),
    "a static method": lambda m, x: base(m, Calls.plus(x)),
    "a method of the metaclass": lambda m, x: base(m, x) * len(Calls.__subclasses__()),
}


@pytest.mark.parametrize("name", CALLS)
def test_methods_may_be_called_by_the_name_of_a_class(name: str) -> None:
    equal(lambda: Beside(CALLS[name]), plans=1)
