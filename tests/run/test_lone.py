"""Where one device is active its rank runs the model itself; where the lowered graphs are wanted, they run."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from ranks import lone as lone_rank
from ranks import loss_of, on_ranks
from small_models import case
from small_plans import cluster
from torch import nn

from hetspmd.dist.simulated_world import run_ranks
from hetspmd.errors import GradientError
from hetspmd.optimize.compiler import plan_for
from hetspmd.run.module import HAP
from hetspmd.run.passthrough import is_the_model, run_model
from hetspmd.search.constraints import Constraints

_CALLS: dict[int, list[int]] = {}


@pytest.fixture(autouse=True)
def _counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that the model itself runs are counted; a hook would not tell, for plans keep what it does."""

    def counted(model: nn.Module, *args: Any) -> Any:
        _CALLS.setdefault(id(model), []).append(1)
        return run_model(model, *args)

    _CALLS.clear()
    monkeypatch.setattr("hetspmd.run.module.run_model", counted)


def calls(hap: HAP) -> list[int]:
    """Grows with every call of the model itself."""
    return _CALLS.setdefault(id(hap.module), [])


@pytest.mark.parametrize("name", ["mlp", "conv"])
def test_the_model_runs_and_its_bits_are_eager_pytorchs(name: str) -> None:
    c = case(name)
    eager = copy.deepcopy(c.model)
    want = eager(**c.batch)
    loss_of(want).backward()
    hap = lone_rank(c)
    assert is_the_model(hap.plan)
    ran = calls(hap)
    output = hap(**c.batch)
    assert type(output) is type(want)
    loss_of(output).backward()
    assert len(ran) == 1
    assert torch.equal(loss_of(output), loss_of(want))
    gradients = dict(eager.named_parameters())
    for key, parameter in hap.module.named_parameters():
        expected = gradients[key].grad
        assert (parameter.grad is None) == (expected is None)
        assert expected is None or torch.equal(parameter.grad, expected)
    for (key, buffer), (_, true) in zip(hap.module.named_buffers(), eager.named_buffers(), strict=True):
        assert torch.equal(buffer, true), key


def test_random_numbers_are_those_of_the_plan() -> None:
    """They must not depend on how many devices are active, so the lowered graph draws them."""
    c = case("attention")
    hap = lone_rank(c)
    assert not is_the_model(hap.plan)
    ran = calls(hap)
    loss_of(hap(**c.batch)).backward()
    assert ran == []
    still = case("attention", dropout=0.0)
    assert is_the_model(lone_rank(still).plan)


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize("wanted", ["recording", "nan", "compile", "asked"])
def test_lowered_graphs_run_where_they_are_wanted(wanted: str) -> None:
    c = case("mlp")
    hap = lone_rank(c, compile={"backend": "eager"} if wanted == "compile" else False)
    ran = calls(hap)

    def step() -> torch.Tensor:
        loss = loss_of(hap(**c.batch))
        loss.backward()
        return loss.detach()

    if wanted == "recording":
        with hap.record():
            lowered = step()
    elif wanted == "nan":
        with torch.autograd.detect_anomaly():
            lowered = step()
    else:
        if wanted == "asked":
            hap.run_lowered()
        lowered = step()
    assert ran == []
    torch.testing.assert_close(lowered, loss_of(c.model(**c.batch)).detach())


@pytest.mark.parametrize("active", [(0,), (2,)])
def test_idle_ranks_get_what_the_model_returns(active: tuple[int, ...]) -> None:
    c = case("mlp")
    plan = plan_for(c.theory, cluster(1, 2, 3), Constraints(), (1.0,), active=active)

    def body(hap: HAP) -> tuple[int, torch.Tensor, Any, bool]:
        ran = calls(hap)
        output = hap(**c.batch)
        loss = loss_of(output)
        loss.backward()
        with torch.no_grad():
            again = hap(**c.batch)
        assert torch.equal(loss_of(again), loss.detach())
        return len(ran), loss.detach(), output, hap.rank in active

    want = loss_of(c.model(**c.batch)).detach()
    for ran, loss, output, runs in on_ranks(c, plan, body, gather_outputs=True):
        assert ran == (2 if runs else 0)
        assert torch.equal(loss, want)
        assert torch.utils._pytree.tree_structure(output) == torch.utils._pytree.tree_structure(
            c.model(**c.batch)
        )


def test_outputs_refuse_gradients_as_everywhere() -> None:
    c = case("attention", dropout=0.0)
    hap = lone_rank(c)
    output = hap(**c.batch)
    others = [
        t for t in torch.utils._pytree.tree_leaves(output) if t is not loss_of(output) and t.requires_grad
    ]
    assert others
    with pytest.raises(GradientError, match="not the loss"):
        others[0].sum().backward()


def test_a_model_that_raises_is_reported_to_idle_ranks() -> None:
    c = case("mlp")
    plan = plan_for(c.theory, cluster(1, 2), Constraints(), (1.0,), active=(1,))
    models = [copy.deepcopy(c.model) for _ in range(2)]
    _ = plan.theory, plan.digest
    seen: dict[int, BaseException] = {}

    def rank(communicator: Any) -> None:
        if communicator.rank == 1:
            models[1].register_forward_pre_hook(
                lambda *_: (_ for _ in ()).throw(ArithmeticError("of the model"))
            )
        hap = HAP(
            models[communicator.rank], plan.cluster, plan=plan, process_group=communicator, timeout=10.0
        )
        try:
            hap(**c.batch)
        except Exception as error:
            seen[communicator.rank] = error
            raise

    with pytest.raises(ArithmeticError):
        run_ranks(2, rank)
    assert isinstance(seen[1], ArithmeticError)
    assert "of the model" in str(seen[0])
