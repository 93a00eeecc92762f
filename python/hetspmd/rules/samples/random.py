"""Samples of random ops."""

from __future__ import annotations

from collections.abc import Callable

import torch

from hetspmd.rules.samples import Sample
from hetspmd.rules.sampling import positive, real

Samples = Callable[[], list[Sample]]


def _of(*args: float, **kwargs: float) -> Samples:
    return lambda: [((positive(40, 50), *args), dict(kwargs)), ((positive(4, 5), *args), dict(kwargs))]


def _dropout() -> list[Sample]:
    x = real(40, 50)
    return [
        ((x, 0.3, True), {}),
        ((x, 0.0, True), {}),
        ((x, 0.3, False), {}),
        ((x, 1.0, True), {}),
        ((x, 0.3, None), {}),
    ]


def _rrelu() -> list[Sample]:
    x = real(40, 50)
    return [((x, torch.zeros_like(x), 0.1, 0.3, train), {}) for train in (True, False)]


def _binomial() -> list[Sample]:
    return [((torch.full((40, 50), 9.0, dtype=torch.float64), positive(40, 50)), {})]


SAMPLES: dict[str, Samples] = {
    "aten.bernoulli.default": _of(),
    "aten.bernoulli.p": _of(0.3),
    "aten.bernoulli.Tensor": lambda: [
        ((real(40, 50), positive(40, 50, seed=1)), {}),
        ((real(40, 50), positive()), {}),
    ],
    "aten.binomial.default": _binomial,
    "aten.cauchy.default": lambda: [((real(4, 5),), {})],
    "aten.exponential.default": _of(2.0),
    "aten.geometric.default": _of(0.3),
    "aten.log_normal.default": _of(0.0, 0.5),
    "aten.normal.Tensor_Tensor": lambda: [
        ((real(40, 50), positive(40, 50)), {}),
        ((real(40, 1), positive(50)), {}),
    ],
    "aten.normal.Tensor_float": _of(0.5),
    "aten.normal.float_Tensor": lambda: [((0.5, positive(40, 50)), {})],
    "aten.normal_functional.default": _of(0.5, 2.0),
    "aten.poisson.default": _of(),
    "aten.rand_like.default": _of(),
    "aten.randint_like.default": _of(9),
    "aten.randint_like.low_dtype": _of(2, 9),
    "aten.randn_like.default": _of(),
    "aten.uniform.default": _of(-1.0, 2.0),
    "aten.native_dropout.default": _dropout,
    "aten.rrelu_with_noise_functional.default": _rrelu,
    "aten.rand.default": lambda: [(([40, 50],), {"dtype": torch.float64}), (([],), {})],
    "aten.randn.default": lambda: [(([40, 50],), {"dtype": torch.float64})],
    "aten.randint.default": lambda: [((9, [40, 50]), {})],
    "aten.randint.low": lambda: [((2, 9, [40, 50]), {"dtype": torch.int32})],
    "aten.normal.float_float": lambda: [((0.5, 2.0, [40, 50]), {})],
    "aten.randperm.default": lambda: [((9,), {})],
    "aten.multinomial.default": lambda: [((positive(40, 7), 3), {}), ((positive(7), 30, True), {})],
}

UNTESTED: dict[str, str] = {"aten._fused_dropout.default": "the kernel runs on CUDA only"}
