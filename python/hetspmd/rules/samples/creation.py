"""Samples of ops that make tensors."""

from __future__ import annotations

from collections.abc import Callable

import torch

from hetspmd.rules.samples import Sample
from hetspmd.rules.sampling import real

Samples = Callable[[], list[Sample]]


def _sized() -> list[Sample]:
    return [(([4, 5],), {"dtype": torch.float64}), (([4, 1, 3],), {}), (([],), {})]


def _like() -> list[Sample]:
    return [
        ((real(4, 5),), {}),
        ((real(4, 5),), {"dtype": torch.float32}),
        ((real(),), {}),
        ((real(4),), {"dtype": torch.bool}),
    ]


SAMPLES: dict[str, Samples] = {
    "aten.full.default": lambda: [
        (([4, 5], 2.5), {}),
        (([4, 5], 3), {"dtype": torch.int64}),
        (([], True), {}),
    ],
    "aten.zeros.default": _sized,
    "aten.ones.default": _sized,
    "aten.empty.memory_format": _sized,
    "aten.empty_permuted.default": lambda: [(([4, 5, 3], [1, 2, 0]), {})],
    "aten.empty_strided.default": lambda: [
        (([4, 5], [1, 4]), {}),
        (([4, 5], [5, 1]), {"dtype": torch.float64}),
    ],
    "aten.new_empty_strided.default": lambda: [((real(3), [4, 5], [1, 4]), {})],
    "aten.new_zeros.default": lambda: [((real(3), [4, 5]), {}), ((real(), [4]), {"dtype": torch.int64})],
    "aten.new_ones.default": lambda: [((real(4, 5), [4, 5]), {})],
    "aten.new_full.default": lambda: [((real(3), [4, 5], 2), {}), ((real(4), [4], 1), {"dtype": torch.bool})],
    "aten.new_empty.default": lambda: [((real(3), [4, 5]), {})],
    "aten.full_like.default": lambda: [
        ((real(4, 5), 2), {}),
        ((real(4, 5), 0), {}),
        ((real(4), 1), {"dtype": torch.bool}),
    ],
    "aten.zeros_like.default": _like,
    "aten.ones_like.default": _like,
    "aten.empty_like.default": _like,
    "aten.zero.default": lambda: [((real(4, 5),), {})],
    "aten.scalar_tensor.default": lambda: [((2.5,), {"dtype": torch.float64})],
    "aten.tril_indices.default": lambda: [((4, 5), {})],
    "aten.triu_indices.default": lambda: [((4, 5, 1), {})],
    "aten.logspace.default": lambda: [((0.0, 2.0, 5), {})],
    "aten.arange.default": lambda: [((7,), {}), ((5,), {"dtype": torch.float64}), ((4.5,), {})],
    "aten.arange.start": lambda: [((2, 9), {}), ((0.5, 5.2), {"dtype": torch.float64})],
    "aten.arange.start_step": lambda: [
        ((1, 14, 2), {}),
        ((9, 0, -2), {}),
        ((0.0, 1.0, 0.15), {}),
        ((0.7, 9, 2), {"dtype": torch.int64}),
    ],
    "aten.linspace.default": lambda: [
        ((0.0, 1.0, 7), {}),
        ((-2, 3, 5), {"dtype": torch.float64}),
        ((0, 9, 4), {"dtype": torch.int64}),
    ],
    "aten.eye.default": lambda: [((5,), {"dtype": torch.float64})],
    "aten.eye.m": lambda: [((4, 6), {}), ((6, 4), {"dtype": torch.bool})],
}
