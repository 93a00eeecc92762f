"""Under torch's anomaly mode the instruction that first makes NaN is named, forward and backward."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from ranks import loss_of, on_ranks, own_gradient
from small_models import case
from small_plans import cluster, random_plan
from torch import nn

import hetspmd
from hetspmd.dist.communicator import Communicator
from hetspmd.dist.simulated_world import run_ranks
from hetspmd.errors import NanError
from hetspmd.run.module import HAP
from hetspmd.run.shard_tensors import plain
from workbench import randomness


class Root(nn.Module):
    def forward(self, x):
        return x.sqrt()


class SafeRoot(nn.Module):
    """Whose value at 0 is 0 and whose gradient there is NaN."""

    def forward(self, x):
        return torch.where(x > 0.0, x.sqrt(), torch.zeros_like(x))


class Net(nn.Module):
    def __init__(self, root):
        super().__init__()
        self.first = nn.Linear(3, 4, bias=False)
        self.root = root
        self.last = nn.Linear(4, 1)

    def forward(self, x):
        return {"loss": self.last(self.root(self.first(x))).sum()}


def net(root):
    model = Net(root).double()
    with torch.no_grad():
        model.first.weight.fill_(1.0)
    return model


def stepped(model, x, shares=(3, 2, 1)):
    """One step on simulated ranks of these speeds, the batch divided; the gradients of all ranks."""
    made = cluster(*shares)
    forms = {"x": "shard(0)"}
    plan = hetspmd.compile(model, {"x": torch.ones_like(x)}, made, constraints=forms)
    assert len(plan.active) == len(shares)

    def body(communicator: Communicator):
        hap = HAP(copy.deepcopy(model), made, plan=plan, process_group=communicator)
        loss = hap(x=x)["loss"]
        loss.backward()
        return loss.detach(), [own_gradient(p) for p in hap.parameters()]

    return run_ranks(len(shares), body)


@pytest.fixture
def anomaly():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that it is slow
        with torch.autograd.detect_anomaly():
            yield


@pytest.mark.usefixtures("anomaly")
def test_the_instruction_that_makes_nan_is_named() -> None:
    x = torch.ones(12, 3, dtype=torch.float64)
    x[9] = -1.0  # a row of the second rank's, or the third's
    with pytest.raises(NanError) as caught:
        stepped(net(Root()), x)
    text = str(caught.value)
    assert "aten.sqrt" in text
    assert "of module root at" in text
    assert "test_anomaly.py:" in text
    assert "makes NaN of inputs without any, on rank 1: 4 of" in text
    assert "from -3 to 3" in text


@pytest.mark.usefixtures("anomaly")
def test_in_the_backward_too() -> None:
    x = torch.ones(12, 3, dtype=torch.float64)
    x[11] = 0.0
    with pytest.raises(NanError, match=r"of module backward of root at .*test_anomaly.py:\d+ .*on rank 2"):
        stepped(net(SafeRoot()), x)


def test_nobody_looks_unless_asked() -> None:
    x = torch.ones(12, 3, dtype=torch.float64)
    x[11] = 0.0
    found = stepped(net(SafeRoot()), x)
    assert all(torch.isfinite(loss) for loss, _ in found)
    assert any(torch.isnan(g).any() for _, gradients in found for g in gradients)


@pytest.mark.usefixtures("anomaly")
def test_a_nan_of_the_batch_is_not_the_models() -> None:
    x = torch.full((12, 3), torch.nan, dtype=torch.float64)
    with pytest.raises(RuntimeError, match="returned nan values"):  # torch's, of the whole step
        stepped(net(Root()), x)


@pytest.mark.parametrize("name", ["mlp", "attention"])
def test_the_same_numbers(name: str) -> None:
    """With uneven and empty shards, programs of any kind."""
    c = case(name)

    def body(hap: HAP):
        hap.use_randomness(randomness(hap.rank))
        loss_of(hap(**c.batch)).backward()
        return plain(p.grad for p in hap.parameters() if p.grad is not None)

    for seed in range(4):
        plan = random_plan(c, 3, seed)
        unwatched = on_ranks(c, plan, body)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with torch.autograd.detect_anomaly():
                watched = on_ranks(c, plan, body)
        for a, b in zip(unwatched, watched, strict=True):
            assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
