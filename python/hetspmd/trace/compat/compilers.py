"""``torch.compile`` of a graph of ATen ops, which needs nothing of what reads Python's bytecode.

What ``torch.compile`` returns holds all that it is called with until it returns, and looks at each of it in every
call. A backend that is given the graph itself takes a list, and lets go of what is in it as it is read for the last
time. That halves what a compiled backward holds, since what the forward has saved is freed on the way.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, cast

import torch
from torch import fx
from torch.utils._python_dispatch import _disable_current_modes

Compiled = Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]
"""A compiled graph: it is given its inputs in a list, which is empty afterwards, and returns its outputs."""

TAKING: Final = frozenset({"inductor", "aot_eager"})
"""Backends that let go of what is in a list."""

OPTIONS: Final = frozenset({"backend", "mode", "options", "fullgraph"})
"""Arguments of ``torch.compile`` that say nothing of how Python's bytecode is read."""

MODES: Final = frozenset({None, "default", "max-autotune-no-cudagraphs"})
"""Modes that do not capture what they have compiled: captures hold what they read."""


POOLED_INDICES: Final = "prims::_low_memory_max_pool_offsets_to_indices"
"""The name of the second of :func:`pooling_by_offsets`."""


def compiled_taking(
    graph: fx.GraphModule, options: Mapping[str, Any], values: Sequence[object], *, free: bool = False
) -> Compiled | None:
    """``graph``, whose output is a tuple, compiled for tensors like ``values`` by ``torch.compile``'s ``options``.

    ``free``: its outputs may lie in memory in any order, as convolutions give them.
    None where that takes ``torch.compile`` itself: another backend, options that ask for more, or compiling that is
    switched off.
    """
    backend, mode = options.get("backend", "inductor"), options.get("mode")
    asked = options.get("options") or {}
    if backend not in TAKING or mode not in MODES or not OPTIONS.issuperset(options):
        return None
    if "triton.cudagraphs" in asked or importlib.import_module("torch._dynamo.config").disable:
        return None
    if not all(isinstance(value, torch.Tensor) for value in values):
        return None
    name = "_TorchCompileInductorWrapper" if backend == "inductor" else "_TorchCompileWrapper"
    wrapper = getattr(torch, name)
    if backend == "inductor":
        compiler = wrapper(mode, {**({"keep_output_stride": False} if free else {}), **asked}, False)
    else:
        compiler = wrapper(backend, mode, dict(asked), False)
    with importlib.import_module("torch._dynamo.convert_frame").compile_lock, _disable_current_modes():
        return cast("Compiled", compiler(_of_a_list(graph), [list(values)]))


def pooling_by_offsets() -> tuple[Any, Any] | None:
    """The ops by which inductor computes a pooling whose indices a byte each will do for: the maxima of ``(x,
    kernel_size, stride, padding, dilation, ceil_mode)`` with elements of windows, and from those, ``(offsets,
    kernel_size, input_size, stride, padding, dilation)``, the indices. None where this torch has none."""
    importlib.import_module("torch._inductor.inductor_prims")
    names = "_low_memory_max_pool_with_offsets", "_low_memory_max_pool_offsets_to_indices"
    pool, indices = (getattr(torch.ops.prims, name, None) for name in names)
    return None if pool is None or indices is None else (pool.default, indices.default)


def _of_a_list(graph: fx.GraphModule) -> fx.GraphModule:
    """The graph, given its inputs as a list, of which torch knows that it may be emptied."""
    copy, values = fx.Graph(), dict[fx.Node, fx.Node]()
    given = copy.placeholder("values")
    given.meta["steal_arg"] = True
    inputs = [node for node in graph.graph.nodes if node.op == "placeholder"]
    for place, node in enumerate(inputs):
        values[node] = copy.call_function(_item, (given, place))
        values[node].name = node.name
    copy.output(copy.graph_copy(graph.graph, values))
    return fx.GraphModule(graph, copy, type(graph).__name__)


def _item(values: list[torch.Tensor], place: int) -> torch.Tensor:
    return values[place]
