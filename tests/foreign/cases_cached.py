"""Reports about what models keep of an earlier call: cached methods that make masks and tables."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from cases_forward import Body, Made, only_x
from harness import case


class Scaled(Body):
    """A body that multiplies its input with what ``scale`` makes."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.logits(x * self.scale()).pow(2).mean()

    def scale(self) -> torch.Tensor:
        raise NotImplementedError


def table(n: int) -> torch.Tensor:
    return torch.ones(n).cumsum(0) * 0.1


@case("forum: lru_cache on a method of a module that makes a mask")
def a_cached_method() -> Made:
    class Model(Scaled):
        @functools.lru_cache  # noqa: B019
        def mask(self, n: int) -> torch.Tensor:
            return table(n)

        def scale(self) -> torch.Tensor:
            return self.mask(12)

    return Model(), only_x()


@case("forum: a cached method is called before the model is wrapped")
def a_cached_method_that_has_been_called() -> Made:
    class Model(Scaled):
        @functools.lru_cache  # noqa: B019
        def mask(self, n: int) -> torch.Tensor:
            return table(n)

        def scale(self) -> torch.Tensor:
            return self.mask(12)

    model, batches = Model(), only_x()
    model(*batches[0])
    return model, batches


@case("forum: a cached method of a base class, called by super()")
def a_cached_method_of_a_base_class() -> Made:
    class Base(Scaled):
        @functools.cache  # noqa: B019
        def mask(self, n: int) -> torch.Tensor:
            return table(n)

    class Model(Base):
        def scale(self) -> torch.Tensor:
            return super().mask(12)

    return Model(), only_x()


@case("forum: a cached method of a class, whose cache holds one result of two")
def a_cached_class_method() -> Made:
    class Model(Scaled):
        @classmethod
        @functools.lru_cache(maxsize=1)
        def mask(cls, n: int) -> torch.Tensor:
            return table(n)

        def scale(self) -> torch.Tensor:
            return self.mask(12) * self.mask(1)

    return Model(), only_x()


@case("forum: a cached method of an object on the model")
def a_cached_method_of_an_object() -> Made:
    class Masks:
        @functools.lru_cache(maxsize=2)  # noqa: B019
        def mask(self, n: int) -> torch.Tensor:
            return table(n)

    class Model(Scaled):
        def __init__(self) -> None:
            super().__init__()
            self.masks = Masks()

        def scale(self) -> torch.Tensor:
            return self.masks.mask(12)

    return Model(), only_x()


@case("forum: a property whose function is cached")
def a_cached_property_of_two_decorators() -> Made:
    class Model(Scaled):
        @property
        @functools.lru_cache  # noqa: B019
        def mask(self) -> torch.Tensor:
            return table(12)

        def scale(self) -> torch.Tensor:
            return self.mask

    return Model(), only_x()


@case("forum: a method that is cached in __init__, inside of a partial function")
def a_method_cached_in_init() -> Made:
    class Model(Scaled):
        def __init__(self) -> None:
            super().__init__()
            self.mask: Callable[[], torch.Tensor] = functools.partial(functools.lru_cache(self._mask), 12)

        def _mask(self, n: int) -> torch.Tensor:
            return table(n)

        def scale(self) -> torch.Tensor:
            return self.mask()

    return Model(), only_x()
