"""Reports about the classes in which batches come."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any

import torch
from cases_forward import Body, Made
from harness import case


class Taking(Body):
    def forward(self, batch: Any) -> torch.Tensor:
        x = batch["x"] if isinstance(batch, dict) else batch.x
        return self.logits(batch.scaled() if hasattr(batch, "scaled") else x).pow(2).mean()


def xs() -> list[torch.Tensor]:
    return [torch.randn(16, 12) for _ in range(4)]


@case("forum: a batch that is a namedtuple of a class defined in a function")
def a_batch_of_a_local_namedtuple() -> Made:
    named = collections.namedtuple("named", "x y")
    return Taking(), [(named(x, 1.0),) for x in xs()]


@case("forum: a batch that is a dataclass defined in a function, with a default")
def a_batch_of_a_local_dataclass() -> Made:
    @dataclasses.dataclass
    class Batch:
        x: torch.Tensor
        k: float = 2.0

        def scaled(self) -> torch.Tensor:
            return self.x * self.k

    return Taking(), [(Batch(x),) for x in xs()]


@case("forum: a batch that is a dict of a class defined in a function")
def a_batch_of_a_local_dict() -> Made:
    class Batch(dict[str, Any]):
        pass

    return Taking(), [(Batch(x=x),) for x in xs()]


@case("forum: each batch is of a class made for it, whose attribute is another")
def a_class_for_each_batch() -> Made:
    def made(x: torch.Tensor, factor: float) -> Any:
        class Base:
            def scaled(self) -> torch.Tensor:
                return self.x * self.k  # type: ignore[attr-defined,no-any-return]  # fields that the class is given

        class Batch(Base):
            k = factor

            def __init__(self) -> None:
                self.x = x

        return Batch()

    return Taking(), [(made(x, 1.0 + i // 2),) for i, x in enumerate(xs())]


@case("forum: a method of a batch reads a variable around its class, and counts on it")
def a_batch_that_counts() -> Made:
    k = 2.0

    class Batch:
        seen = 0
        __slots__ = ("x",)

        def __init__(self, x: torch.Tensor) -> None:
            self.x = x

        def scaled(self) -> torch.Tensor:
            Batch.seen += 1
            return self.x * k

    return Taking(), [(Batch(x),) for x in xs()]
