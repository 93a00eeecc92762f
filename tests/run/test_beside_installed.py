"""A class of an installed package whose members are wrapped: each is a function that a step may read."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from beside import equal

SOURCE = '''
import functools

import torch
from torch import nn


def wrapped(function):
    """A method that keeps what it gave, in a variable around it."""
    kept = {}

    @functools.wraps(function)
    def wrapper(*args):
        if "off" in kept:
            return function(*args)
        return inner(*args)

    inner = functools.lru_cache(maxsize=10)(function)
    return wrapper


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(12, 24), nn.Linear(24, 12)

    @staticmethod
    @wrapped
    def of_static(size):
        return size / 2

    @classmethod
    @wrapped
    def of_class(cls, size):
        return size / 3

    @property
    @wrapped
    def of_property(self):
        return 1.25

    @functools.cached_property
    @wrapped
    def of_cached(self):
        return 1.5

    @wrapped
    def times(self, size):
        return size / 5

    of_partial = functools.partialmethod(times, 4.0)

    @functools.singledispatchmethod
    def by_kind(self, size):
        return size

    @by_kind.register(float)
    @wrapped
    def _(self, size):
        return size / 7

    def forward(self, x):
        found = self.down(torch.tanh(self.up(x))).square().mean()
        return found * self.read()


'''
READS = {
    "static": "self.of_static(3.0)",
    "class": "self.of_class(4.0)",
    "property": "self.of_property",
    "cached": "self.of_cached",
    "partial": "self.of_partial()",
    "dispatched": "self.by_kind(3.0)",
}


@pytest.fixture
def kinds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The package's classes by name."""
    folder = tmp_path / "site-packages"
    folder.mkdir()
    text = SOURCE + "\n\n".join(
        f"class {name.title()}(Layer):\n    def read(self):\n        return {read}\n"
        for name, read in READS.items()
    )
    (folder / "layers_of_others.py").write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(str(folder))
    importlib.invalidate_caches()
    yield importlib.import_module("layers_of_others")
    del sys.modules["layers_of_others"]


@pytest.mark.parametrize("name", sorted(READS))
def test_a_wrapped_member_is_found_on_every_rank(kinds: Any, name: str) -> None:
    def made() -> torch.nn.Module:
        torch.manual_seed(0)
        return getattr(kinds, name.title())()  # type: ignore[no-any-return]  # of the file above

    equal(made, lambda *_: None, steps=3)
