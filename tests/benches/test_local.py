"""One device: a program holds no more than eager PyTorch does."""

from __future__ import annotations

import pytest
import torch
from test_counted_memory import SIZES

import local


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow) if n == "ResNet-50" else n for n in SIZES]
)
def test_peak_memory_is_that_of_eager_pytorch(name: str) -> None:
    eager, hap = local.peaks(name, **SIZES[name])
    assert eager > 1e6
    assert hap <= 1.05 * eager


@pytest.mark.parametrize("dtype", [None, pytest.param(torch.bfloat16, marks=pytest.mark.slow)])
def test_steps_are_timed_in_pairs(dtype: torch.dtype | None) -> None:
    eager, hap = local.seconds("BERT", 3, dtype=dtype, batch=2, tokens=8, layers=1, width=32)
    assert len(eager) == len(hap) == 3
    assert all(0 < s < 60 for s in (*eager, *hap))


def test_a_row_of_the_table() -> None:
    measured = local.Measured("X", (1.0, 2.0, 1.0), (1.1, 2.0, 1.2), 1_000_000, 1_100_000)
    assert measured.row() == "| X | 1.000 | 1.200 | 1.100 | 1.000 to 1.200 | 1.0 | 1.1 | 1.100 |"
