"""A whole copy of a parameter of which every rank holds one row is warned of: the row would broadcast to it."""

from __future__ import annotations

import copy
import threading
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from small_plans import cluster
from torch import nn

import hetspmd
from hetspmd.errors import BroadcastWarning
from hetspmd.lower.local import lower
from hetspmd.lower.program import LocalTensor
from hetspmd.run.communicator import Communicator
from hetspmd.run.simulate import run_ranks
from hetspmd.run.whole_copies import warn_of_copies

X = torch.randn(8, 6, dtype=torch.float64)
FOUR = cluster(1, 1, 1, 1)


class Experts(nn.Module):
    """One for each rank, as many mixtures of experts have."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stack = nn.Parameter(torch.randn(4, 6, 6, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.einsum("bi,eij->ebj", x, self.stack).relu().square().mean()


def warned(before: Callable[[nn.Module], Any], form: str = "shard(0)") -> list[str]:
    """What is said where something has been done with the model before."""
    model = Experts()
    kept = before(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", BroadcastWarning)
        warn_of_copies(model, layouts(form))
    assert kept is not None
    return [str(w.message) for w in caught if w.category is BroadcastWarning]


def layouts(form: str) -> dict[str, LocalTensor]:
    plan = hetspmd.compile(Experts(), (X,), FOUR, constraints={"stack": form})
    found = dict(
        zip(
            ["stack"],
            lower(plan.theory, plan.program, plan.lengths, 0, torch.device("cpu")).parameters,
            strict=True,
        )
    )
    assert len(found["stack"].extents) == 4
    return found


@pytest.mark.parametrize(
    "before",
    [
        copy.deepcopy,
        lambda model: {name: p.detach().clone() for name, p in model.named_parameters()},
        lambda model: [p.data.clone().requires_grad_() for p in model.parameters()],
    ],
    ids=["a model", "a shadow", "a list"],
)
def test_each_kind_of_copy(before: Callable[[nn.Module], Any]) -> None:
    told = warned(before)
    assert told
    assert "every rank holds one row of parameter stack [4, 6, 6], and a whole copy of it exists" in told[0]
    assert "copy.deepcopy(hap)" in told[0]


def test_nothing_is_said_without_a_copy_or_of_other_shards() -> None:
    assert not warned(lambda model: torch.optim.SGD(model.parameters(), lr=0.1))
    assert not warned(lambda model: {n: p.detach().view_as(p) for n, p in model.named_parameters()})
    assert not warned(lambda model: {n: p + 1 for n, p in model.named_parameters()})
    assert not warned(copy.deepcopy, "shard(1)"), "its rows do not broadcast"


def test_processes_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that are threads are not: the others' models are copies, too."""
    plan = hetspmd.compile(Experts(), (X,), FOUR, constraints={"stack": "shard(0)"})
    own = threading.local()

    def body(communicator: Communicator, process: bool) -> None:
        own.communicator = communicator
        group = None if process else communicator
        hetspmd.HAP(Experts(), FOUR, plan=plan, process_group=group)(X).backward()

    monkeypatch.setattr("hetspmd.run.module.communicator_for", lambda group, ranks: own.communicator)
    for process in (True, False):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", BroadcastWarning)
            run_ranks(4, partial(body, process=process))
        assert any(w.category is BroadcastWarning for w in caught) == process
