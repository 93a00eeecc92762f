"""What functions give whose results ``functools`` caches, and that is changed in place between steps."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from beside import Beside, X, base, equal

from hetspmd.trace.host.cached import calls_to, entries_of, results_of
from hetspmd.trace.trace import trace

pytestmark = pytest.mark.filterwarnings("ignore::hetspmd.errors.PlanPerValueWarning")

FACTORS = {"once": 1.0, "thrice": 3.0}
"""Texts for numbers: a number may be an input of a plan, and the threads of these ranks share what they set."""


class Settings:
    """What a cached function makes once for all who ask."""

    def __init__(self) -> None:
        self.word = "once"


@functools.cache
def config() -> dict[str, str]:
    return {"word": "once"}


@functools.lru_cache(maxsize=8)
def table(name: str, *, size: int = 1) -> dict[str, list[str]]:
    return {name: ["once"] * size}


@functools.cache
def settings() -> Settings:
    return Settings()


@functools.cache
def pair(first: int, second: tuple[int, str]) -> tuple[int, list[str]]:
    return first, ["once"]


class Tables:
    @staticmethod
    @functools.cache
    def of(name: str) -> dict[str, str]:
        return {name: "once"}


def of_a_dict(m: Any, x: torch.Tensor) -> torch.Tensor:
    return base(m, x) * FACTORS[config()["word"]]


def of_arguments(m: Any, x: torch.Tensor) -> torch.Tensor:
    return base(m, x) * FACTORS[table("a", size=2)["a"][1]]


def of_an_object(m: Any, x: torch.Tensor) -> torch.Tensor:
    return base(m, x) * FACTORS[settings().word]


def in_a_tuple(m: Any, x: torch.Tensor) -> torch.Tensor:
    return base(m, x) * FACTORS[pair(1, (2, "b"))[1][0]]


def of_a_class(m: Any, x: torch.Tensor) -> torch.Tensor:
    return base(m, x) * FACTORS[Tables.of("a")["a"]]


def on_the_model(m: Any, x: torch.Tensor) -> torch.Tensor:
    return base(m, x) * FACTORS[m.config()["word"]]


def _put(holder: Any, key: Any) -> Callable[[str], None]:
    def put(word: str) -> None:
        found = holder()
        if isinstance(key, str) and not isinstance(found, dict):
            setattr(found, key, word)
        else:
            found[key] = word

    return put


CASES: dict[str, tuple[Callable[..., Any], Callable[[str], None]]] = {
    "a dict": (of_a_dict, _put(config, "word")),
    "a list, by arguments": (of_arguments, _put(lambda: table("a", size=2)["a"], 1)),
    "an object": (of_an_object, _put(settings, "word")),
    "a tuple": (in_a_tuple, _put(lambda: pair(1, (2, "b"))[1], 0)),
    "of a class": (of_a_class, _put(lambda: Tables.of("a"), "a")),
    "on the model": (on_the_model, _put(config, "word")),
}


@pytest.fixture(autouse=True)
def _anew() -> Iterator[None]:
    yield
    for function in (config, table, settings, pair, Tables.of):
        function.cache_clear()


@pytest.mark.parametrize("asked_before", [False, True])
@pytest.mark.parametrize("kind", CASES)
def test_a_change_in_place_is_noticed(kind: str, asked_before: bool) -> None:
    forward, put = CASES[kind]
    if asked_before:
        put("once")

    def each(_model: Any, step: int) -> None:
        put("once" if step < 2 else "thrice")

    equal(lambda: Beside(forward, config=config), each, plans=2)


def test_a_trace_leaves_caches_with_what_others_have_put_there() -> None:
    before = table("b")
    before["b"][0] = "thrice"
    trace(Beside(of_arguments), (X,), {})
    assert table("b") is before
    assert before["b"] == ["thrice"]
    assert table("a", size=2) == {"a": ["once", "once"]}


def test_tensors_that_a_trace_leaves_are_real_ones() -> None:
    @functools.lru_cache(maxsize=4)
    def mask(rows: int, dtype: torch.dtype) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        made = torch.ones(rows, dtype=dtype)
        return made, {"made": made}

    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        return base(m, x) * mask(3, x.dtype)[1]["made"].sum()

    graph = trace(Beside(forward), (X,), {})
    assert list(results_of(mask)) == [(3, X.dtype)]
    assert type(mask(3, X.dtype)[0]) is torch.Tensor
    assert list(calls_to(mask)) == []
    assert not any(step.startswith("(") for read in graph.host.reads for step in read.path)


def test_what_is_left_of_a_key_that_was_taken_out_is_no_entry() -> None:
    @functools.lru_cache(maxsize=4)
    def row(n: int) -> list[int]:
        return [n]

    row(1).append(5)
    del results_of(row)[1]
    row(1).append(7)
    assert entries_of(row) == [(1, [1, 7])]


def test_a_cache_whose_results_were_taken_out_works_on() -> None:
    @functools.lru_cache(maxsize=2)
    def row(n: int) -> list[int]:
        return [n]

    row(1), row(2)
    del results_of(row)[1]
    for n in (2, 1, 3, 1, 4, 4, 2, 2):
        assert row(n) == [n]
        assert row.cache_info().currsize <= 2
    assert row(2) is row(2)


@pytest.mark.parametrize("cached", [functools.cache, functools.lru_cache(maxsize=8)])
def test_a_bare_object_is_an_argument(cached: Callable[..., Any]) -> None:
    """Between positional and named arguments a key has a bare object, which is told from those that are given."""
    nothing = object()

    @cached
    def found(*names: object, default: object = None) -> list[object]:
        return [*names, default]

    found("a", nothing)
    found(nothing, 1)
    found("b", nothing, default=2)
    found("c", default=nothing)
    assert list(calls_to(found)) == []
    found("d", default=3)
    assert list(calls_to(found)) == ['([["d"], {"default": 3}])']
