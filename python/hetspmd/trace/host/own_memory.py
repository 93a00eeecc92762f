"""The memory in which a model's parameters and buffers lie before they are replaced for a trace."""

from __future__ import annotations

import torch
from torch import nn

from hetspmd.trace.compat.tensors import is_traced


def memories(model: nn.Module) -> dict[int, str]:
    """The names of a model's parameters and buffers by the memory in which they lie."""
    named = (*model.named_parameters(), *model.named_buffers())
    return {at: name for name, tensor in named if (at := memory(tensor))}


def memory(tensor: torch.Tensor) -> int:
    """Where the elements of a tensor lie, 0 for one that has none."""
    if is_traced(tensor) or tensor.is_meta or tensor.layout != torch.strided:
        return 0
    return tensor.untyped_storage().data_ptr()
