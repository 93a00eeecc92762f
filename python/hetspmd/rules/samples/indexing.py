"""Sample calls of :mod:`hetspmd.rules.ops.indexing`."""

from __future__ import annotations

import torch
from torch import Tensor

from hetspmd.rules.samples import Factory, Sample


def _x(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _i(high: int, *shape: int, low: int = 0) -> Tensor:
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(3))


def _distinct(extent: int, *shape: int) -> Tensor:
    """Positions below ``extent``, no two of which are equal along the last dim."""
    order = torch.rand(*shape[:-1], extent, generator=torch.Generator().manual_seed(4)).argsort(-1)
    return order[..., : shape[-1]]


def _gathers() -> list[Sample]:
    return [
        ((_x(5, 6), 1, _i(6, 5, 4)), {}),
        ((_x(5, 6), -1, _i(6, 5, 1)), {}),
        ((_x(6, 4, 5), 0, _i(6, 3, 4, 5)), {}),
        ((_x(5, 6), 1, _i(6, 4, 4)), {}),
        ((_x(5), 0, _i(5, 4)), {}),
        ((torch.arange(20).reshape(5, 4), 1, _i(4, 5, 3)), {}),
        ((_x(5, 4) > 0, 1, _i(4, 5, 3)), {}),
    ]


def _selects() -> list[Sample]:
    return [((_x(5, 6), 0, _i(5, 4)), {}), ((_x(5, 6, 4), -2, _i(6, 7)), {}), ((_x(5), 0, _i(5, 4)), {})]


def _takes() -> list[Sample]:
    return [
        ((_x(5, 6), _i(30, 4)), {}),
        ((_x(1, 5), _i(5, 4, 3, low=-5)), {}),
        ((_x(7), _i(7, 5)), {}),
    ]


def _scatter_values(*rest: object, **options: object) -> list[Sample]:
    return [
        ((_x(5, 6), 1, _distinct(6, 5, 4), *rest), dict(options)),
        ((_x(4, 5), -1, _distinct(5, 4, 1), *rest), dict(options)),
        ((_x(5, 6), 1, _distinct(6, 3, 4), *rest), dict(options)),
    ]


def _scatter_sources(distinct: bool, *rest: object, **options: object) -> list[Sample]:
    def at(extent: int, *shape: int) -> Tensor:
        return _distinct(extent, *shape) if distinct else _i(extent, *shape)

    return [
        ((_x(5, 6), 1, at(6, 5, 4), _x(5, 4, seed=1), *rest), dict(options)),
        ((_x(4, 6), -1, at(6, 4, 4), _x(5, 5, seed=1), *rest), dict(options)),
        ((_x(6), 0, at(6, 5), _x(5, seed=1), *rest), dict(options)),
    ]


def _index_writes(*, duplicates: bool, **options: object) -> list[Sample]:
    def at(extent: int, n: int) -> Tensor:
        return _i(extent, n) if duplicates else _distinct(extent, n)

    return [
        ((_x(5, 6), 0, at(5, 4), _x(4, 6, seed=1)), dict(options)),
        ((_x(5, 6, 4), -2, at(6, 5), _x(5, 5, 4, seed=1)), dict(options)),
        ((_x(6), 0, at(6, 5), _x(5, seed=1)), dict(options)),
    ]


def _fills(value: object) -> list[Sample]:
    return [((_x(5, 6), 0, _i(5, 3, low=-5), value), {}), ((_x(5, 6, 4), -1, _i(4, 2), value), {})]


def _bucketize() -> list[Sample]:
    boundaries = torch.linspace(-1, 1, 6, dtype=torch.float64)
    return [((_x(5, 4), boundaries), {}), ((_x(5), boundaries), {"right": True, "out_int32": True})]


def _searchsorted() -> list[Sample]:
    rows = _x(5, 6).sort(-1).values
    shuffled = _x(5, 6)
    return [
        ((rows, _x(5, 4, seed=1)), {}),
        ((rows[0], _x(5, 4, seed=1)), {"right": True}),
        ((shuffled, _x(5, 4, seed=1)), {"sorter": shuffled.argsort(-1)}),
    ]


SAMPLES: dict[str, Factory] = {
    "aten.gather.default": _gathers,
    "aten.index_select.default": _selects,
    "aten.take.default": _takes,
    "aten.scatter.src": lambda: _scatter_sources(True),
    "aten.scatter.value": lambda: [*_scatter_values(2.5), *_scatter_values(0)],
    "aten.scatter_add.default": lambda: _scatter_sources(False),
    "aten.scatter.reduce": lambda: [
        *_scatter_sources(False, reduce="add"),
        *_scatter_sources(False, reduce="multiply"),
    ],
    "aten.scatter.value_reduce": lambda: [
        *_scatter_values(2.5, reduce="add"),
        *_scatter_values(2.5, reduce="multiply"),
    ],
    "aten.scatter_reduce.two": lambda: [
        *_scatter_sources(False, "sum"),
        *_scatter_sources(False, "amax"),
        *_scatter_sources(False, "sum", include_self=False),
        *_scatter_sources(False, "mean"),
        *_scatter_sources(False, "prod", include_self=False),
        *_scatter_sources(False, "prod"),
    ],
    "aten.index_add.default": lambda: [
        *_index_writes(duplicates=True),
        *_index_writes(duplicates=True, alpha=0.5),
    ],
    "aten.index_copy.default": lambda: _index_writes(duplicates=False),
    "aten.index_reduce.default": lambda: [
        ((*args, "amax"), {"include_self": False}) for args, _ in _index_writes(duplicates=True)
    ],
    "aten.index_fill.int_Scalar": lambda: [*_fills(1.5), *_fills(0)],
    "aten.index_fill.int_Tensor": lambda: _fills(_x()),
    "aten.masked_scatter.default": lambda: [((_x(5, 4), _x(5, 4, seed=1) > 0, _x(20, seed=2)), {})],
    "aten.masked_scatter_backward.default": lambda: [((_x(5, 4), _x(5, 4, seed=1) > 0, [20]), {})],
    "aten.masked_select.default": lambda: [((_x(5, 4), _x(5, 4, seed=1) > 0), {})],
    "aten.nonzero.default": lambda: [((_x(5, 4) > 0,), {})],
    "aten.nonzero_static.default": lambda: [((_x(5, 4) > 0,), {"size": 6})],
    "aten.bucketize.Tensor": _bucketize,
    "aten.bucketize.Scalar": lambda: [((0.3, torch.linspace(-1, 1, 6, dtype=torch.float64)), {})],
    "aten.searchsorted.Tensor": _searchsorted,
    "aten.searchsorted.Scalar": lambda: [((torch.linspace(-1, 1, 6, dtype=torch.float64), 0.3), {})],
}

# boundaries must be sorted
FIXED: dict[str, tuple[int, ...]] = {
    "aten.bucketize.Tensor": (1,),
    "aten.bucketize.Scalar": (0,),
    "aten.searchsorted.Tensor": (0, 2),
    "aten.searchsorted.Scalar": (0,),
}
