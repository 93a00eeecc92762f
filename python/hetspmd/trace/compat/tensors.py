"""Tensors, ops and modules: what torch keeps of them, of which kind they are, and the modes they are in."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeGuard, cast

import torch
from torch import _tensor_str, nn
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

__all__ = [
    "FakeTensorMode",
    "OpOverload",
    "TorchDispatchMode",
    "as_plain",
    "attention_choice",
    "fake_mode",
    "graph_is_kept",
    "has_kernel",
    "is_class_of_trace",
    "is_compiled_module",
    "is_op",
    "is_sharded_wrapper",
    "is_traced",
    "memory_of",
    "outside_modes",
    "print_options",
    "replace_node_registration",
    "same_content",
]


def is_traced(tensor: torch.Tensor) -> bool:
    """Whether a tensor is one of the trace, so that what is done to it becomes part of the graph."""
    return isinstance(unwrapped(tensor), (FakeTensor, FunctionalTensor))


def unwrapped(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor within the wrappers of torch.func's transforms; itself outside of them."""
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


def print_options() -> str:
    """What ``torch.set_printoptions`` has set, as text."""
    return str(sorted(vars(_tensor_str.PRINT_OPTS).items()))


def is_class_of_trace(kind: type) -> bool:
    """Whether tensors of this class are there only while a model is traced."""
    return issubclass(kind, (FakeTensor, FunctionalTensor))


def memory_of(tensor: torch.Tensor) -> int:
    """What identifies the memory of a tensor: views have that of their base."""
    inner = unwrapped(tensor)
    inner = inner.elem if isinstance(inner, FunctionalTensor) else inner
    return int(inner.untyped_storage()._cdata)


def is_compiled_module(module: nn.Module) -> bool:
    """Whether ``torch.compile`` made the module."""
    eval_frame = sys.modules.get("torch._dynamo.eval_frame")  # imported when torch.compile is first called
    return eval_frame is not None and isinstance(module, eval_frame.OptimizedModule)


def is_sharded_wrapper(module: nn.Module) -> bool:
    """Whether FSDP holds the module: torch's first kind wraps it, the second (fully_shard) changes its class."""
    return any(kind.__module__.startswith("torch.distributed.fsdp") for kind in type(module).__mro__)


def fake_mode() -> FakeTensorMode:
    """A mode in which tensors have shapes and no data; real tensors met inside become constants."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def outside_modes() -> AbstractContextManager[object]:
    """A context in which real tensors are computed with, also while a step is traced."""
    return cast(AbstractContextManager[object], _disable_current_modes())


def has_kernel(op: Any, kind: str) -> bool:
    """Whether an op overload can run on devices of this kind (``cuda``), by a kernel of its own or in parts."""
    name = op._schema.name + (f".{op._schema.overload_name}" if op._schema.overload_name else "")
    return bool(torch._C._dispatch_has_computed_kernel_for_dispatch_key(name, kind.upper()))


def attention_choice(query: torch.Tensor, *args: Any, **options: Any) -> int:
    """The number of the kernel that ``scaled_dot_product_attention`` takes for these tensors on their device. The
    op itself tells a trace that it takes none."""
    op, key = torch.ops.aten._fused_sdp_choice.default, query.device.type.upper()
    return int(op._op_dk(getattr(torch._C.DispatchKey, key), query, *args, **options))


def replace_node_registration(replacement: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace the method of Python by which the nodes of autograd's graph, which are of C, register a hook."""
    mixin: Any = torch.autograd.function._HookMixin
    mixin._register_hook = staticmethod(replacement(mixin._register_hook))


def same_content(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors are one, or views of the same elements in the same order."""

    def view(tensor: torch.Tensor) -> tuple[object, ...]:
        of = tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype
        return *of, tensor.is_conj(), tensor.is_neg(), memory_of(tensor)

    return one is other or view(one) == view(other)


def graph_is_kept() -> bool:
    """Whether the running backward was called with ``retain_graph=True`` (assumed where torch cannot tell)."""
    probe = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
    return True if probe is None else bool(probe())


def is_op(target: object) -> TypeGuard[OpOverload]:
    """Whether a node's target is a plain op overload (not a higher-order op or a Python function)."""
    return isinstance(target, OpOverload)


def as_plain() -> AbstractContextManager[None]:
    """A context in which tensors of a class of their own are plain tensors for torch's functions."""
    context: AbstractContextManager[None] = torch._C.DisableTorchFunctionSubclass()
    return context
