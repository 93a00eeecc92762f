"""Sample calls of :mod:`hetspmd.rules.ops.pooling`."""

from __future__ import annotations

import torch
from torch import Tensor

from hetspmd.rules.samples import Factory, Sample
from hetspmd.trace.values import torch_op

_PLANES = {1: (6,), 2: (5, 6), 3: (4, 5, 4)}


def _x(shape: tuple[int, ...], seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _forward(k: int, *rest: tuple[object, ...]) -> Factory:
    """Calls with and without a batch dim, for each tuple of further arguments."""

    def make() -> list[Sample]:
        return [((_x((*lead, *_PLANES[k])), *a), {}) for a in rest for lead in ((5, 4), (4,))]

    return make


def _average_backward(op: str, k: int, *rest: tuple[object, ...]) -> Factory:
    def make() -> list[Sample]:
        calls: list[Sample] = []
        for (x, *arguments), _ in _forward(k, *rest)():
            y = torch_op(op)(x, *arguments)
            after = () if "adaptive" in op else (*arguments, *_AVERAGE_DEFAULTS[len(arguments) - 2 :])
            calls.append(((_x(tuple(y.shape), 1), x, *after), {}))
        return calls

    return make


_AVERAGE_DEFAULTS = ([0, 0], False, True, None)


def max_backward(op: str, k: int, lead: tuple[int, ...], *rest: tuple[object, ...]) -> Factory:
    """Calls of the gradient of ``op`` for pooled inputs of shape [*lead, plane]."""

    def make() -> list[Sample]:
        calls: list[Sample] = []
        for arguments in rest:
            x = _x((*lead, *_PLANES[k]))
            y, indices = torch_op(op)(x, *arguments)
            after = () if "adaptive" in op else (*arguments, [0] * k, [1] * k, False)
            calls.append(((_x(tuple(y.shape), 1), x, *after, indices), {}))
        return calls

    return make


def _fractional(k: int) -> list[Sample]:
    size = [2] * k
    samples = torch.rand(5, 4, k, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    plane = (6,) * k
    return [
        ((_x((5, 4, *plane)), size, size, samples), {}),
        ((_x((4, *plane)), size, size, samples[:1]), {}),
    ]


def _fractional_backward(k: int) -> list[Sample]:
    calls: list[Sample] = []
    for (x, kernel, size, samples), _ in _fractional(k):
        y, indices = torch_op(f"aten.fractional_max_pool{k}d.default")(x, kernel, size, samples)
        calls.append(((_x(tuple(y.shape), 1), x, kernel, size, indices), {}))
    return calls


def _unpool(k: int) -> list[Sample]:
    calls: list[Sample] = []
    for lead in ((5, 4), (4,)):
        plane = (4,) * k
        x = _x((*lead, *plane))
        y, indices = torch_op(f"aten.max_pool{k}d_with_indices.default")(x, [2] * k, [2] * k)
        extra: tuple[object, ...] = ([2] * k, [0] * k) if k == 3 else ()
        calls.append(((y, indices, list(plane), *extra), {}))
    return calls


WINDOWS: dict[int, tuple[tuple[object, ...], ...]] = {
    1: (([2], [2]), ([3], [1])),
    2: (([2, 2], [2, 2]), ([3, 2], [1, 1])),
    3: (([2, 2, 2], [2, 2, 2]),),
}
SIZES: dict[int, tuple[tuple[object, ...], ...]] = {
    1: (([2],),),
    2: (([2, 3],), ([1, 1],)),
    3: (([2, 2, 2],),),
}

SAMPLES: dict[str, Factory] = {
    "aten.avg_pool1d.default": _forward(1, *WINDOWS[1]),
    "aten.avg_pool2d.default": _forward(2, *WINDOWS[2]),
    "aten.avg_pool3d.default": _forward(3, *WINDOWS[3]),
    "aten.avg_pool2d_backward.default": _average_backward("aten.avg_pool2d.default", 2, *WINDOWS[2]),
    "aten.avg_pool3d_backward.default": lambda: [
        ((args[0], args[1], *args[2:4], [0, 0, 0], *args[5:]), kwargs)
        for args, kwargs in _average_backward("aten.avg_pool3d.default", 3, *WINDOWS[3])()
    ],
    **{
        f"aten.{name}{k}d.default": _forward(k, *SIZES[k])
        for name, ks in (
            ("adaptive_avg_pool", (1, 2, 3)),
            ("_adaptive_avg_pool", (2, 3)),
            ("adaptive_max_pool", (1, 2, 3)),
        )
        for k in ks
    },
    "aten._adaptive_avg_pool2d_backward.default": _average_backward(
        "aten._adaptive_avg_pool2d.default", 2, *SIZES[2]
    ),
    "aten._adaptive_avg_pool3d_backward.default": _average_backward(
        "aten._adaptive_avg_pool3d.default", 3, *SIZES[3]
    ),
    **{f"aten.max_pool{k}d.default": _forward(k, *WINDOWS[k]) for k in (1, 2, 3)},
    **{f"aten.max_pool{k}d_with_indices.default": _forward(k, *WINDOWS[k]) for k in (1, 2, 3)},
    **{
        f"aten.max_pool{k}d_with_indices_backward.default": max_backward(
            f"aten.max_pool{k}d_with_indices.default", k, (5, 4), *WINDOWS[k]
        )
        for k in (2, 3)
    },
    **{
        f"aten.adaptive_max_pool{k}d_backward.default": max_backward(
            f"aten.adaptive_max_pool{k}d.default", k, (5, 4), *SIZES[k]
        )
        for k in (2, 3)
    },
    "aten.fractional_max_pool2d.default": lambda: _fractional(2),
    "aten.fractional_max_pool3d.default": lambda: _fractional(3),
    "aten.fractional_max_pool2d_backward.default": lambda: _fractional_backward(2),
    "aten.fractional_max_pool3d_backward.default": lambda: _fractional_backward(3),
    "aten.max_unpool2d.default": lambda: _unpool(2),
    "aten.max_unpool3d.default": lambda: _unpool(3),
}
