"""Regions of torch.utils.checkpoint inside of others train as on one device, each computed again in its own run."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from evaluations import ask
from small_plans import cluster
from test_recompute_training import OPTIMIZERS
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import hetspmd
import zoo
from hetspmd.run.module import HAP
from hetspmd.trace.graph import Graph
from hetspmd.trace.trace import trace
from recomputing import Block, batch

pytestmark = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")
WORLDS = {1: (1,), 2: (3, 1), 3: (4, 2, 1), 4: (4, 2, 1, 1), 5: (5, 1, 3, 2, 1)}


class Nested(nn.Module):
    """A stack of layers under regions of groups of them; ``depth`` 3 has a region of groups of groups, too.

    ``kinds`` says of the regions of each depth, from the outermost, whether they are reentrant.
    """

    def __init__(
        self, depth: int = 2, kinds: tuple[bool, ...] = (False,) * 3, *, dropout: float = 0.0,
        statistics: bool = False, layers: int = 4,
    ) -> None:  # fmt: skip
        super().__init__()
        torch.manual_seed(0)
        self.first, self.head = nn.Linear(4, 6), nn.Linear(6, 5)
        self.h = nn.ModuleList(Block(6, dropout=dropout, statistics=statistics) for _ in range(layers))
        self.depth, self.kinds = depth, kinds
        self.double()

    def under(self, first: int, count: int, depth: int, h: torch.Tensor) -> torch.Tensor:
        """Layers from the first on, in regions of halves of them."""
        if count == 1 or not depth:
            for layer in self.h[first : first + count]:
                h = layer(h) if not depth else self.region(depth, layer, h)
            return h
        for half in (first, first + count // 2):
            h = self.region(depth, partial(self.under, half, count // 2, depth - 1), h)
        return h

    def region(
        self, depth: int, call: Callable[[torch.Tensor], torch.Tensor], h: torch.Tensor
    ) -> torch.Tensor:
        result: torch.Tensor = checkpoint(call, h, use_reentrant=self.kinds[self.depth - depth])
        return result

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        h = self.under(0, len(self.h), self.depth, torch.tanh(self.first(x)))
        return F.cross_entropy(self.head(h), labels)


def trained(kind: str) -> Any:
    """What two steps leave: losses, gradients and the state."""

    def body(run: Any) -> list[torch.Tensor]:
        optimizer = OPTIMIZERS[kind](run.parameters(), lr=1e-2)
        results: list[torch.Tensor] = []
        for step in range(2):
            optimizer.zero_grad()
            loss = run(**batch(6, step))
            loss.backward()
            whole = (
                run.full_gradients()
                if isinstance(run, HAP)
                else {n: p.grad for n, p in run.named_parameters()}
            )
            results += [loss.detach(), *(whole[name].clone() for name in sorted(whole))]
            optimizer.step()
        full = run.full_state_dict() if isinstance(run, HAP) else run.state_dict()
        return results + [full[name].clone() for name in sorted(full)]

    return body


def copies_of(graph: Graph) -> list[int]:
    """How often an instruction of the forward is computed again, for each that the blocks contain."""
    producers: dict[int, set[int]] = {}
    for block in graph.recomputed:
        for tensor, copy in block.tensors:
            producers.setdefault(graph.producers[tensor], set()).add(graph.producers[copy])
    return [len(made) for made in producers.values()]


KINDS = {"not reentrant": (False,) * 3, "reentrant": (True,) * 3, "mixed": (False, True, False)}


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_two_levels_on_unlike_devices(world: int, kind: str) -> None:
    asked = ask(Nested(), trained(kind), cluster=cluster(*WORLDS[world]), example=batch())
    assert asked.error() < 1e-9
    assert max(copies_of(asked.plans[0].graph)) == 2


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "options", [{}, {"micro_batches": 2}, {"micro_batches": 3}, {"recompute": "none"}, {"recompute": "all"}]
)
def test_three_levels(kind: str, options: dict[str, Any]) -> None:
    asked = ask(
        Nested(3, KINDS[kind], layers=8),
        trained("adamw"),
        cluster=cluster(4, 2, 1),
        example=batch(),
        **options,
    )
    assert asked.error() < 1e-9
    wanted = 0 if options.get("recompute") == "none" else 3
    assert max(copies_of(asked.plans[0].graph), default=0) == wanted


@pytest.mark.slow
def test_compiled() -> None:
    """What is computed in several runs is computed as often where it is compiled together."""
    options = {"cluster": cluster(3, 1), "example": batch()}
    asked = ask(Nested(), trained("sgd"), compile={"backend": "aot_eager"}, **options)
    assert asked.error() < 1e-9


def test_micro_batches() -> None:
    asked = ask(Nested(), trained("sgd"), cluster=cluster(4, 2, 1), example=batch(), micro_batches=2)
    assert asked.error() < 1e-9
    assert asked.plans[0].micro_batches == 2


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("depth", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_running_statistics_are_updated_as_often_as_on_one_device(depth: int, reentrant: bool) -> None:
    model = Nested(depth, (reentrant,) * 3, statistics=True, layers=2**depth)
    asked = ask(model, trained("sgd"), cluster=cluster(4, 2, 1), example=batch())
    assert asked.error() < 1e-9


@pytest.mark.parametrize(
    "options",
    [{}, *(pytest.param(o, marks=pytest.mark.slow) for o in ({"micro_batches": 3}, {"recompute": "all"}))],
)
def test_dropout_is_that_of_one_device(options: dict[str, Any]) -> None:
    report = hetspmd.verify(Nested(dropout=0.4), batch(), cluster(4, 2, 1), **options)
    report.require()
    assert report.random


def test_a_region_that_two_others_read() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(1)
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

        def at(self, index: int, h: torch.Tensor) -> torch.Tensor:
            return torch.sin(self.layers[index](torch.cos(h)))

        def both(self, h: torch.Tensor) -> torch.Tensor:
            shared = checkpoint(self.at, 0, h, use_reentrant=False)
            one = checkpoint(self.at, 1, shared, use_reentrant=False)
            other = checkpoint(self.at, 2, shared.tanh(), use_reentrant=True)
            return one * other + shared.t().t()

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            h = checkpoint(self.both, F.pad(x, (0, 4)).requires_grad_(), use_reentrant=False)
            return F.cross_entropy(self.layers[3](h), labels)

    asked = ask(Shared().double(), trained("sgd"), cluster=cluster(3, 2, 1), example=batch())
    assert asked.error() < 1e-9
    assert [b.block for b in asked.plans[0].graph.recomputed] == [f"checkpoint {n}" for n in range(4)]


def test_under_autocast() -> None:
    model = Nested().float()
    example = {name: t.float() if t.is_floating_point() else t for name, t in batch().items()}
    with torch.autocast("cpu", torch.bfloat16):
        graph = trace(model, (), example)
        hetspmd.verify(model, example, cluster(4, 2, 1), tolerance=0.05).require()
    assert max(copies_of(graph)) == 2
    assert any(t.dtype == "bfloat16" for t in graph.tensors)


@pytest.mark.slow
def test_regions_of_hugging_face_in_one_of_the_users() -> None:
    network, example, _ = zoo.gpt2(dropout=0.0)
    network.double().train()
    network.config.use_cache = False
    network.activation_checkpointing_enable()

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.network = network

        def forward(self, **batch: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = checkpoint(lambda: self.network(**batch).loss, use_reentrant=False)
            return result

    graph = trace(Outer(), (), example)
    assert [b.block for b in graph.recomputed] == ["checkpoint 0", "checkpoint 1", "checkpoint 2"]
    assert max(copies_of(graph)) == 2
    hetspmd.verify(Outer(), example, cluster(4, 2, 1)).require()
