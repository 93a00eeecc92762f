"""Whether a value is still what it was: by its content where anything can change it in place."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from hetspmd.run.still import comparison
from hetspmd.trace.host.plain import fingerprint


def rolled(mask: torch.Tensor) -> None:
    mask.copy_(mask.roll(2, 1))


def swapped(mask: torch.Tensor) -> None:
    mask[0, :2] = mask[0, :2].flip(0)


def one_sign(mask: torch.Tensor) -> None:
    mask[-1, -1] = -mask[-1, -1]


def moved_by_a_word(mask: torch.Tensor) -> None:
    mask[5] = mask[5].roll(8)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.int64, torch.bool])
@pytest.mark.parametrize("change", [rolled, swapped, moved_by_a_word])
def test_large_tensors_whose_sums_stay(change: Callable[[torch.Tensor], None], dtype: torch.dtype) -> None:
    """A sparse mask moves within its rows, so that no sum changes."""
    mask = torch.zeros(1 << 15, 64, dtype=dtype)
    mask[:, 0] = 1
    same = comparison(mask, fingerprint(mask))
    assert same(mask)
    change(mask)
    assert not same(mask)


def test_one_element_of_a_large_tensor() -> None:
    mask = torch.ones(1 << 12, 64, dtype=torch.float64)
    same = comparison(mask, fingerprint(mask))
    one_sign(mask)
    assert not same(mask)
    one_sign(mask)
    assert same(mask)
    assert not same(mask.clone())


def test_arrays_that_can_only_be_read() -> None:
    """Torch would warn of them; they change by way of what they are views of."""
    array = np.arange(4.0)
    view = array.view()
    view.setflags(write=False)
    same = comparison(view, fingerprint(view))
    assert same(view)
    array[1] = 7.0
    assert not same(view)
