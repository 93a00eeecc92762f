"""Where a NaN comes from: the first instruction that makes one of inputs without any.

Looked for under ``torch.autograd.detect_anomaly()`` (or ``set_detect_anomaly(True)``), as torch does for its own
backward: then a copy of each local graph runs that looks at every instruction's results, forward and backward. On a
GPU every look waits for it. A NaN that a collective brings was made on another rank, which says so itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from hetspmd.errors import NanError
from hetspmd.lower.fuse import out_of_place
from hetspmd.lower.instrument import instrumented
from hetspmd.run.source_location import SourceFinder
from hetspmd.trace.compat.trees import flatten

_UNSET = ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided")
"""Ops whose results have no values yet."""


def is_looked_for() -> bool:
    """Whether torch is asked to find NaN."""
    return torch.is_anomaly_enabled() and torch.is_anomaly_check_nan_enabled()


class _Look:
    """What the copy of a graph calls behind its instructions."""

    def __init__(self, origin: SourceFinder, rank: int | None) -> None:
        self._origin, self._rank = origin, rank
        self._nodes: list[fx.Node] = []

    def behind(self, graph_copy: fx.Graph, watcher: fx.Node, node: fx.Node, copied: Any) -> None:
        copied(node).target = out_of_place(node.target)  # else the operand could not be looked at afterwards
        instruction = node.meta.get("instruction")
        if instruction is None:
            return
        name = self._origin.graph.instructions[instruction].op
        if any(part in _UNSET for part in name.split(".")):
            return
        inputs = [copied(n) for n in node.all_input_nodes if n.op != "placeholder" or n.name != "runtime"]
        graph_copy.call_method("look", (watcher, len(self._nodes), copied(node), inputs))
        self._nodes.append(node)

    def look(self, index: int, result: Any, inputs: list[Any]) -> None:
        """Raise NanError if there is a NaN in the result and none in the inputs. What is made of no elements (an
        empty shard) is not looked at: nothing of it is used."""
        wrong = [(t, count) for t in _numbers(result) if (count := int(torch.isnan(t).sum()))]
        if not wrong:
            return
        tensors = list(_numbers(inputs))
        if any(t.numel() == 0 or bool(torch.isnan(t).any()) for t in tensors):
            return
        (tensor, count), *_ = wrong
        place = self._origin.of_node(self._nodes[index])
        raise NanError(
            f"{place} makes NaN of inputs without any, on rank {self._rank}: {count} of {tensor.numel()} elements. "
            f"Its inputs here are {', '.join(map(_range, tensors)) or 'no numbers'}"
        )


def _numbers(values: Any) -> Iterator[torch.Tensor]:
    for value in flatten(values)[0]:
        if isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex()):
            yield value


def _range(tensor: torch.Tensor) -> str:
    kind = f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
    if tensor.is_complex():
        return kind
    return f"{kind} from {float(tensor.min()):.4g} to {float(tensor.max()):.4g}"


def watched(module: fx.GraphModule, origin: SourceFinder, rank: int | None) -> fx.GraphModule:
    """The copy of a local graph that raises NanError; ``rank`` is named in it."""
    look = _Look(origin, rank)
    return instrumented(module, look, f"Watched{type(module).__name__}", look.behind)
