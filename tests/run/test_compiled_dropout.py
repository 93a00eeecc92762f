"""HAP(..., compile=...) of models that draw: the same numbers, and as few stretches as without."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from small_plans import cluster
from torch import nn
from torch.nn import functional as F

from hetspmd.dist.communicator import Communicator
from hetspmd.dist.random import Randomness
from hetspmd.dist.simulated_world import run_ranks
from hetspmd.lower import calls
from hetspmd.optimize.compiler import plan_for
from hetspmd.optimize.in_micro_batches import in_micro_batches
from hetspmd.rules.theory import derive
from hetspmd.run import compiled_regions
from hetspmd.run.module import HAP
from hetspmd.run.turn_graphs import calls_of_turns
from hetspmd.search import constraints as known
from hetspmd.trace.trace import trace

AOT = {"backend": "aot_eager"}
SPEEDS = {1: (1,), 2: (3, 1), 3: (4, 2, 1)}


@pytest.fixture(autouse=True)
def forgotten() -> Any:
    yield
    torch.compiler.reset()


class Layer(nn.Module):
    """Attention with dropout, and everything whose noise depends on no values, if asked for."""

    def __init__(self, p: float, *, every: bool) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=p, batch_first=True)
        self.p, self.every = p, every

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layer(x)
        if self.every:
            x = x * torch.bernoulli(torch.full_like(x, 0.7)) + x.new_empty(x.shape).bernoulli_(0.4)
            x = x + 0.1 * torch.rand_like(x) + torch.randn_like(x) * torch.rand(x.shape[1:], dtype=x.dtype)
            x = F.dropout1d(x + torch.empty_like(x).uniform_(-1.0, 2.0), self.p)
            x = x + torch.empty_like(x).normal_(0.5, 2.0)
        return x


class Model(nn.Module):
    def __init__(self, p: float = 0.3, *, every: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*(Layer(p, every=every) for _ in range(2)))
        self.head, self.p = nn.Linear(8, 3), p
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(self.head(self.layers(x)), self.p / 3, self.training).square().mean()


def batch(rows: int = 7) -> torch.Tensor:
    return torch.randn(rows, 5, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(rows))


def trained(hap: HAP) -> list[Any]:
    """Losses and gradients of three steps, an evaluation between them, and what is left."""
    hap.use_randomness(Randomness(1, hap.rank, torch.device("cpu")))
    hap.run_lowered()
    optimizer = torch.optim.SGD(hap.parameters(), lr=0.1)
    found: list[Any] = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = hap(batch())
        loss.backward()
        found += [loss.item(), hap.full_gradients()]
        optimizer.step()
    with torch.no_grad():
        found.append(hap.eval()(batch()).item())
    return [*found, hap.full_tensors()]


def on_ranks(model: nn.Module, world: int, body: Any, **options: Any) -> list[Any]:
    devices = cluster(*SPEEDS[world])
    options = options if "plan" in options else {"example": batch(), **options}
    models = [copy.deepcopy(model) for _ in range(world)]

    def rank(communicator: Communicator) -> Any:
        return body(HAP(models[communicator.rank], devices, process_group=communicator, **options))

    return run_ranks(world, rank)


CASES = [(1, True), *(pytest.param(*c, marks=pytest.mark.slow) for c in ((2, True), (2, False), (3, True)))]


@pytest.mark.parametrize(("world", "every"), CASES)
def test_the_numbers_are_those_that_are_drawn_without(world: int, every: bool) -> None:
    compiled = on_ranks(Model(every=every), world, trained, compile=AOT)
    plain = on_ranks(Model(every=every), world, trained)
    torch.testing.assert_close(compiled, plain, rtol=1e-10, atol=1e-12)
    losses = compiled[0][0:6:2]
    assert len(set(losses)) == 3


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2])
def test_the_default_compiler(world: int) -> None:
    model = Model()
    model.layers = model.layers[:1]
    compiled = on_ranks(model, world, trained, compile=True)
    plain = on_ranks(model, world, trained)
    torch.testing.assert_close(compiled, plain, rtol=1e-9, atol=1e-11)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"micro_batches": 2}, {"micro_batches": 3, "recompute": "all"}])
def test_in_micro_batches(options: dict[str, Any]) -> None:
    compiled = on_ranks(Model(), 2, trained, compile=AOT, **options)
    plain = on_ranks(Model(), 2, trained, **options)
    torch.testing.assert_close(compiled, plain, rtol=1e-10, atol=1e-12)


def stretches(hap: HAP) -> list[int]:
    """How many stretches the graphs of a training step have."""
    (entry,) = hap._plans.entries
    counts = []
    for graph, made in entry.runner._compiled.items():
        turns = [getattr(made, str(node.target)) for node in calls_of_turns(graph)] or [made]
        for turn in turns:
            nodes = list(turn.graph.nodes)
            counts.append(sum(n.op == "call_module" for n in nodes))
            assert not any(n.target is calls.draw for n in nodes)
    return counts


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("world", SPEEDS)
def test_as_many_stretches_as_without_dropout(world: int, count: int) -> None:
    """In data parallelism, which has the same collectives with it and without."""
    found = []
    for model in (Model(), Model(0.0)):
        theory, batches = in_micro_batches(derive(trace(model, (batch(),), {})), count)
        shares = tuple(s / sum(SPEEDS[world]) for s in SPEEDS[world])
        plan = plan_for(theory, cluster(*SPEEDS[world]), known.data_parallel(theory), shares, batches=batches)
        found.append(on_ranks(model, world, stretches, plan=plan, check_plan=False, compile=AOT))
    dropped, plain = found
    assert dropped == plain
    assert world > 1 or dropped == [[1] * 2]


def test_nothing_is_compiled_anew_in_later_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[object] = []
    compiling = compiled_regions.compiled_taking

    def counted(graph: Any, *args: Any, **kwargs: Any) -> Any:
        made.append(graph)
        return compiling(graph, *args, **kwargs)

    monkeypatch.setattr(compiled_regions, "compiled_taking", counted)

    def body(hap: HAP) -> list[int]:
        counts = []
        hap.run_lowered()
        for _ in range(3):
            hap(batch()).backward()
            counts.append(len(made))
        return counts

    ((first, *later),) = on_ranks(Model(every=True), 1, body, compile=AOT)
    assert first == 2, "a forward and a backward"
    assert later == [2, 2]
