"""Cached functions that read a setting: what they gave when they were first called stays."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from outside import Step, X, both, equal, student
from torch import nn

from hetspmd.trace.trace import trace

pytestmark = pytest.mark.filterwarnings("ignore::hetspmd.errors.PlanPerValueWarning")


@dataclass
class Settings:
    scale: float = 1.0
    act: str = "tanh"


Made = tuple[Callable[[], Any], Callable[[torch.Tensor], torch.Tensor]]
"""A cached function as one asks for its result, and what a step computes with it."""


def number(s: Settings) -> Made:
    @functools.cache
    def scale() -> float:
        return s.scale

    return scale, lambda y: y * scale()


def by_arguments(s: Settings) -> Made:
    @functools.lru_cache(maxsize=4)
    def scale(name: str, *, power: int) -> float:
        return s.scale**power

    return lambda: scale("a", power=2), lambda y: y * scale("a", power=2) + scale("a", power=1)


def typed(s: Settings) -> Made:
    @functools.lru_cache(typed=True)
    def scale(power: int, *, more: float) -> float:
        return s.scale**power + more

    return lambda: scale(1, more=0.5), lambda y: y * scale(1, more=0.5)


def text(s: Settings) -> Made:
    @functools.cache
    def act() -> str:
        return s.act

    return act, lambda y: getattr(torch, act())(y)


def function(s: Settings) -> Made:
    @functools.cache
    def act() -> Callable[[torch.Tensor], torch.Tensor]:
        return torch.tanh if s.act == "tanh" else torch.sin

    return lambda: act().__name__, lambda y: act()(y)


def container(s: Settings) -> Made:
    @functools.cache
    def scales() -> dict[str, float]:
        return {"a": s.scale}

    return scales, lambda y: y * scales()["a"]


def nested(s: Settings) -> Made:
    @functools.cache
    def scale() -> float:
        return s.scale

    @functools.cache
    def twice() -> float:
        return 2 * scale()

    return twice, lambda y: y * twice()


def tensor(s: Settings) -> Made:
    @functools.cache
    def mask(n: int) -> torch.Tensor:
        return torch.ones(n).cumsum(0) * s.scale

    return lambda: mask(12).tolist(), lambda y: y * mask(12)


def of_a_dtype(s: Settings) -> Made:
    @functools.lru_cache(maxsize=2)
    def mask(n: int, dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, float]:
        return torch.ones(n, dtype=dtype, device=device) * s.scale, s.scale

    def asked() -> tuple[torch.Tensor, float]:
        return mask(12, torch.float32, torch.device("cpu"))

    return lambda: asked()[1], lambda y: y * mask(12, y.dtype, y.device)[0]


class Scales:
    def __init__(self, settings: Settings) -> None:
        self.settings = settings

    @functools.cache  # noqa: B019  # a cached method is what the case is about
    def scale(self, power: int) -> float:
        return self.settings.scale**power

    @functools.cache  # noqa: B019  # a cached method is what the case is about
    def mask(self, n: int) -> torch.Tensor:
        return torch.ones(n) * self.settings.scale


def method(s: Settings) -> Made:
    scales = Scales(s)
    return lambda: scales.scale(2), lambda y: y * scales.scale(2)


def method_of_tensors(s: Settings) -> Made:
    scales = Scales(s)
    return lambda: scales.mask(12).tolist(), lambda y: y * scales.mask(12)


KINDS = (
    number, by_arguments, typed, text, function, container, nested, tensor, of_a_dtype, method, method_of_tensors,
)  # fmt: skip
ON_EVERY_RANK = (
    number,
    by_arguments,
    text,
    function,
    container,
    nested,
    tensor,
    method,
    method_of_tensors,
)
"""Those that every rank asks for itself, with numbers and strings as arguments."""


def _make(kind: Callable[[Settings], Made], *changes: int, clears: int | None = None) -> Callable[[], Step]:
    def make() -> Step:
        settings = Settings()
        ask, compute = kind(settings)

        def each(number: int) -> None:
            if number in changes:
                settings.scale, settings.act = settings.scale / 2, "sin"
            if number == clears:
                _clear(ask)

        look = ask if kind in ON_EVERY_RANK else lambda: None
        return Step(student(), lambda model, x: compute(model(x)).square().mean(), each, look=look)

    return make


def _clear(ask: Any) -> None:
    """Clear the caches around a function, or itself."""
    for found in (ask, *(cell.cell_contents for cell in getattr(ask, "__closure__", None) or ())):
        if hasattr(found, "cache_clear"):
            found.cache_clear()


@pytest.mark.parametrize("kind", KINDS)
def test_the_first_result_stays(kind: Callable[[Settings], Made]) -> None:
    single, ranks = both(_make(kind, 1, 3), 5)
    for found in ranks:
        torch.testing.assert_close(found.losses, single.losses, rtol=1e-5, atol=1e-7)
        assert found.seen == single.seen


@pytest.mark.parametrize("kind", ON_EVERY_RANK)
def test_the_first_result_is_that_of_the_first_step(kind: Callable[[Settings], Made]) -> None:
    single, ranks = both(_make(kind, 0, 2), 4)  # the setting changes before the first step
    for found in ranks:
        torch.testing.assert_close(found.losses, single.losses, rtol=1e-5, atol=1e-7)
        assert found.seen == single.seen


def changed_in_place(cached: Callable[..., Any], *, of_a_method: bool) -> Callable[[], Step]:
    def make() -> Step:
        class Masks:
            @cached
            def mask(self, n: int) -> dict[str, torch.Tensor]:
                return {"mask": torch.ones(n)}

        @cached
        def mask(n: int) -> tuple[torch.Tensor, torch.Tensor]:
            return torch.ones(n), torch.ones(())

        masks = Masks()

        def scale() -> torch.Tensor:
            return masks.mask(12)["mask"] if of_a_method else mask(12)[0]

        def each(number: int) -> None:
            if number == 2:
                scale().mul_(3.0)

        return Step(student(), lambda model, x: (model(x) * scale()).square().mean(), each)

    return make


@pytest.mark.parametrize("of_a_method", [False, True])
@pytest.mark.parametrize("cached", [functools.cache, functools.lru_cache(maxsize=4)])
def test_tensors_that_are_changed_in_place(cached: Callable[..., Any], of_a_method: bool) -> None:
    equal(changed_in_place(cached, of_a_method=of_a_method))


@pytest.mark.parametrize("nested", [False, True])
def test_a_buffer_that_the_loop_changes(nested: bool) -> None:
    """The table stays, and what else is computed of the buffer follows it."""

    class Model(nn.Sequential):
        def __init__(self) -> None:
            super().__init__(*student())
            holder = self if not nested else nn.Module()
            self.holder = holder if nested else None
            holder.register_buffer("inverse", torch.arange(12.0) / 12)
            self.inverse_of = lambda: holder.inverse

        @functools.lru_cache  # noqa: B019  # a cached method is what the case is about
        def mask(self, n: int) -> torch.Tensor:
            return self.inverse_of()[:n].cos()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for module in list(self.children())[:3]:
                x = module(x)
            return x * self.mask(12) + self.inverse_of()

    def make() -> Step:
        model = Model()

        def each(number: int) -> None:
            if number:
                model.inverse_of().add_(0.5 * (number > 1))  # in the second step it is as it was

        return Step(model, lambda model, x: model(x).square().mean(), each)

    equal(make)


def test_a_number_of_the_model_that_changes() -> None:
    """The table stays, and what else is computed of the number follows it."""

    class Model(nn.Sequential):
        def __init__(self) -> None:
            super().__init__(*student())
            self.temperature = 1.0

        @functools.lru_cache  # noqa: B019  # a cached method is what the case is about
        def mask(self, n: int) -> torch.Tensor:
            return torch.ones(n) * self.temperature

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x * self.mask(12)) * self.temperature

    def make() -> Step:
        model = Model()

        def each(number: int) -> None:
            model.temperature = 1.0 + number

        return Step(model, lambda model, x: model(x).square().mean(), each)

    equal(make)


def test_results_of_other_objects_are_left_alone() -> None:
    """Of another model of the same class, of which the step reads nothing."""

    class Model(nn.Linear):
        @functools.lru_cache  # noqa: B019  # a cached method is what the case is about
        def mask(self) -> torch.Tensor:
            return torch.ones(len(self.weight)) * 0.5

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * self.mask()

    other = Model(5, 5)
    before = other.mask()
    trace(Model(12, 12), (X,), {}, loss=lambda model, x: model(x).square().mean())
    assert torch.equal(other.mask(), before)


@pytest.mark.parametrize("kind", [number, by_arguments, text, tensor])
def test_a_cache_that_is_cleared_computes_anew(kind: Callable[[Settings], Made]) -> None:
    single, ranks = both(_make(kind, 1, clears=3), 5)
    for found in ranks:
        torch.testing.assert_close(found.losses, single.losses, rtol=1e-5, atol=1e-7)
        assert found.seen == single.seen


def test_what_was_asked_before_stays() -> None:
    def make() -> Step:
        step = _make(number, 0, 2)()
        step.look()
        return step

    single, ranks = both(make)
    for found in ranks:
        torch.testing.assert_close(found.losses, single.losses, rtol=1e-5, atol=1e-7)
        assert found.seen == single.seen == 1.0


def test_a_trace_leaves_no_result_that_each_rank_asks_for_itself() -> None:
    @functools.cache
    def scale(power: int) -> float:
        return 2.0**power

    scale(1)
    trace(student(), (X,), {}, loss=lambda model, x: model(x).square().mean() * scale(1) * scale(2))
    assert scale.cache_info().currsize == 1
