"""Sample calls of :mod:`hetspmd.rules.ops.advanced`."""

from __future__ import annotations

import torch
from torch import Tensor

from hetspmd.rules.samples import Factory, Sample


def _x(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _i(high: int, *shape: int, low: int = 0) -> Tensor:
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(3))


def _distinct(extent: int, n: int) -> Tensor:
    return torch.randperm(extent, generator=torch.Generator().manual_seed(4))[:n]


def _reads() -> list[Sample]:
    return [
        ((_x(5, 6), [_i(5, 4)]), {}),
        ((_x(5, 6), [None, _i(6, 4, 3, low=-6)]), {}),
        ((_x(4, 5, 6), [_i(4, 3, 1), _i(5, 4)]), {}),
        ((_x(4, 5, 6), [_i(4, 3), None, _i(6, 3, low=-6)]), {}),
        ((_x(2, 4, 5, 6), [None, None, _i(5, 4, 1), _i(6, 3)]), {}),
        ((_x(5, 6), [_i(5), _i(6, 4)]), {}),
        ((torch.arange(20).reshape(5, 4), [None, _i(4, 3)]), {}),
    ]


def _writes(accumulate: bool) -> list[Sample]:
    def at(extent: int, n: int) -> Tensor:
        return _i(extent, n, low=-extent) if accumulate else _distinct(extent, n)

    return [
        ((_x(5, 6), [at(5, 4)], _x(4, 6, seed=1), accumulate), {}),
        ((_x(5, 6), [None, at(6, 4)], _x(4, seed=1), accumulate), {}),
        ((_x(5, 6), [at(5, 4)], _x(seed=1), accumulate), {}),
        ((_x(4, 5, 6), [at(4, 3)[:, None], at(5, 4)], _x(3, 4, 1, seed=1), accumulate), {}),
        ((_x(4, 5, 6), [at(4, 3), None, at(6, 3)], _x(3, 5, seed=1), accumulate), {}),
        ((_x(2, 3, 5, 6), [None, None, at(5, 4)[:, None], at(6, 3)], _x(2, 3, 4, 3, seed=1), accumulate), {}),
    ]


def _masks() -> list[Sample]:
    return [
        ((_x(5, 6), [_x(5, 6, seed=2) > 0], _x(seed=1)), {}),
        ((_x(4, 5, 6), [None, _x(5, 6, seed=2) > 0], _x(1, seed=1)), {}),
        ((_x(5, 6), [_x(5, seed=2) > 0], _x(seed=1), True), {}),
        ((_x(5, 6), [torch.tensor([True, False, True, False, True])], _x(3, 6, seed=1)), {}),
        ((_x(4, 5, 3), [None, torch.tensor([True, False, True, False, True])], _x(4, 3, 1, seed=1)), {}),
    ]


SAMPLES: dict[str, Factory] = {
    "aten.index.Tensor": lambda: [
        *_reads(),
        ((_x(5, 4), [_x(5, seed=1) > 0]), {}),
        ((_x(4, 5, 6, 3), [None, _x(5, 6, seed=1) > 0]), {}),
    ],
    "aten._unsafe_index.Tensor": _reads,
    **{
        f"aten.{name}.default": lambda: [*_writes(False), *_writes(True), *_masks()]
        for name in ("index_put", "_index_put_impl")
    },
    "aten._unsafe_index_put.default": lambda: [*_writes(False), *_writes(True)],
}
