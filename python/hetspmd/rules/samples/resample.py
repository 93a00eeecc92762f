"""Sample calls of :mod:`hetspmd.rules.ops.resample`."""

from __future__ import annotations

import torch
from torch import Tensor

from hetspmd.rules.samples import Factory, Sample
from hetspmd.trace.values import torch_op


def _x(shape: tuple[int, ...], seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


_NEAREST = tuple(f"{kind}{k}d" for kind in ("upsample_nearest", "_upsample_nearest_exact") for k in (1, 2, 3))
_SMOOTH = (
    "upsample_linear1d",
    "upsample_bilinear2d",
    "upsample_bicubic2d",
    "upsample_trilinear3d",
    "_upsample_bilinear2d_aa",
    "_upsample_bicubic2d_aa",
)


def _dims(name: str) -> int:
    return int(name.removesuffix("_aa")[-2])


def _upsample(name: str) -> Factory:
    k = _dims(name)
    align: tuple[object, ...] = (False,) if name in _SMOOTH else ()

    def make() -> list[Sample]:
        return [
            ((_x((5, 4, *(3,) * k)), [7] * k, *align), {}),
            ((_x((4, 5, *(6,) * k)), [3] * k, *align), {}),
        ]

    return make


def _vec(name: str) -> Factory:
    k = _dims(name)
    align: tuple[object, ...] = (True,) if name in _SMOOTH else ()

    def make() -> list[Sample]:
        x = _x((5, 4, *(3,) * k))
        return [((x, None, *align, [2.0] * k), {}), ((x, [5] * k, *align, None), {})]

    return make


def _backward(name: str) -> Factory:
    def make() -> list[Sample]:
        calls: list[Sample] = []
        for (x, size, *align), _ in _upsample(name)():
            y = torch_op(f"aten.{name}.default")(x, size, *align)
            calls.append(((_x(tuple(y.shape), 1), size, list(x.shape), *align), {}))
        return calls

    return make


def _grids(k: int) -> list[Sample]:
    x, grid = _x((4, 3, *(4,) * k)), _x((4, *(5,) * (k - 1), 6, k), 1) * 0.5
    return [((x, grid, 0, 0, False), {}), ((x, grid, 0, 1, True), {})]


def _grids_backward(k: int) -> list[Sample]:
    calls: list[Sample] = []
    for args, _ in _grids(k):
        y = torch_op(f"aten.grid_sampler_{k}d.default")(*args)
        calls += [((_x(tuple(y.shape), 2), *args, [wants_x, True]), {}) for wants_x in (True, False)]
    return calls


SAMPLES: dict[str, Factory] = {
    **{f"aten.{name}.default": _upsample(name) for name in (*_NEAREST, *_SMOOTH)},
    **{f"aten.{name}.vec": _vec(name) for name in (*_NEAREST, *_SMOOTH)},
    **{f"aten.{name}_backward.default": _backward(name) for name in (*_NEAREST, *_SMOOTH)},
    "aten.grid_sampler.default": lambda: _grids(2),
    "aten.grid_sampler_2d.default": lambda: _grids(2),
    "aten.grid_sampler_3d.default": lambda: _grids(3),
    "aten.grid_sampler_2d_backward.default": lambda: _grids_backward(2),
    "aten.grid_sampler_3d_backward.default": lambda: _grids_backward(3),
    "aten.affine_grid_generator.default": lambda: [
        ((_x((4, 2, 3)), [4, 3, 5, 4], False), {}),
        ((_x((4, 3, 4)), [4, 3, 2, 5, 4], True), {}),
    ],
}
