"""Alike layers that a search takes as one: which they are, what is found among them, and the plans that follow."""

from __future__ import annotations

import dataclasses
from typing import Literal

import numpy as np
import pytest
import torch
from torch import nn

import hetspmd
from hetspmd import _core
from hetspmd.cost.model import CostModel
from hetspmd.errors import InfeasibleError, SearchError
from hetspmd.program.lengths import lengths_for
from hetspmd.rules.theory import Theory, derive
from hetspmd.search import constraints as known
from hetspmd.search.constraints import Constraints
from hetspmd.search.folding import RUNS, alike_instructions
from hetspmd.search.search import Limits, Searcher
from hetspmd.search.space import Space, search_space
from hetspmd.trace.trace import trace
from hetspmd.verify.comparison import verify
from memory_cases import devices, stack, with_memory

LAYERS = 20


class Block(nn.Module):
    """A layer with two parameters and a residual; ``wide``: with another hidden width."""

    def __init__(self, wide: bool = False) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 96 if wide else 64), nn.Linear(96 if wide else 64, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Deep(nn.Module):
    """Alike layers in a list, with others between them."""

    def __init__(self, wide: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.begin = nn.Linear(16, 32)
        self.layers = nn.ModuleList(Block(n in wide) for n in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.begin(x)
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def deep(*wide: int) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    return Deep(wide).double(), {"x": torch.randn(96, 16, dtype=torch.float64)}


def space_of(model: nn.Module, example: dict[str, torch.Tensor]) -> tuple[Theory, Space]:
    theory = derive(trace(model, (), example))
    return theory, search_space(theory, Constraints({}))


def runs(theory: Theory, alike: np.ndarray) -> list[set[str]]:
    """The layers whose weights are folded into one, by their number."""
    weights = {i.name: i.id for i in theory.graph.instructions if i.name.endswith("up.weight")}
    by_first: dict[int, set[str]] = {}
    for name, i in weights.items():
        by_first.setdefault(int(alike[i]), set()).add(name.split(".")[1])
    return list(by_first.values())


def test_alike_layers_are_folded_into_runs_of_neighbours() -> None:
    theory, space = space_of(*deep())
    alike = alike_instructions(space)
    assert alike is not None
    assert (alike[alike] == alike).all()
    found = runs(theory, alike)
    # The first and the last layer may stand alone.
    assert RUNS <= len(found) <= RUNS + 2
    for run in found:
        numbers = sorted(map(int, run))
        assert numbers == list(range(numbers[0], numbers[-1] + 1))
    graph = theory.graph
    for i, first in enumerate(alike.tolist()):
        assert graph.instructions[i].op == graph.instructions[first].op
        assert graph.instructions[i].phase == graph.instructions[first].phase
    assert len(np.unique(alike)) < 0.6 * len(alike)


def test_layers_of_other_shapes_are_not_among_them() -> None:
    theory, space = space_of(*deep(3, 11))
    alike = alike_instructions(space)
    assert alike is not None
    assert all(
        run in ({"3"}, {"11"}, {"3", "11"}) or run.isdisjoint({"3", "11"}) for run in runs(theory, alike)
    )


@pytest.mark.parametrize(("layers", "largest"), [(4, 2), (5, 3), (7, 3), (RUNS, 2)])
def test_few_layers_are_folded_only_where_that_is_asked_for(layers: int, largest: int) -> None:
    """Then two layers and more are a run. The first of all is unlike the others: its input has no gradient."""
    space = space_of(*stack(layers))[1]
    assert alike_instructions(space) is None
    alike = alike_instructions(space, few=True)
    assert alike is not None
    assert np.unique(alike, return_counts=True)[1].max() == largest


def test_a_single_layer_is_never_folded() -> None:
    assert alike_instructions(space_of(*stack(1))[1], few=True) is None


def test_what_is_found_is_a_program_of_the_whole_space() -> None:
    """At costs without prices it is as good as the best; alike instructions take the same rows."""
    theory, space = space_of(*deep())
    model = CostModel(theory, devices(0.4, 0.3, 0.2, 0.1))
    lengths = lengths_for(theory.axes, ((0.4, 0.3, 0.2, 0.1),))
    searcher = Searcher(space)
    best = searcher.search(model, lengths, Limits())
    assert searcher.folds
    folded = searcher.search(model, lengths, Limits(), folded=True)
    assert best.stop_reason == folded.stop_reason == "optimal"
    assert best.cost <= folded.cost <= 1.02 * best.cost
    assert folded.cost == pytest.approx(searcher.cost(folded, model, lengths))
    alike = alike_instructions(space)
    assert alike is not None
    every = [theory.rows[i][row] for i, row in enumerate(folded.rows)]
    assert all(
        (row.pre, row.post) == (every[first].pre, every[first].post)
        for row, first in zip(every, alike.tolist(), strict=True)
    )
    again = searcher.search(model, lengths, Limits())
    assert again.cost == best.cost


def test_wrong_groups_are_refused() -> None:
    theory, space = space_of(*stack(2))
    core = _core.Searcher(space.structure())
    with pytest.raises(ValueError, match="alike: 3 given"):
        core.fold(np.arange(3, dtype="<i8").tobytes())
    with pytest.raises(ValueError, match="is not like"):
        core.fold(np.zeros(len(theory.rows), dtype="<i8").tobytes())
    with pytest.raises(ValueError, match="stands for 0"):
        core.fold(np.full(len(theory.rows), -1, dtype="<i8").tobytes())
    with pytest.raises(ValueError, match="no instructions are known to be alike"):
        core.solve(time_limit=1.0, max_expansions=10, memory_limit=1 << 30, folded=True)


@pytest.mark.parametrize(("count", "part"), [(1, 0.9), (1, 0.75), (1, 0.65), (3, 0.9)])
def test_plans_of_deep_models_fit_are_right_and_as_fast(
    count: int, part: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, example = deep()
    cluster = devices(0.4, 0.2, 0.2, 0.2, flops=2e7)
    options = {"micro_batches": count}
    free = hetspmd.compile(model, example, cluster, **options)
    limited = with_memory(cluster, [part * n for n in free.cost.memory_bytes])
    searched: list[bool] = []
    search = Searcher.search

    def watched(self: Searcher, *args: object, folded: bool = False, **more: object) -> object:
        searched.append(folded)
        return search(self, *args, folded=folded, **more)

    monkeypatch.setattr(Searcher, "search", watched)
    plan = hetspmd.compile(model, example, limited, **options)
    assert any(searched)
    assert not all(searched)
    assert plan.search.lower_bound <= plan.search.cost
    assert all(n <= d.memory for n, d in zip(plan.cost.memory_bytes, plan.cluster.devices, strict=True))
    verify(model, example, limited, plan=plan, optimizers=("sgd",), tolerance=1e-9).require()
    monkeypatch.setattr(Searcher, "folds", False)
    apart = hetspmd.compile(model, example, limited, **options)
    assert plan.cost.step_seconds <= 1.03 * apart.cost.step_seconds
    # What no program can beat is below what either search has found.
    assert plan.search.lower_bound <= 1.000001 * apart.search.cost or plan.lengths != apart.lengths


@pytest.mark.parametrize(("error", "count"), [(SearchError, 1), (InfeasibleError, "auto")])
def test_where_nothing_is_found_among_alike_layers_all_programs_are_searched(
    error: type[Exception], count: int | Literal["auto"], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, example = deep()
    cluster = devices(0.4, 0.2, 0.2, 0.2, flops=2e7)
    free = hetspmd.compile(model, example, cluster)
    limited = with_memory(cluster, [0.75 * n for n in free.cost.memory_bytes])
    search = Searcher.search
    failed: list[bool] = []

    def failing(self: Searcher, *args: object, folded: bool = False, **more: object) -> object:
        if folded and (error is SearchError or "prices" not in more):
            failed.append(True)
            raise error("no alike layers")
        return search(self, *args, folded=folded, **more)

    monkeypatch.setattr(Searcher, "search", failing)
    plan = hetspmd.compile(model, example, limited, micro_batches=count)
    assert failed
    assert all(n <= d.memory for n, d in zip(plan.cost.memory_bytes, plan.cluster.devices, strict=True))
    monkeypatch.setattr(Searcher, "folds", False)
    apart = hetspmd.compile(model, example, limited, micro_batches=count)
    assert plan.cost.step_seconds <= 1.03 * apart.cost.step_seconds


def test_the_same_plan_each_time() -> None:
    model, example = deep()
    cluster = devices(0.4, 0.2, 0.2, 0.2, flops=2e7)
    free = hetspmd.compile(model, example, cluster)
    limited = with_memory(cluster, [0.75 * n for n in free.cost.memory_bytes])
    assert len({hetspmd.compile(model, example, limited).digest for _ in range(2)}) == 1


def test_micro_batches_of_any_number() -> None:
    """Quick syntheses search alike layers alone, and prove a bound of all programs all the same."""
    model, example = deep()
    cluster = devices(0.4, 0.2, 0.2, 0.2, flops=2e7)
    free = hetspmd.compile(model, example, cluster)
    limited = with_memory(cluster, [0.5 * n for n in free.cost.memory_bytes])
    plan = hetspmd.compile(model, example, limited, micro_batches="auto")
    assert 0.0 < plan.search.lower_bound <= plan.search.cost
    assert plan.search.stop_reason != "folded"
    whole = hetspmd.compile(
        model, example, dataclasses.replace(free.cluster), micro_batches=plan.micro_batches
    )
    assert whole.cost.step_seconds <= plan.cost.step_seconds
    verify(model, example, limited, plan=plan, optimizers=("sgd",), tolerance=1e-9).require()


@pytest.mark.parametrize("part", [None, 0.75])
@pytest.mark.parametrize("layers", [4, 7])
def test_where_searches_are_hard_few_layers_are_folded(
    layers: int, part: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rounds and subsets prove nothing then; the plan has a bound of all programs, and is as fast."""
    model, example = stack(layers)
    cluster = devices(0.4, 0.2, 0.2, 0.2, flops=2e7)
    if part is not None:
        free = hetspmd.compile(model, example, cluster)
        cluster = with_memory(cluster, [part * n for n in free.cost.memory_bytes])
    easy = hetspmd.compile(model, example, cluster)
    search, folds = Searcher.search, list[bool]()

    def watched(self: Searcher, *args: object, folded: bool = False, **more: object) -> object:
        folds.append(folded)
        return search(self, *args, folded=folded, **more)

    monkeypatch.setattr(Searcher, "search", watched)
    monkeypatch.setattr("hetspmd.search.search.HARD", 0)
    plan = hetspmd.compile(model, example, cluster)
    assert folds[0] is False
    assert any(folds)
    assert len(plan.active) > 1
    assert 0.0 < plan.search.lower_bound <= plan.search.cost
    assert plan.search.stop_reason != "folded"
    assert plan.cost.step_seconds <= 1.02 * easy.cost.step_seconds
    verify(model, example, cluster, plan=plan, optimizers=("sgd",), tolerance=1e-9).require()
    assert plan.digest == hetspmd.compile(model, example, cluster).digest


def test_what_is_proven_at_the_end_is_taken_where_it_is_better(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last search may find a program whose alike layers differ, and which is faster than the folded one."""
    model, example = stack(4)
    cluster = devices(0.4, 0.2, 0.2, 0.2, flops=2e7)
    easy = hetspmd.compile(model, example, cluster)
    search = Searcher.search
    poor = list[float]()

    def watched(
        self: Searcher,
        costs: CostModel,
        lengths: object,
        limits: Limits,
        *,
        folded: bool = False,
        **more: object,
    ) -> object:
        if not folded:
            return search(self, costs, lengths, limits, **more)
        # Whatever is folded is a program of tensor parallelism, which is far from the best here.
        within = self.space.within(known.tensor_parallel(self.space.theory))
        result = search(self, costs, lengths, limits, within=within)
        poor.append(result.cost)
        return result

    monkeypatch.setattr(Searcher, "search", watched)
    monkeypatch.setattr("hetspmd.search.search.HARD", 0)
    plan = hetspmd.compile(model, example, cluster)
    assert poor
    assert min(poor) > 1.01 * easy.search.cost
    assert plan.cost.step_seconds <= 1.02 * easy.cost.step_seconds
