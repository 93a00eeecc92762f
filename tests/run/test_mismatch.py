"""An error of torch about sizes that a shard has caused says so, where it ends the process."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from divided import X, net, on_four
from small_plans import cluster
from torch import nn

import hetspmd
from hetspmd.dist.communicator import Communicator
from hetspmd.dist.simulated_world import run_ranks
from hetspmd.errors import ShardError
from hetspmd.run.mismatch import explain
from hetspmd.run.module import HAP
from hetspmd.run.shards import mark, marked


def by_name(hap: HAP, whole: nn.Module) -> None:
    shadow = {name: p.detach().clone() for name, p in whole.named_parameters()}
    for name, p in hap.module.named_parameters():
        shadow[name].mul_(0.9).add_(p.detach(), alpha=0.1)


def lerp(hap: HAP, whole: nn.Module) -> None:
    for mine, theirs in zip(whole.parameters(), hap.parameters(), strict=True):
        mine.data.lerp_(theirs.data, 0.1)


def foreach(hap: HAP, whole: nn.Module) -> None:
    mine, theirs = list(whole.parameters()), list(hap.parameters())
    torch._foreach_lerp_([p.data for p in mine], [p.data for p in theirs], 0.1)


def by_an_operator(hap: HAP, whole: nn.Module) -> None:
    for mine, theirs in zip(whole.parameters(), hap.parameters(), strict=True):
        mine *= theirs


def an_output(hap: HAP, whole: nn.Module) -> None:
    for mine, theirs in zip(whole.parameters(), hap.parameters(), strict=True):
        torch.mul(theirs, 2.0, out=mine)


WAYS = (by_name, lerp, foreach, by_an_operator, an_output)


@pytest.mark.parametrize("way", WAYS, ids=lambda w: w.__name__)
def test_an_average_of_whole_tensors_is_refused(way: Callable[[HAP, nn.Module], None]) -> None:
    def body(hap: HAP, whole: nn.Module) -> str:
        hap(X).backward()
        before = copy.deepcopy(whole)
        with pytest.raises(ShardError) as caught, torch.no_grad():
            way(hap, whole)
        torch.testing.assert_close(whole.a.weight, before.a.weight)  # type: ignore[union-attr, arg-type]  # a layer
        return str(caught.value)

    for text in on_four(body, before=copy.deepcopy):
        assert "parameter a.weight of [24, 12] lies in shards, of which this rank holds [" in text
        assert "copy.deepcopy(hap)" in text
        assert "hap.full_tensors()['a.weight']" in text


class Experts(nn.Module):
    """One for each rank, as many mixtures of experts have: torch broadcasts a row to all."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = nn.Parameter(torch.linspace(0, 1, 144, dtype=torch.float64).reshape(4, 6, 6).sin())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.einsum("bi,eij->ebj", x[:, :6], self.stack).relu().square().mean()


@pytest.mark.parametrize("way", WAYS, ids=lambda w: w.__name__)
def test_one_row_of_whole_tensors_is_refused(way: Callable[[HAP, nn.Module], None]) -> None:
    plan = hetspmd.compile(Experts(), (X,), cluster(1, 1, 1, 1), constraints={"stack": "shard(0)"})

    def body(communicator: Communicator) -> None:
        model = Experts()
        whole = copy.deepcopy(model)
        hap = HAP(model, plan.cluster, plan=plan, process_group=communicator)
        with pytest.raises(ShardError, match=r"stack of \[4, 6, 6\].* holds \[1, 6, 6\]"), torch.no_grad():
            way(hap, whole)
        torch.testing.assert_close(whole.stack, Experts().stack)

    run_ranks(4, body)


def towards(model: nn.Module, whole: nn.Module) -> list[float]:
    """What reads whole tensors beside the model's parameters."""
    losses = []
    for _ in range(3):
        model.zero_grad()
        loss = model(X)
        loss.backward()
        losses.append(loss.item())
        noise = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for mine, theirs in zip(whole.parameters(), model.parameters(), strict=True):
                assert mine.shape == theirs.shape == theirs.grad.shape == theirs.data.shape  # type: ignore[union-attr]  # it has one
                assert (mine.numel(), mine.size(0)) == (theirs.numel(), theirs.data.size(0))
                assert (len(mine), mine.nbytes) == (len(theirs), theirs.nbytes)
                theirs -= 0.1 * (theirs - mine)
                theirs.grad.mul_(mine.abs()).add_(torch.where(mine > 0, mine, theirs), alpha=0.01)  # type: ignore[union-attr]  # it has one
                theirs.add_(theirs.grad + 2 * mine[0], alpha=-0.1)  # broadcast along the first dim
                theirs += 1e-2 * torch.randn(theirs.shape, generator=noise, dtype=theirs.dtype)
                theirs.data.copy_(theirs.data.clamp(min=-mine.abs() - 1, max=mine.abs() + 1))
                if mine.dim() == 2:
                    theirs *= 1 + 0.01 * mine[:, :1]
    return losses


