"""Buffers of collectives count for longer than the profile says, so that what fits fits on a slower link.

Ranks wait for collectives that have not completed by then (:mod:`hetspmd.cost.arrivals`): on a link that is a
little slower they do not have to.
"""

from __future__ import annotations

import pytest
from cost_graphs import cluster, data_parallel, mlp, random_program

from hetspmd.cost import simulated_run
from hetspmd.cost.model import CostModel
from hetspmd.cost.step import StepModel
from hetspmd.program.lengths import lengths_for

BANDWIDTHS = (2e6, 5e6, 1e7, 2e7, 5e7)
"""In bytes/s: from links that the step waits for to links that it hardly notices."""
SLOWER = 1.2
"""The factor by which the link is slower than its profile."""


def peaks(seed: int, bandwidth: float) -> tuple[float, ...]:
    theory = mlp(batch=64, width=32, hidden=64, layers=4)
    program = data_parallel(theory) if seed == 0 else random_program(theory, seed)
    model = CostModel(theory, cluster(1e8, 5e7, bandwidth=bandwidth, launch=1e-9))
    return tuple(StepModel(model, program).held(lengths_for(theory.axes, (0.6, 0.4))).peaks)


def test_peaks_hold_on_a_slower_link(monkeypatch: pytest.MonkeyPatch) -> None:
    cases = [(seed, bandwidth) for seed in range(8) for bandwidth in BANDWIDTHS]
    predicted = [peaks(*case) for case in cases]
    monkeypatch.setattr(simulated_run, "LATE", 0.0)
    slower = [peaks(seed, bandwidth / SLOWER) for seed, bandwidth in cases]
    for held, most in zip(slower, predicted, strict=True):
        assert all(h <= m for h, m in zip(held, most, strict=True))
