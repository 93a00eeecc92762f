"""``HAP(..., compile=True)``: what lies between two communications of a local graph goes through ``torch.compile``.

A stretch (:mod:`hetspmd.run.stretches`) is of ATen ops here, and ``torch.compile`` sees it whole; collectives,
random numbers and calls that are no ATen ops stay between.

Stretches compile when they first run. That may take longer than other ranks wait, so they are told
(:meth:`~hetspmd.dist.communicator.Communicator.busy`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import fx, nn

from hetspmd.errors import ExampleError
from hetspmd.run.stretches import cut
from hetspmd.trace.compat.tensors import is_op

Busy = Callable[[], AbstractContextManager[None]]


def compile_options(asked: bool | Mapping[str, Any]) -> dict[str, Any] | None:
    """The arguments of ``torch.compile``, None where nothing is compiled. Raises ExampleError for anything else
    than a bool or a mapping by names."""
    if isinstance(asked, bool):
        return {} if asked else None
    if isinstance(asked, Mapping) and all(isinstance(key, str) for key in asked):
        return dict(asked)
    raise ExampleError(f"compile is True, False or a dict of torch.compile's arguments, not {asked!r}")


def in_stretches(module: fx.GraphModule, options: Mapping[str, Any], busy: Busy) -> fx.GraphModule:
    """A copy of a local graph that runs its stretches compiled; ``busy`` surrounds a stretch's first run."""
    name = f"Compiled{type(module).__name__}"
    return cut(module, name, _compiles, lambda stretch: _Stretch(stretch, options, busy))


class _Stretch(nn.Module):
    def __init__(self, graph: fx.GraphModule, options: Mapping[str, Any], busy: Busy) -> None:
        super().__init__()
        self._call: Any = torch.compile(graph, **{"fullgraph": True, "dynamic": False, **options})
        self._busy: Busy | None = busy

    def forward(self, *values: Any) -> Any:
        if self._busy is None:
            return self._call(*values)
        with self._busy():
            outputs = self._call(*values)
        self._busy = None
        return outputs


def _compiles(node: fx.Node) -> bool:
    return is_op(node.target) and torch.Tag.nondeterministic_seeded not in node.target.tags
