"""Samples of softmax and its relatives."""

from __future__ import annotations

from collections.abc import Callable

import torch

from hetspmd.rules.samples import Sample
from hetspmd.rules.sampling import booleans, real

Samples = Callable[[], list[Sample]]


def _forward() -> list[Sample]:
    x = real(4, 5, 7)
    return [((x, -1, False), {}), ((x, 0, False), {}), ((x, 1, False), {}), ((real(), 0, False), {})]


def _by_dim() -> list[Sample]:
    return [((real(4, 5, 7), -1), {}), ((real(4, 5), 0), {})]


def _safe() -> list[Sample]:
    x = real(4, 5)
    x[1] = float("-inf")
    return [((x, -1), {}), ((real(4, 5), 0), {"dtype": torch.float64})]


def _backward() -> list[Sample]:
    grad, out = real(4, 5, 7), torch.softmax(real(4, 5, 7, seed=1), 1)
    return [((grad, out, 1, torch.float64), {}), ((grad, out, -1, torch.float64), {})]


def _masked_backward() -> list[Sample]:
    return [((real(4, 5), torch.softmax(real(4, 5, seed=1), 1), booleans(4, 5), 1), {})]


SAMPLES: dict[str, Samples] = {
    "aten._softmax.default": _forward,
    "aten._log_softmax.default": _forward,
    "aten._safe_softmax.default": _safe,
    "aten.softmax.int": _by_dim,
    "aten.log_softmax.int": _by_dim,
    "aten._softmax_backward_data.default": _backward,
    "aten._log_softmax_backward_data.default": _backward,
    "aten._masked_softmax_backward.default": _masked_backward,
}
