"""Who holds a model's parameters is looked up without disturbing other threads."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator

import torch
from torch import nn

from hetspmd.run import holders
from hetspmd.run.instances import instances


def test_a_tuple_that_another_thread_makes_is_finished() -> None:
    """CPython refuses to finish a tuple that something else refers to, as a list of all objects does."""
    inside, go_on = threading.Event(), threading.Event()
    results: list[object] = []

    def things() -> Iterator[int]:
        yield from range(5)
        inside.set()
        assert go_on.wait(30)
        yield from range(5, 100)

    def make() -> None:
        try:
            results.append(tuple(things()))
        except SystemError as error:  # pragma: no cover
            results.append(error)

    model = nn.Linear(2, 2)
    other = nn.Linear(2, 2)
    other.weight = model.weight
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    thread = threading.Thread(target=make)
    gc.collect()
    thread.start()
    assert inside.wait(30)
    found = iter(instances(nn.Module, torch.optim.Optimizer))
    seen = [next(found)]
    go_on.set()
    thread.join()
    seen += found
    assert results == [tuple(range(100))]
    assert {id(model), id(other), id(optimizer)} <= {id(s) for s in seen}


def test_every_holder_is_found() -> None:
    class Own(torch.optim.SGD):
        """A class without a module-level name."""

    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    assert not holders.held_elsewhere(model).modules
    other = nn.Linear(2, 2)
    other.weight = model[1].weight
    optimizer = Own(model.parameters(), lr=0.1)
    held = holders.held_elsewhere(model)
    assert [(m, names) for m, names in held.modules] == [(other, {"weight": "1.weight"})]
    assert held.optimizers == [optimizer]


class Comparing(type):
    """A class of classes that are equal by name, and so have no hash."""

    def __eq__(cls, other: object) -> bool:
        return isinstance(other, type) and cls.__name__ == other.__name__


class Unhashable(metaclass=Comparing):
    """A class without a hash."""


def test_objects_of_a_class_that_has_no_hash_are_passed_over() -> None:
    there = Unhashable()
    found = instances(type(there), nn.Linear)
    assert any(one is there for one in found)
    assert all(one is not there for one in instances(nn.Module))
