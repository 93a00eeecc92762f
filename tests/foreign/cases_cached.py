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
        @functools.lru_cache  # noqa: B019  # a cached method is what the case is about
        def mask(self, n: int) -> torch.Tensor:
            return table(n)

        def scale(self) -> torch.Tensor:
            return self.mask(12)

    return Model(), only_x()


@case("forum: a cached method is called before the model is wrapped")
def a_cached_method_that_has_been_called() -> Made:
    class Model(Scaled):
        @functools.lru_cache  # noqa: B019  # a cached method is what the case is about
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
        @functools.cache  # noqa: B019  # a cached method is what the case is about
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
        @functools.lru_cache(maxsize=2)  # noqa: B019  # a cached method is what the case is about
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
        @functools.lru_cache  # noqa: B019  # a cached method is what the case is about
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


@case("forum: a cached table that follows from a buffer which stays")
def a_cached_table_of_a_buffer() -> Made:
    class Model(Scaled):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("inverse", torch.arange(12.0) / 12)

        @functools.lru_cache  # noqa: B019  # a cached method is what the case is about
        def table(self, n: int) -> dict[str, torch.Tensor]:
            return {"cos": (self.inverse[:n] * 3).cos()}

        def scale(self) -> torch.Tensor:
            return self.table(12)["cos"]

    return Model(), only_x()


class Keeping(Scaled):
    """Keeps what a case computes."""

    @functools.lru_cache  # noqa: B019  # a cached method is what the case is about
    def kept(self) -> torch.Tensor:
        return self.made()

    def made(self) -> torch.Tensor:
        raise NotImplementedError

    def scale(self) -> torch.Tensor:
        return self.kept()


@case("forum: a cached tensor of random numbers", refused=r"Keeping\.kept at .*depends on random numbers")
def a_cached_draw() -> Made:
    class Model(Keeping):
        def made(self) -> torch.Tensor:
            return torch.rand(12)

    return Model(), only_x()


@case("forum: a cached tensor of a weight", refused=r"depends on parameter first\.weight.*register_buffer")
def a_cached_mean_of_a_weight() -> Made:
    class Model(Keeping):
        def made(self) -> torch.Tensor:
            return self.first.weight.detach().mean(0)

    return Model(), only_x()


@case("forum: a cached tensor of a buffer that changes", refused=r"depends on buffer steps")
def a_cached_tensor_of_a_buffer_that_changes() -> Made:
    class Model(Keeping):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("steps", torch.ones(12))

        def made(self) -> torch.Tensor:
            self.steps += 1
            return self.steps.cos()

    return Model(), only_x()


@case("forum: a cached tensor of the first batch", refused=r"depends on the batch")
def a_cached_mean_of_the_batch() -> Made:
    class Model(Keeping):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.last = x
            return super().forward(x)

        def made(self) -> torch.Tensor:
            return self.last.mean(0)

    return Model(), only_x()
