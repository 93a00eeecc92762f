"""Objects that forward copies: what it reads of the copy is what the object has in each step."""

from __future__ import annotations

import copy
import pickle
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from beside import Beside, base, equal


class Options:
    """Options as an object."""

    def __init__(self) -> None:
        self.scale, self.name = 1.0, "options"


class Slotted:
    """Options in slots."""

    __slots__ = ("scale",)

    def __init__(self) -> None:
        self.scale = 1.0


class SlottedAndMore(Slotted):
    """Options in slots and others beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.more = 1.0


COPIES: dict[str, Callable[[Any], Any]] = {
    "copy": lambda o: copy.copy(o).scale,
    "deepcopy": lambda o: copy.deepcopy(o).scale,
    "pickle": lambda o: pickle.loads(pickle.dumps(o)).scale,
    "reduce": lambda o: copy.copy(o.__reduce_ex__(4))[2]["scale"],
    "getstate": lambda o: o.__getstate__()["scale"],
}


@pytest.mark.parametrize("made", [Options, lambda: types.SimpleNamespace(scale=1.0)])
@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
def test_what_is_read_of_a_copy_changes(copied: Callable[[Any], Any], made: Callable[[], Any]) -> None:
    def forward(model: Any, x: torch.Tensor) -> torch.Tensor:
        return base(model, x) * copied(model.options)

    def change(model: Any, step: int) -> None:
        model.options.scale = 1.0 + step // 2

    single = equal(lambda: Beside(forward, options=made()), change, steps=3)
    assert single.losses[2] > 1.5 * single.losses[1]


@pytest.mark.parametrize("taken", [lambda o: copy.copy(o).scale, lambda o: copy.deepcopy(o).scale])
@pytest.mark.parametrize("made", [Slotted, SlottedAndMore])
def test_what_is_read_of_a_copy_of_slots_changes(
    taken: Callable[[Any], Any], made: Callable[[], Any]
) -> None:
    def forward(model: Any, x: torch.Tensor) -> torch.Tensor:
        return base(model, x) * taken(model.options)

    def change(model: Any, step: int) -> None:
        model.options.scale = 1.0 + step // 2

    equal(lambda: Beside(forward, options=made()), change, steps=3)


def test_the_dict_of_an_object_with_slots() -> None:
    def forward(model: Any, x: torch.Tensor) -> torch.Tensor:
        return base(model, x) * vars(model.options)["more"]

    def change(model: Any, step: int) -> None:
        model.options.more = 1.0 + step // 2

    equal(lambda: Beside(forward, options=SlottedAndMore()), change, steps=3)


def test_a_copy_that_is_changed_leaves_the_object_as_it_was() -> None:
    """The copy is the step's own; so is what a list in a deep copy becomes."""

    def forward(model: Any, x: torch.Tensor) -> torch.Tensor:
        mine = copy.deepcopy(model.options)
        mine.scale += 1.0
        mine.name += "!"
        return base(model, x) * mine.scale * len(mine.name)

    equal(lambda: Beside(forward, options=Options()), look=lambda model: vars(model.options), plans=1)
