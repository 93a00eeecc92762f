"""``HAP(..., compile=True)``: what lies between two communications of a local graph goes through ``torch.compile``.

A stretch (:mod:`hetspmd.run.stretches`) is of ATen ops here, and ``torch.compile`` sees it whole; collectives,
random numbers and calls that are no ATen ops stay between.

Stretches compile when they first run. That may take longer than other ranks wait, so they are told
(:meth:`~hetspmd.dist.communicator.Communicator.busy`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import fx, nn

from hetspmd.dist.random import may_draw
from hetspmd.errors import ExampleError
from hetspmd.run.stretches import Taken, cut
from hetspmd.trace.compat.tensors import is_op

Busy = Callable[[], AbstractContextManager[None]]
Made = dict[tuple[object, ...], Any]
"""What was compiled, by what it computes, of which values."""


def compile_options(asked: bool | Mapping[str, Any]) -> dict[str, Any] | None:
    """The arguments of ``torch.compile``, None where nothing is compiled. Raises ExampleError for anything else
    than a bool or a mapping by names."""
    if isinstance(asked, bool):
        return {} if asked else None
    if isinstance(asked, Mapping) and all(isinstance(key, str) for key in asked):
        return dict(asked)
    raise ExampleError(f"compile is True, False or a dict of torch.compile's arguments, not {asked!r}")


def in_stretches(
    module: fx.GraphModule,
    options: Mapping[str, Any],
    busy: Busy,
    made: Made | None = None,
    *,
    begins: Taken = lambda _: False,
    reads: Taken = lambda _: False,
) -> fx.GraphModule:
    """A copy of a local graph that runs its stretches compiled; ``busy`` surrounds a stretch's first run.

    ``made`` holds what was compiled for stretches of other graphs; ``begins`` and ``reads`` are those of
    :func:`~hetspmd.run.stretches.cut`.
    """
    shared: Made = {} if made is None else made
    name = f"Compiled{type(module).__name__}"
    return cut(
        module,
        name,
        _compiles,
        lambda stretch: _Stretch(stretch, options, busy, shared),
        begins=begins,
        reads=reads,
    )


class _Stretch(nn.Module):
    """A stretch. One that computes the same as another, of tensors of the same shapes, is compiled with it."""

    def __init__(self, graph: fx.GraphModule, options: Mapping[str, Any], busy: Busy, made: Made) -> None:
        super().__init__()
        self._graph, self._options, self._busy, self._made = graph, options, busy, made
        self._call: Any = None

    def forward(self, *values: Any) -> Any:
        if self._call is not None:
            return self._call(*values)
        key = _text(self._graph.graph), *_kinds(values)
        call = self._made.get(key)
        if call is None:
            call = torch.compile(self._graph, **{"fullgraph": True, "dynamic": False, **self._options})
            with self._busy():
                outputs = call(*values)
            self._made[key] = call
        else:
            outputs = call(*values)
        self._call = call
        return outputs


def _text(graph: fx.Graph) -> str:
    """What a stretch computes, whatever its values are called."""
    places = {node: f"%{place}" for place, node in enumerate(graph.nodes)}
    lines = []
    for node in graph.nodes:
        args, kwargs = fx.map_arg((node.args, node.kwargs), places.__getitem__)
        lines.append("" if node.op == "placeholder" else f"{node.target} {args} {kwargs}")
    return "\n".join(lines)


def _kinds(values: Sequence[Any]) -> Iterator[object]:
    """Of each value what a compiler looks at, and which other value is the same."""
    first: dict[int, int] = {}
    for place, value in enumerate(values):
        yield first.setdefault(id(value), place)
        if isinstance(value, torch.Tensor):
            yield type(value), value.dtype, value.device, tuple(value.shape), value.stride()
        else:
            yield repr(value)


def _compiles(node: fx.Node) -> bool:
    """Whether a stretch takes a call: of an op that draws no random numbers, as attention without dropout is."""
    return is_op(node.target) and not may_draw(node.target, node.args, node.kwargs)
