"""Transforms of torch (torch.func, torch.jit, torch.export), in which shards must not be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch._functorch.eager_transforms as eager_transforms
from torch.autograd import forward_ad

_LOOKED_AT = "hetspmd_looked_at"
"""The attribute of a function of torch whose arguments are looked at first."""


def before_transforms(look: Callable[[object], None]) -> None:
    """Call ``look`` with each value that a transform of torch.func (``grad``, ``vjp``, ``jacrev``, ...) wraps."""
    for name in ("_wrap_tensor_for_grad", "_maybe_wrap_functional_tensor"):
        wrap = getattr(eager_transforms, name)
        if not hasattr(wrap, _LOOKED_AT):

            def looked_at(value: Any, *args: Any, _wrap: Any = wrap, **kwargs: Any) -> Any:
                look(value)
                return _wrap(value, *args, **kwargs)

            setattr(looked_at, _LOOKED_AT, True)
            setattr(eager_transforms, name, looked_at)


def is_batched(tensor: torch.Tensor) -> bool:
    """Whether ``torch.func.vmap`` has hidden a dim of the tensor."""
    return bool(torch._C._functorch.is_batchedtensor(tensor))


def transform_around() -> str:
    """Which transform of torch the running code is under; "" if under none."""
    if torch.compiler.is_exporting():
        return "torch.export"
    if torch.compiler.is_dynamo_compiling():  # which reads this code, and then calls it
        return ""
    if torch._C._get_tracing_state() is not None:
        return "torch.jit.trace"
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return "a transform of torch.func (vmap, grad, jvp)"
    if forward_ad._current_level >= 0:
        return "forward-mode differentiation (torch.autograd.forward_ad)"
    return ""
