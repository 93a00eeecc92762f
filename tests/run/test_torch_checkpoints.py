"""torch.distributed.checkpoint saves and loads a HAP module as docs/training.md says, on real processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from dcp_worker import AFTER, BEFORE, adamw, worker
from divided import net, train

from processes import launched_once

pytestmark = pytest.mark.slow
WORLD = 4


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Of each rank."""
    folder = launched_once(tmp_path_factory, "torch_checkpoints", worker, WORLD)
    return [torch.load(folder / f"{rank}.pt") for rank in range(WORLD)]


@pytest.mark.parametrize("way", ["whole", "later", "stateful"])
def test_training_goes_on_in_another_plan_as_on_one_device(results: list[dict[str, Any]], way: str) -> None:
    model = net()
    optimizer = adamw(model)
    train(model, BEFORE, optimizer)
    want = train(model, AFTER, optimizer)
    for found in results:
        assert found[way] == pytest.approx(want, rel=1e-9)


def test_what_takes_the_model_apart_is_refused_with_what_to_write(results: list[dict[str, Any]]) -> None:
    for found in results:
        assert "full_optimizer_state_dict(hap, optimizer)}" in found["refused"]
