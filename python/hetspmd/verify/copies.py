"""Copies of a model in another dtype, whatever it holds.

``copy.deepcopy`` refuses tensors that have a place in an autograd graph. Hook-based ``weight_norm``,
``spectral_norm`` and ``prune`` leave such tensors on their modules, and so does a model that keeps what it last
computed. They are values of an earlier call: a copy has the values alone.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Iterator
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any

import torch
from torch import nn

from hetspmd.errors import ExampleError
from hetspmd.verify.precision import tensor_in

_WHOLE = (
    type, ModuleType, FunctionType, BuiltinFunctionType, CodeType, str, bytes, int, float, complex, type(None),
    torch.dtype, torch.device, torch.Size,
)  # fmt: skip
"""What a deep copy has in common with its original."""


def model_in(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """A copy of the model on the CPU, all of whose floating-point and complex tensors are in ``dtype``.

    Raises ExampleError, with the place, if something that it holds cannot be copied.
    """
    leaves = {id(t) for t in (*model.parameters(), *model.buffers()) if t.is_leaf}
    memo: dict[int, Any] = {}
    held = [t for t in _tensors(model) if id(t) not in leaves]
    for tensor in held:
        if not tensor.is_leaf or type(tensor) is torch.Tensor:
            value = tensor_in(tensor.detach(), dtype).clone()
            memo[id(tensor)] = value.requires_grad_(tensor.is_leaf and tensor.requires_grad)
    try:
        duplicate = copy.deepcopy(model, memo)
    except Exception as error:
        raise ExampleError(f"the model cannot be copied to be verified{_where(model)}: {error}") from error
    del held
    for parameter in duplicate.parameters():
        parameter.data = tensor_in(parameter.data, dtype)
        parameter.grad = None
    changed = {id(buffer): (buffer, tensor_in(buffer, dtype)) for buffer in duplicate.buffers()}
    for module in duplicate.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = changed[id(buffer)][1]
    return duplicate


def _tensors(root: object) -> Iterator[torch.Tensor]:
    """All tensors that a deep copy would reach."""
    seen: set[int] = set()
    stack: list[Any] = [root]
    while stack:
        item = stack.pop()
        if id(item) in seen or isinstance(item, _WHOLE):
            continue
        seen.add(id(item))
        if isinstance(item, torch.Tensor):
            yield item
        else:
            stack.extend(gc.get_referents(item))


def _where(model: nn.Module) -> str:
    """The first attribute of a module that cannot be copied, as far as it can be told."""
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if name in ("_parameters", "_buffers", "_modules"):
                continue
            try:
                copy.deepcopy(value)
            except Exception:
                return f" ({'.'.join(filter(None, (path, name)))} is a {type(value).__name__})"
    return ""
