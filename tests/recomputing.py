"""What tests of recomputation share: a stack of blocks that draw, decide and count, and step results on one
device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from hetspmd.rules.theory import Theory, derive
from hetspmd.trace.blocks import chooser
from hetspmd.trace.graph import Graph
from hetspmd.trace.trace import split_example, trace
from hetspmd.verify.reference import ReferenceResult
from workbench import single_device

WIDE = torch.float64


class Block(nn.Module):
    """A residual block with dropout, noise, a choice of the largest channels, and running statistics if asked
    for."""

    def __init__(self, width: int, *, dropout: float, statistics: bool) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(width) if statistics else nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.dropout = dropout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = F.gelu(self.up(self.norm(x)))
        h = F.dropout(h, self.dropout, self.training)
        if self.dropout:
            h = h * (1 + 0.1 * torch.rand_like(h))
        chosen = h.topk(3, -1)
        h = torch.zeros_like(h).scatter(-1, chosen.indices, chosen.values.tanh()) + h.relu()
        return x + self.down(h)


class Blocks(nn.Module):
    """A stack of them under a head, with a loss; ``h`` is the list."""

    def __init__(
        self, count: int = 3, width: int = 6, dropout: float = 0.0, statistics: bool = False
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(4, width)
        self.h = nn.ModuleList(Block(width, dropout=dropout, statistics=statistics) for _ in range(count))
        self.head = nn.Linear(width, 5)
        self.double()

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.first(x))
        for block in self.h:
            h = block(h)
        return F.cross_entropy(self.head(h), labels)


def batch(rows: int = 6, seed: int = 0) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return {
        "x": torch.randn(rows, 4, dtype=WIDE, generator=draw),
        "labels": torch.randint(0, 5, (rows,), generator=draw),
    }


def forward_first(graph: Graph) -> Graph:
    """The graph with all of its forward before its backward: random numbers follow from an instruction's number,
    and
    what of the backward stands among the forward may be put off."""
    instructions = sorted(graph.instructions, key=lambda i: i.phase != "forward")
    return replace(graph, instructions=tuple(replace(i, id=n) for n, i in enumerate(instructions)))


def theory_of(model: nn.Module, example: Any, recompute: str | tuple[str, ...], loss: Any = None) -> Theory:
    """The theory of a training step that computes these blocks again."""
    args, kwargs = split_example(example)
    graph = trace(model, args, kwargs, loss=loss, recompute=chooser(recompute))
    return derive(forward_first(graph), quiet=True)


def inputs_of(graph: Graph, example: Any) -> list[torch.Tensor]:
    leaves = pytree.tree_leaves(split_example(example))
    return [leaves[i.leaf] for i in graph.inputs]


def on_one_device(theory: Theory, model: nn.Module, example: Any) -> ReferenceResult:
    """The graph's step on one device, random numbers by the numbers of its instructions."""
    return single_device(theory, model, inputs_of(theory.graph, example))


def largest_difference(one: ReferenceResult, other: ReferenceResult) -> float:
    """Of loss, gradients and updated buffers, relative to the largest of each tensor."""
    assert one.loss is not None
    assert other.loss is not None
    assert one.gradients.keys() == other.gradients.keys()
    assert one.buffers.keys() == other.buffers.keys()
    pairs = [(one.loss, other.loss)]
    for mine, theirs in ((one.gradients, other.gradients), (one.buffers, other.buffers)):
        pairs += [(mine[name], theirs[name]) for name in mine]
    return max(float((a - b).abs().max()) / max(float(b.abs().max()), 1e-30) for a, b in pairs)


def saved(graph: Graph) -> Sequence[int]:
    """The tensors of the forward, none of them a source, that the backward reads."""
    read = {t for i in graph.instructions if i.phase == "backward" for t in i.inputs}
    producers = {t: graph.producer(t) for t in read}
    return sorted(t for t, p in producers.items() if p.phase == "forward" and not p.is_source)
