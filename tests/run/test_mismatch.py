"""An error of torch about sizes that a shard has caused says so, where it ends the process."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from divided import X, net, on_four
from torch import nn

from hetspmd.errors import ShardError
from hetspmd.run.mismatch import explain
from hetspmd.run.module import HAP
from hetspmd.run.shards import marked


def by_name(hap: HAP, whole: nn.Module) -> None:
    shadow = {name: p.detach().clone() for name, p in whole.named_parameters()}
    for name, p in hap.module.named_parameters():
        shadow[name].mul_(0.9).add_(p.detach(), alpha=0.1)


def lerp(hap: HAP, whole: nn.Module) -> None:
    for mine, theirs in zip(whole.parameters(), hap.parameters(), strict=True):
        mine.data.lerp_(theirs.data, 0.1)


def in_a_comprehension(hap: HAP, whole: nn.Module) -> None:
    _ = [a - b for a, b in zip(whole.parameters(), hap.parameters(), strict=True)]


def foreach(hap: HAP, whole: nn.Module) -> None:
    mine, theirs = list(whole.parameters()), list(hap.parameters())
    torch._foreach_lerp_([p.data for p in mine], [p.data for p in theirs], 0.1)


def two_parameters(hap: HAP, whole: nn.Module) -> None:
    encoder, decoder = hap.module.a.weight, hap.module.b[2].weight  # [24, 12] and [12, 16]
    with torch.no_grad():
        torch.addmm(torch.zeros(24, 16).double(), encoder, decoder)


WAYS = (by_name, lerp, in_a_comprehension, foreach)


@pytest.mark.parametrize("way", WAYS, ids=lambda w: w.__name__)
def test_an_average_of_whole_tensors(way: Callable[[HAP, nn.Module], None]) -> None:
    def body(hap: HAP, whole: nn.Module) -> tuple[str, list[str]]:
        hap(X).backward()
        with pytest.raises((RuntimeError, ValueError)) as caught, torch.no_grad():
            way(hap, whole)
        explain(caught.value)
        return str(caught.value), caught.value.__notes__

    for message, notes in on_four(body, before=copy.deepcopy):
        assert "size" in message or "shape" in message
        (note,) = notes
        assert "hetspmd: parameter a.weight of [24, 12] lies in shards, of which this rank holds [" in note
        assert "average = copy.deepcopy(hap)" in note
        assert "hap.full_tensors()['a.weight']" in note


def test_an_op_between_two_parameters() -> None:
    def body(hap: HAP, whole: nn.Module) -> list[str]:
        with pytest.raises(RuntimeError) as caught:
            two_parameters(hap, whole)
        explain(caught.value)
        return caught.value.__notes__

    for notes in on_four(body, before=copy.deepcopy):
        assert len(notes) == 1
        assert "belongs into the model or into loss=" in notes[0]


class Adapted(nn.Module):
    """A model whose method adds one of its weights to a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(12, 24), nn.Linear(24, 12)

    def delta(self) -> torch.Tensor:
        return self.second.weight * 2

    def merge(self, whole: torch.Tensor) -> None:
        whole += self.delta()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x)).square().mean()


def adapted() -> Adapted:
    torch.manual_seed(1)
    return Adapted().double()


def by_a_method(model: Adapted) -> None:
    model.merge(torch.zeros(7, 5))


def by_a_function(model: Adapted) -> None:
    torch.zeros(3, 5).copy_(model.first.weight.data)


def merge_all(size: int, *models: Adapted) -> None:
    for model in models:
        torch.zeros(size, size).add_(model.second.weight.data)


def in_a_loop(model: Adapted) -> None:
    merge_all(7, model)


@pytest.mark.parametrize("way", [by_a_method, by_a_function, in_a_loop], ids=lambda w: w.__name__)
def test_a_method_of_a_module_that_takes_its_parameters_for_whole_ones(
    way: Callable[[Adapted], None],
) -> None:
    def body(hap: HAP) -> list[str]:
        hap(X).backward()
        with pytest.raises(RuntimeError) as caught, torch.no_grad():
            way(hap.module)
        explain(caught.value)
        return caught.value.__notes__

    for notes in on_four(body, adapted):
        assert len(notes) == 1
        assert ".weight of [" in notes[0]
        assert "takes hap.full_tensors()['" in notes[0]


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
    program = f"""
import sys
sys.path.insert(0, {str(sys.path[0])!r})
sys.excepthook = lambda kind, error, trace: print(error, *error.__notes__)
from hetspmd.run.uncaught import before_the_end
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
    monkeypatch.setattr("hetspmd.run.owners.before_the_end", asked.append)
    on_four(lambda hap: None)
    assert asked == [explain] * 4
