"""What a model returns without a gradient comes back without one, and can be fed back to it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from equal import cluster
from torch import nn
from torch.nn import functional as F

from hetspmd.cluster.cluster import Cluster
from hetspmd.dist.communicator import Communicator
from hetspmd.dist.simulated_world import run_ranks
from hetspmd.errors import PlanMismatchError
from hetspmd.plan.plan import Plan
from hetspmd.run.module import HAP

X, Y = torch.randn(12, 6), torch.randint(0, 4, (12,))


class Net(nn.Module):
    """A state is fed back; the logits come back twice, and a buffer as it is."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.cell, self.out = nn.GRUCell(6, 8), nn.Linear(8, 4)
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, x: torch.Tensor, y: torch.Tensor, state: torch.Tensor) -> dict[str, Any]:
        state = self.cell(x, state)
        logits = self.out(state) * self.scale
        with torch.no_grad():
            accuracy = (logits.argmax(-1) == y).float().mean()
        return {
            "loss": F.cross_entropy(logits, y),
            "logits": logits,
            "apart": logits.detach(),
            "accuracy": accuracy,
            "state": state.detach(),
            "scale": self.scale,
            "best": logits.argmax(-1),
        }


def kinds(output: dict[str, Any]) -> dict[str, bool | None]:
    return {name: None if t is None else t.requires_grad for name, t in output.items()}


def steps(call: nn.Module, count: int = 3) -> tuple[list[dict[str, bool | None]], list[torch.Tensor]]:
    found, states, state = [], [], torch.zeros(12, 8)
    for _ in range(count):
        output = call(X, Y, state)
        found.append(kinds(output))
        if output["state"] is not None:
            state = output["state"]
            state.numpy()
        output["loss"].backward()
        states.append(state)
    return found, states


CASES: dict[str, tuple[Cluster, dict[str, Any]]] = {
    "devices": (cluster(4, 2, 1), {}),
    "an idle one": (cluster(1000, 1e-6), {}),
    "one device": (cluster(1), {}),
    "one device, lowered": (cluster(1), {"compile": {"backend": "aot_eager"}}),
}


@pytest.mark.parametrize("name", CASES)
def test_outputs_have_gradients_where_the_models_have(name: str) -> None:
    want, states = steps(Net())
    assert want[0]["apart"] is want[0]["accuracy"] is want[0]["state"] is want[0]["scale"] is False
    devices, options = CASES[name]
    models = [Net() for _ in range(devices.ranks)]  # seeded, which threads would do at once

    def body(communicator: Communicator) -> Any:
        model, example = models[communicator.rank], (X, Y, torch.zeros(12, 8))
        hap = HAP(model, devices, example=example, gather_outputs=True, process_group=communicator, **options)
        return steps(hap)

    for found, got in run_ranks(devices.ranks, body):
        assert found == want
        for one, other in zip(got, states, strict=True):
            torch.testing.assert_close(one, other)


def test_sums_of_micro_batches_have_none() -> None:
    devices = cluster(4, 2, 1)

    def body(communicator: Communicator) -> Any:
        example = (X, Y, torch.zeros(12, 8))
        hap = HAP(Net(), devices, example=example, process_group=communicator, micro_batches=2)
        return kinds(hap(*example))

    with pytest.warns(UserWarning, match="come back as None"):
        ranks = run_ranks(3, body)
    for found in ranks:
        assert (found["loss"], found["accuracy"], found["scale"]) == (True, False, False)
        assert found["state"] is found["logits"] is None


def test_a_plan_file_keeps_which_they_are() -> None:
    hap = HAP(Net(), cluster(1), example=(X, Y, torch.zeros(12, 8)))
    text = hap.plan.to_json()
    assert text.count('"detached":true') == 5  # integers have no gradient either
    assert Plan.from_json(text).graph.outputs == hap.plan.graph.outputs


def test_a_parameter_that_was_added_is_named_in_the_first_step() -> None:
    devices = cluster(4, 2)

    def body(communicator: Communicator) -> None:
        example = (X, Y, torch.zeros(12, 8))
        hap = HAP(Net(), devices, example=example, process_group=communicator)
        hap.module.temperature = nn.Parameter(torch.zeros(()))
        for _ in range(2):
            with pytest.raises(
                PlanMismatchError, match=r"temperature; change the model before it is wrapped"
            ):
                hap(*example)

    run_ranks(2, body)
