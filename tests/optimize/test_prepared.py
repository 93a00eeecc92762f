"""What is made once for steps in several numbers of micro-batches."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from small_plans import cluster
from torch import nn

import hetspmd
import hetspmd.optimize.in_micro_batches as in_micro_batches_module
from hetspmd.cost.model import CostModel
from hetspmd.optimize import outside_of_the_loop, synthesis, zero_levels
from hetspmd.optimize.in_micro_batches import composed, in_micro_batches
from hetspmd.optimize.synthesis import Prepared
from hetspmd.program.lengths import lengths_for
from hetspmd.rules.theory import derive
from hetspmd.search.constraints import Constraints
from hetspmd.search.memory_prices import MemoryPrices
from hetspmd.trace.trace import trace

DEVICES = cluster(4, 2, 1)


class Net(nn.Module):
    """Layers, and scores beside the loss, which have a row for each sample."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers = [layer for _ in range(3) for layer in (nn.Linear(32, 32), nn.Tanh())]
        self.layers = nn.Sequential(nn.Linear(2, 32), *layers)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores = self.layers(x)
        return scores.square().mean(), scores


pytestmark = pytest.mark.filterwarnings("ignore::hetspmd.errors.DroppedOutputWarning")


def test_the_theory_and_the_loop_are_those_of_any_number() -> None:
    theory = derive(trace(Net(), (torch.randn(24, 2),), {}))
    (first, four), (second, six) = in_micro_batches(theory, 4), in_micro_batches(theory, 6)
    assert first is second is not theory
    assert four is not None
    assert six is not None
    assert (four.count, six.count) == (4, 6)
    assert four.loop is six.loop
    assert four.placements is six.placements


def test_prices_of_memory_are_those_that_are_made_anew() -> None:
    theory, two = in_micro_batches(derive(trace(Net(), (torch.randn(24, 2),), {})), 2)
    prepared = Prepared(theory, composed(theory, two, Constraints()))
    first = prepared.memory_prices(two)
    lengths = lengths_for(theory.axes, (0.5, 0.25, 0.25))
    end = len(theory.graph.instructions)
    at = {(i, j): 1e-9 * (1 + j) for i in range(0, end, 7) for j in range(3)}
    for count in (3, 8, 24):
        _, batches = in_micro_batches(theory, count)
        made, anew = prepared.memory_prices(batches), MemoryPrices(prepared.searcher, batches)
        model = CostModel(theory, DEVICES, batches)
        assert not np.array_equal(made.nbytes, first.nbytes)
        assert all(np.array_equal(made.charged(i), anew.charged(i)) for i in range(end))
        for estimated in (False, True):
            got, want = (
                prices.prices(model, lengths, at, 0.25, estimated=estimated) for prices in (made, anew)
            )
            assert np.array_equal(got.keep, want.keep)
            assert all(np.array_equal(got.second_reads[i], want.second_reads[i]) for i in want.second_reads)
            assert estimated is (want.moved is not None)
            assert want.moved is None or np.array_equal(got.moved, want.moved)


def test_numbers_of_micro_batches_share_a_searcher(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    search_space = synthesis.search_space

    def counted(*args: Any) -> Any:
        made.append(args)
        return search_space(*args)

    whole = hetspmd.compile(Net(), (torch.randn(4096, 2),), DEVICES)
    memory = f"{int(0.6 * min(n for n in whole.cost.memory_bytes if n))}B"
    devices = [{"name": f"d{i}", "flops": s * 1e6, "memory": memory} for i, s in enumerate((4, 2, 1))]
    short = {"devices": devices, "network": {"bandwidth": "100GB/s", "latency": "1ns"}}
    monkeypatch.setattr(synthesis, "search_space", counted)
    tried: list[int] = []
    in_number = in_micro_batches_module.in_micro_batches
    monkeypatch.setattr(
        in_micro_batches_module,
        "in_micro_batches",
        lambda theory, count, **given: (tried.append(count), in_number(theory, count, **given))[1],
    )
    plan = hetspmd.compile(Net(), (torch.randn(4096, 2),), short, micro_batches="auto")
    assert plan.micro_batches > 1
    assert len([count for count in tried if count > 1]) > 1, "several numbers were tried"
    assert len(made) == 1, "one space for all numbers; one micro-batch was ruled out without any"
    again = hetspmd.compile(Net(), (torch.randn(4096, 2),), short, micro_batches="auto")
    assert again.to_json() == plan.to_json()


def wide_on_small_devices() -> tuple[nn.Module, tuple[torch.Tensor, ...], dict[str, Any]]:
    """Layers whose parameters no device can hold whole, while it can hold its shards and the largest layer."""
    torch.manual_seed(0)
    layers = [layer for _ in range(8) for layer in (nn.Linear(256, 256, bias=False), nn.Tanh())]
    devices = [{"name": f"d{i}", "flops": 1e8, "memory": "2200kB"} for i in range(8)]
    network = {"bandwidth": "100GB/s", "latency": "1ns"}
    return nn.Sequential(*layers), (torch.randn(1024, 256),), {"devices": devices, "network": network}


def squares(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """A loss."""
    loss: torch.Tensor = model(x).square().mean()
    return loss


def test_zero_1_is_searched_once_where_it_never_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []
    asked: list[int] = []
    in_number, lacks = in_micro_batches_module.in_micro_batches, outside_of_the_loop.lacks_outside

    def counted(ctx: Any, first: Any) -> bool:
        def seen() -> Any:
            asked.append(ctx.batches.count)
            return first()

        return lacks(ctx, seen)

    monkeypatch.setattr(zero_levels, "lacks_outside", counted)
    monkeypatch.setattr(
        in_micro_batches_module,
        "in_micro_batches",
        lambda theory, count, **given: (tried.append(count), in_number(theory, count, **given))[1],
    )
    model, example, devices = wide_on_small_devices()
    plan = hetspmd.compile(model, example, devices, loss=squares, micro_batches="auto")
    assert plan.micro_batches > 1
    several = [count for count in tried if count > 1]
    assert len(several) > 2
    assert asked == several[:1]