def test_what_reads_whole_tensors_is_that_of_one_device() -> None:
    single = net()
    want = towards(single, copy.deepcopy(single))
    for losses in on_four(towards, before=copy.deepcopy):
        assert losses == pytest.approx(want, rel=1e-9)


def test_an_op_between_two_parameters_is_refused() -> None:
    def body(hap: HAP) -> str:
        encoder, decoder = hap.module.a.weight, hap.module.b[2].weight  # [24, 12] and [12, 16]
        with pytest.raises(ShardError, match="lies in shards"), torch.no_grad():
            encoder + decoder.reshape(-1)[:12]
        with pytest.raises(ShardError) as caught, torch.no_grad():
            torch.addmm(torch.zeros(24, 16).double(), encoder, decoder)
        return str(caught.value)

    for text in on_four(body):
        assert "belongs into the model or into loss=" in text


def test_parameters_that_lie_otherwise_do_not_meet() -> None:
    """Two of equal shape, of which a rank holds other rows."""

    def body(hap: HAP) -> None:
        square = nn.Parameter(hap.module.a.weight.detach().clone())
        mark(square, "other", replace(hap.parameter_shards()["a.weight"], extents=(1, 1, 1, 21)))
        with pytest.raises(ShardError, match=r"\.add\(\) would see no more"):
            _ = hap.module.a.weight + square

    on_four(body)


class Anchored(torch.optim.Optimizer):
    """It draws parameters to values that it was given, whole ones."""

    def __init__(self, parameters: Any, anchors: list[torch.Tensor]) -> None:
        super().__init__(parameters, {})
        self.anchors = anchors

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # it returns no loss
        for p, anchor in zip(self.param_groups[0]["params"], self.anchors, strict=True):
            p.sub_(0.1 * (p - anchor))


def test_an_error_in_a_step_is_given_the_cause() -> None:
    hetspmd.allow_optimizer(Anchored)

    def body(hap: HAP, whole: nn.Module) -> list[str]:
        optimizer = Anchored(hap.parameters(), [p.detach() for p in whole.parameters()])
        hap(X).backward()
        with pytest.raises(RuntimeError, match="size") as caught:
            optimizer.step()
        explain(caught.value)
        return caught.value.__notes__

    for notes in on_four(body, before=copy.deepcopy):
        assert len(notes) == 1
        assert (
            "hetspmd: parameter a.weight of [24, 12] lies in shards, of which this rank holds [" in notes[0]
        )


def test_an_error_beside_a_module_is_left_alone() -> None:
    def body(hap: HAP) -> None:
        module = hap.module
        with pytest.raises(RuntimeError) as caught:
            torch.zeros(2) + torch.zeros(3)
        explain(caught.value)
        assert not hasattr(caught.value, "__notes__"), "the function speaks of no parameter"
        assert module.training

    on_four(body)


def test_other_errors_are_left_alone() -> None:
    def body(hap: HAP) -> None:
        parameters = list(hap.parameters())
        for error in (KeyError("shape"), RuntimeError("no cable"), ShardError("of shape [2]")):
            with pytest.raises(type(error)) as caught:
                raise error
            explain(caught.value)
            assert not hasattr(caught.value, "__notes__")
        assert marked(parameters[0]) is not None, "it is at hand"

    on_four(body)
    with pytest.raises(RuntimeError, match="size of tensor") as caught:
        net().a.weight + torch.ones(5, 5)
    explain(caught.value)
    assert not hasattr(caught.value, "__notes__")


def test_the_process_ends_with_the_note() -> None:
    """Each action is called once, before the hook that was there."""
    program = """
import sys
sys.excepthook = lambda kind, error, trace: print(error, *error.__notes__)
from hetspmd.dist.uncaught import before_the_end
def action(error): error.add_note("a note")
def other(error):
    error.add_note("another")
    raise KeyError("the hook that was there comes all the same")
for each in (action, other, action): before_the_end(each)
raise RuntimeError("sizes differ")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stdout.split("\n")[0] == "sizes differ a note another"


def test_a_hap_module_asks_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []
    monkeypatch.setattr("hetspmd.run.parameter_registry.before_the_end", asked.append)
    on_four(lambda hap: None)
    assert asked == [explain] * 4
