"""Samples of losses, each with every reduction."""

from __future__ import annotations

from collections.abc import Callable

import torch

from hetspmd.rules.samples import Sample
from hetspmd.rules.sampling import integers, positive, real

Samples = Callable[[], list[Sample]]

_REDUCTIONS = (0, 1, 2)


def _forward(*rest: float) -> Samples:
    def samples() -> list[Sample]:
        x, y = real(4, 5), real(4, 5, seed=1)
        return [((x, y, r, *rest), {}) for r in _REDUCTIONS]

    return samples


def _backward(*rest: float) -> Samples:
    def samples() -> list[Sample]:
        x, y = real(4, 5), real(4, 5, seed=1)
        grads = (real(4, 5, seed=2), real(), real())
        return [((grads[r], x, y, r, *rest), {}) for r in _REDUCTIONS]

    return samples


def _bce() -> list[Sample]:
    x, y, w = positive(4, 5), positive(4, 5, seed=1), positive(4, 5, seed=2)
    return [*[((x, y, None, r), {}) for r in _REDUCTIONS], *[((x, y, w, r), {}) for r in _REDUCTIONS]]


def _bce_backward() -> list[Sample]:
    x, y, w = positive(4, 5), positive(4, 5, seed=1), positive(4, 5, seed=2)
    grads = (real(4, 5, seed=2), real(), real())
    return [((grads[r], x, y, weight, r), {}) for weight in (None, w) for r in _REDUCTIONS]


def _bce_logits() -> list[Sample]:
    x, y, w, p = real(4, 5), positive(4, 5, seed=1), positive(4, 5, seed=2), positive(5, seed=3)
    return [
        *[((x, y, None, p, r), {}) for r in _REDUCTIONS],
        *[((x, y, w, None, r), {}) for r in _REDUCTIONS],
    ]


def _kl() -> list[Sample]:
    x, y = real(4, 5), positive(4, 5, seed=1)
    return [*[((x, y, r), {}) for r in _REDUCTIONS], ((x, y, 2), {"log_target": True})]


def _signs() -> torch.Tensor:
    return integers(2, 4, 5).double() * 2 - 1


def _soft_margin() -> list[Sample]:
    return [((real(4, 5), _signs(), r), {}) for r in _REDUCTIONS]


def _soft_margin_backward() -> list[Sample]:
    grads = (real(4, 5, seed=2), real(), real())
    return [((grads[r], real(4, 5), _signs(), r), {}) for r in _REDUCTIONS]


def _nll_cases() -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, int]]:
    """Scores, target, weight and ignored class."""
    target = integers(7, 5)
    some = target.clone()
    some[1] = -100
    return [
        (real(5, 7), target, None, -100),
        (real(5, 7), some, positive(7, seed=1), -100),
        (real(5, 7), target, positive(7, seed=1), int(target[0])),
        (real(7), integers(7), positive(7, seed=1), -100),
    ]


def _nll2d_cases() -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, int]]:
    target = integers(7, 4, 3, 2)
    return [(real(4, 7, 3, 2), target, None, -100), (real(4, 7, 3, 2), target, positive(7, seed=1), 2)]


def _nll() -> list[Sample]:
    return [((x, t, w, r, i), {}) for x, t, w, i in _nll_cases() for r in _REDUCTIONS]


def _nll2d() -> list[Sample]:
    return [((x, t, w, r, i), {}) for x, t, w, i in _nll2d_cases() for r in _REDUCTIONS]


def _nll_backward() -> list[Sample]:
    samples: list[Sample] = []
    for x, t, w, i in _nll_cases():
        for r in _REDUCTIONS:
            loss, total = torch.ops.aten.nll_loss_forward.default(x, t, w, r, i)
            samples.append(((real(*loss.shape, seed=3), x, t, w, r, i, total), {}))
    return samples


def _nll2d_backward() -> list[Sample]:
    samples: list[Sample] = []
    for x, t, w, i in _nll2d_cases():
        for r in _REDUCTIONS:
            loss, total = torch.ops.aten.nll_loss2d_forward.default(x, t, w, r, i)
            samples.append(((real(*loss.shape, seed=3), x, t, w, r, i, total), {}))
    return samples


SAMPLES: dict[str, Samples] = {
    "aten.mse_loss.default": _forward(),
    "aten.mse_loss_backward.default": _backward(),
    "aten.l1_loss.default": _forward(),
    "aten.smooth_l1_loss.default": _forward(0.7),
    "aten.smooth_l1_loss_backward.default": _backward(0.7),
    "aten.huber_loss.default": _forward(0.7),
    "aten.huber_loss_backward.default": _backward(0.7),
    "aten.soft_margin_loss.default": _soft_margin,
    "aten.soft_margin_loss_backward.default": _soft_margin_backward,
    "aten.kl_div.default": _kl,
    "aten.binary_cross_entropy.default": _bce,
    "aten.binary_cross_entropy_backward.default": _bce_backward,
    "aten.binary_cross_entropy_with_logits.default": _bce_logits,
    "aten.nll_loss_forward.default": _nll,
    "aten.nll_loss_backward.default": _nll_backward,
    "aten.nll_loss2d_forward.default": _nll2d,
    "aten.nll_loss2d_backward.default": _nll2d_backward,
}
