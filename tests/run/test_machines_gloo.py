"""Machines of several accelerators as real processes over gloo equal the simulation, which equals the single
device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from machines_worker import plans, train, worker

from hetspmd.dist.simulated_world import run_ranks
from hetspmd.verify.comparison import largest_error
from processes import spawn


@pytest.mark.slow
@pytest.mark.parametrize("accelerators", [(1, 2), (2, 1, 2)])
def test_training_equals_the_simulation(accelerators: tuple[int, ...], tmp_path: Path) -> None:
    world = sum(accelerators)
    spawn(worker, (accelerators, str(tmp_path)), nprocs=world)
    results: list[list[Any]] = [torch.load(tmp_path / f"{rank}.pt") for rank in range(world)]
    assert len({r[-1] for r in results}) == 1, "rank 0 compiles for all"
    for index, (c, plan) in enumerate(plans(accelerators)):
        _ = plan.theory, plan.digest
        simulated = run_ranks(world, lambda comm, c=c, plan=plan: train(c, plan, comm))
        for rank in range(world):
            got, want = results[rank][index], simulated[rank]
            assert got["losses"] == pytest.approx(want["losses"], rel=1e-10)
            assert got["norms"] == pytest.approx(want["norms"], rel=1e-10)
            for kind in ("gradients", "state"):
                assert largest_error(got[kind], want[kind], 1e-9)[0] <= 1e-9
