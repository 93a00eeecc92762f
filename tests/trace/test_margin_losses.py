"""The margin losses' decompositions against torch's kernels, with every option."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from hetspmd.trace.decompositions import _multi_margin_loss, _multilabel_margin_loss

aten = torch.ops.aten


@pytest.mark.parametrize("shape", [(5, 7), (7,), (1, 1)], ids=str)
def test_multi_margin_loss(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, dtype=torch.float64).round(decimals=1)  # so that some margins are just met
    target, weight = torch.randint(0, shape[-1], shape[:-1]), torch.rand(shape[-1], dtype=torch.float64)
    for p, margin, own, reduction in product((1, 2), (1, 0.5), (None, weight), (0, 1, 2)):
        values = []
        for loss in (_multi_margin_loss, aten.multi_margin_loss):
            given = x.clone().requires_grad_()
            found = loss(given, target, p, margin, own, reduction)
            found.sum().backward()
            assert given.grad is not None
            values.append((found.detach(), given.grad))
        torch.testing.assert_close(values[0], values[1], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("shape", [(5, 7), (7,), (1, 1)], ids=str)
def test_multilabel_margin_loss(shape: tuple[int, ...]) -> None:
    """Also with no label at all, and with labels after the end, which do not count."""
    x = torch.randn(shape, dtype=torch.float64)
    for target in (*(torch.randint(-1, shape[-1], shape) for _ in range(4)), torch.full(shape, -1)):
        for reduction in (0, 1, 2):
            found = _multilabel_margin_loss(x, target, reduction)
            want = aten.multilabel_margin_loss_forward(x, target, reduction)
            torch.testing.assert_close(found, want, rtol=1e-12, atol=1e-12)
