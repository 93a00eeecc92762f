"""Modules for tests from plain functions, their graphs, and looks at them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from hetspmd.trace.graph import Graph
from hetspmd.trace.trace import trace


class Net(nn.Module):
    """A module whose forward is a function of the module and its inputs."""

    def __init__(self, forward: Callable[..., Any], **members: Any) -> None:
        super().__init__()
        self.function = forward
        for name, member in members.items():
            setattr(self, name, member)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self, *args, **kwargs)


def parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape))


def traced(forward: Callable[..., Any], *args: Any, training: bool = True, **members: Any) -> Graph:
    return trace(Net(forward, **members), args, {}, training=training)


def ops(graph: Graph, phase: str | None = None) -> list[str]:
    """Names of the ops that compute, without namespace and overload."""
    return [i.op.split(".")[1] for i in graph.instructions if not i.is_source and phase in (None, i.phase)]


def names(graph: Graph, op: str) -> list[str]:
    return [i.name for i in graph.instructions if i.op == op]


def by_name(graph: Graph) -> dict[str, Any]:
    return {p.name: p for p in graph.parameters}
