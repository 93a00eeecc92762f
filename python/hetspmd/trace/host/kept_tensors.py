"""The tensors that a run of a model's Python has put into the caches of functions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from hetspmd.trace.compat.tensors import is_traced, memory_of
from hetspmd.trace.host.plain import tensors_behind, tensors_in


def kept_tensors(
    model: nn.Module, cache_entries: Iterator[tuple[Any, Any, Any]]
) -> dict[str, list[torch.Tensor]]:
    """Of functions, keys and results that a run has put into caches the tensors, by the function and its line.

    Left out are parameters, buffers and views of them, and what a call with a tensor gave, which no later call has.
    """
    own = {memory_of(tensor) for tensor in (*model.parameters(), *model.buffers())}
    by_function: dict[str, list[torch.Tensor]] = {}
    for function, key, result in cache_entries:
        behind = (
            filter(is_traced, tensors_behind(result, model.modules()))
            if not tensors_in(result)
            else tensors_in(result)
        )
        tensors = [tensor for tensor in behind if memory_of(tensor) not in own]
        if tensors and not tensors_in(
            key if isinstance(key, tuple) else [*key] if isinstance(key, list) else [key]
        ):
            by_function.setdefault(_name(function), []).extend(tensors)
    return by_function


def _name(function: Any) -> str:
    code = getattr(getattr(function, "__wrapped__", None), "__code__", None)
    at = f" at {code.co_filename}:{code.co_firstlineno}" if code is not None else ""
    return f"{getattr(function, '__qualname__', 'a cached function')}{at}"
