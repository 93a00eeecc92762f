"""The bench of compiling: its rows say what they should of a small step."""

from __future__ import annotations

import pytest

import compile as bench
import zoo
from hetspmd.trace.trace import split_example, trace
from real_models import cluster


def test_rows_of_a_small_step(monkeypatch: pytest.MonkeyPatch) -> None:
    model, example, _ = zoo.build("gpt2")
    args, kwargs = split_example(example)
    graph = trace(model, args, kwargs, loss=None)
    monkeypatch.setattr(bench, "traced", lambda _name: (graph, 2.0))
    monkeypatch.setattr(bench, "cluster", lambda speeds: cluster(speeds, real=False))
    made = list(bench.rows(["GPT-2"], ["4 devices"], (None, 1e-4)))
    free, short = ([cell.strip() for cell in row.split("|")[1:-1]] for row in made[2:])
    assert free[:4] == ["GPT-2", "4 devices", "any", "2.00"]
    assert float(free[6]) == pytest.approx((float(free[4]) + float(free[5])) / 2, abs=0.02)
    assert free[7].endswith(" s")
    assert short[7].startswith("none can fit: ")
