"""What the checks cost is measured on two processes."""

from __future__ import annotations

import pytest

import checks


@pytest.mark.slow
def test_two_ranks_take_turns() -> None:
    found = checks.measure("BERT", 3, batch=4, tokens=8, layers=1, width=32)
    assert len(found) == checks.RANKS
    for rank in found:
        assert len(rank.checked) == len(rank.unchecked) == len(rank.planning) == 3
        assert all(0 < p < c < 60 for p, c in zip(rank.planning, rank.checked, strict=True))


def test_a_row() -> None:
    one = checks.Checked((1.1, 1.0, 1.2), (1.0, 1.0, 1.0), (0.01, 0.02, 0.01))
    assert checks.row("X", [one, one]) == "| X | 2.000 | 1.1000 | 1.0000 to 1.2000 | 20.00 | 1.00 % |"
