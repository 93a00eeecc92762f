"""Samples of normalisations."""

from __future__ import annotations

from collections.abc import Callable

import torch

from hetspmd.rules.samples import Sample
from hetspmd.rules.sampling import positive, real

Samples = Callable[[], list[Sample]]


def _layer() -> list[Sample]:
    w, b = real(7, seed=1), real(7, seed=2)
    return [
        ((real(4, 5, 7), [7], w, b, 1e-5), {}),
        ((real(4, 5, 7), [5, 7], None, None, 1e-5), {}),
        ((real(4, 7), [7], w, None, 1e-5), {}),
    ]


def _layer_backward() -> list[Sample]:
    samples: list[Sample] = []
    for shape, over, affine, mask in (
        ((4, 5, 7), [7], True, [True, True, True]),
        ((4, 5, 7), [5, 7], False, [True, False, False]),
        ((4, 7), [7], True, [False, True, True]),
    ):
        x, w, b = real(*shape), real(*over, seed=1), real(*over, seed=2)
        _, mean, rstd = torch.ops.aten.native_layer_norm.default(x, over, w, b, 1e-5)
        affines = (w, b) if affine else (None, None)
        samples.append(((real(*shape, seed=3), x, over, mean, rstd, *affines, mask), {}))
    return samples


def _rms() -> list[Sample]:
    return [
        ((real(4, 5, 7), [7], real(7, seed=1), 1e-5), {}),
        ((real(4, 5, 7), [5, 7], None, None), {}),
    ]


def _group() -> list[Sample]:
    w, b = real(6, seed=1), real(6, seed=2)
    return [
        ((real(4, 6, 3, 2), w, b, 4, 6, 6, 3, 1e-5), {}),
        ((real(4, 6, 5), None, None, 4, 6, 5, 2, 1e-5), {}),
    ]


def _group_backward() -> list[Sample]:
    x, w, b = real(4, 6, 3, 2), real(6, seed=1), real(6, seed=2)
    _, mean, rstd = torch.ops.aten.native_group_norm.default(x, w, b, 4, 6, 6, 3, 1e-5)
    grad = real(4, 6, 3, 2, seed=3)
    return [
        ((grad, x, mean, rstd, w, 4, 6, 6, 3, [True, True, True]), {}),
        ((grad, x, mean, rstd, None, 4, 6, 6, 3, [True, False, False]), {}),
    ]


def _channels(c: int) -> tuple[torch.Tensor, ...]:
    """Weight, bias, running mean and running variance."""
    return real(c, seed=1), real(c, seed=2), real(c, seed=3), positive(c, seed=4)


def _batch() -> list[Sample]:
    return [
        ((real(4, 5, 3, 2), *_channels(5), True, 0.1, 1e-5), {}),
        ((real(4, 5, 3, 2), *_channels(5), False, 0.1, 1e-5), {}),
        ((real(4, 5), None, None, *_channels(5)[2:], True, 0.1, 1e-5), {}),
    ]


def _batch_given() -> list[Sample]:
    return [
        ((real(4, 5, 3, 2), *_channels(5), 0.1, 1e-5), {}),
        ((real(4, 5), None, None, *_channels(5)[2:], 0.1, 1e-5), {}),
    ]


def _batch_no_stats() -> list[Sample]:
    return [((real(4, 5, 3), *_channels(5)[:2], True, 0.1, 1e-5), {})]


def _batch_native() -> list[Sample]:
    return [
        ((real(4, 5, 3), *_channels(5)[:2], None, None, True, 0.1, 1e-5), {}),
        ((real(4, 5, 3), *_channels(5), False, 0.1, 1e-5), {}),
    ]


def _batch_backward() -> list[Sample]:
    samples: list[Sample] = []
    for train in (True, False):
        x, (w, b, mean, var) = real(4, 5, 3), _channels(5)
        saved = torch.ops.aten.native_batch_norm.default(x, w, b, None, None, True, 0.1, 1e-5)[1:]
        if not train:
            saved = (real(0), real(0))
        grad = real(4, 5, 3, seed=5)
        samples.append(((grad, x, w, mean, var, *saved, train, 1e-5, [True, True, True]), {}))
        samples.append(((grad, x, None, mean, var, *saved, train, 1e-5, [True, False, False]), {}))
    return samples


def _batch_update() -> list[Sample]:
    return [((real(4, 5, 3), *_channels(5), 0.1, 1e-5), {})]


def _batch_reserve_backward() -> list[Sample]:
    x, (w, b, mean, var) = real(4, 5, 3), _channels(5)
    saved = torch.ops.aten.native_batch_norm.default(x, w, b, None, None, True, 0.1, 1e-5)[1:]
    reserve, grad = torch.zeros(0, dtype=torch.uint8), real(4, 5, 3, seed=5)
    return [
        ((grad, x, w, mean, var, *saved, True, 1e-5, [True, True, True], reserve), {}),
        ((grad, x, w, mean, var, real(0), real(0), False, 1e-5, [True, True, True], reserve), {}),
    ]


def _weight() -> list[Sample]:
    return [((real(4, 5, 3), real(4, 1, 1, seed=1), 0), {}), ((real(4, 5, 3), real(1, 1, 3, seed=1), 2), {})]


def _weight_backward() -> list[Sample]:
    samples: list[Sample] = []
    for (v, g, dim), _ in _weight():
        _, norms = torch.ops.aten._weight_norm_interface.default(v, g, dim)
        samples.append(((real(4, 5, 3, seed=2), v, g, norms, dim), {}))
    return samples


SAMPLES: dict[str, Samples] = {
    "aten.native_layer_norm.default": _layer,
    "aten.native_layer_norm_backward.default": _layer_backward,
    "aten._fused_rms_norm.default": _rms,
    "aten.rms_norm.default": _rms,
    "aten.native_group_norm.default": _group,
    "aten.native_group_norm_backward.default": _group_backward,
    "aten._native_batch_norm_legit_functional.default": _batch,
    "aten._native_batch_norm_legit_no_training.default": _batch_given,
    "aten._native_batch_norm_legit.no_stats": _batch_no_stats,
    "aten.native_batch_norm.default": _batch_native,
    "aten.native_batch_norm_backward.default": _batch_backward,
    "aten._batch_norm_with_update_functional.default": _batch_update,
    "aten._batch_norm_no_update.default": _batch_given,
    "aten.batch_norm_backward.default": _batch_reserve_backward,
    "aten._weight_norm_interface.default": _weight,
    "aten._weight_norm_interface_backward.default": _weight_backward,
}

UNTESTED: dict[str, str] = {"aten._fused_rms_norm_backward.default": "the kernel runs on CUDA only"}
