"""One device: a program holds no more than eager PyTorch does."""

from __future__ import annotations

from math import comb

import pytest
import torch
from test_counted_memory import SIZES

import local

MOST = 1.03
"""Times eager PyTorch's seconds that a step may take."""


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


def surely(ratios: list[float], chance: float = 0.004) -> float:
    """What their median exceeds but for ``chance``: of n sorted ratios the last with at most that chance that
    no more of n fair coins show heads than ratios are below it (the sign test's bound of a median)."""
    ratios, n, below = sorted(ratios), len(ratios), 0.0
    for k in range(n):
        below += comb(n, k) / 2**n
        if below > chance:
            return ratios[k - 1] if k else 0.0
    raise ValueError("no ratios")


def test_what_a_median_surely_exceeds() -> None:
    assert surely([3.0, 1.0, 2.0]) == 0.0, "three may be anything"
    assert surely([1.0 + k / 100 for k in range(15)]) == 1.02, "two or fewer of 15 heads: 121 of 32768"
    assert surely([1.1] * 15) == 1.1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["BERT", "ResNet-50"])
def test_a_step_takes_as_long_as_eager_pytorchs(name: str) -> None:
    """On machines that others use as well single steps say little: it fails where the median surely is above."""
    torch.set_num_threads(1)
    eager, hap = local.seconds(name, 15)
    ratios = [h / e for e, h in zip(eager, hap, strict=True)]
    assert surely(ratios) <= MOST, sorted(ratios)


def test_a_row_of_the_table() -> None:
    measured = local.Measured("X", (1.0, 2.0, 1.0), (1.1, 2.0, 1.2), 1_000_000, 1_100_000)
    assert measured.row() == "| X | 1.000 | 1.200 | 1.100 | 1.000 to 1.200 | 1.0 | 1.1 | 1.100 |"
