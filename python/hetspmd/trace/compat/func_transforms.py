"""Transforms of torch (torch.func, torch.jit, torch.export), in which shards must not be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
import torch._functorch.eager_transforms as eager_transforms
from torch.autograd import forward_ad

_LOOKED_AT = "hetspmd_looked_at"
"""The attribute of a function of torch whose arguments are looked at first."""


_TRANSFORM: Final = "a transform of torch.func"
_FUNCTIONS: Final[tuple[tuple[Any, str, str], ...]] = (
    (eager_transforms, "_wrap_tensor_for_grad", _TRANSFORM),
    (eager_transforms, "_maybe_wrap_functional_tensor", _TRANSFORM),
    (torch._C.ScriptFunction, "__call__", "a function of torch.jit.script"),
    (torch._C.ScriptMethod, "__call__", "a module of torch.jit.script"),
    (torch.nested, "nested_tensor", "torch.nested.nested_tensor"),
    (torch.nested, "as_nested_tensor", "torch.nested.as_nested_tensor"),
)
"""Functions of torch that ask no tensor's class: where they are, their names there, and what they are called."""


def before_transforms(look: Callable[[object, str], None]) -> None:
    """Call ``look`` with each value that a transform of torch.func (``grad``, ``vjp``, ``jacrev``, ...) wraps, or
    that a scripted function or a nested tensor is given, and with what takes it."""
    for owner, name, what in _FUNCTIONS:
        function = getattr(owner, name)
        if not hasattr(function, _LOOKED_AT):
            setattr(owner, name, _looking(function, what, look))


def _looking(
    function: Callable[..., Any], what: str, look: Callable[[object, str], None]
) -> Callable[..., Any]:
    def looked_at(*args: Any, **kwargs: Any) -> Any:
        for value in (*args, *kwargs.values()):
            for one in value if isinstance(value, (list, tuple)) else (value,):
                look(one, what)
        return function(*args, **kwargs)

    setattr(looked_at, _LOOKED_AT, True)
    return looked_at


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
