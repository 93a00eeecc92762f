"""Between torch objects and the torch-free arguments of a :class:`~hetspmd.trace.graph.Graph`."""

from __future__ import annotations

from typing import Any, cast

import torch

from hetspmd.errors import TraceError
from hetspmd.trace import dropout_attention as _dropout_attention  # noqa: F401  # registers its ops
from hetspmd.trace.graph import DEVICE, REBALANCE, Argument, DType, Instruction, Marker, Ref

_LAYOUTS = {"strided": torch.strided, "sparse_coo": torch.sparse_coo}
_MEMORY_FORMATS = {
    str(f).removeprefix("torch."): f
    for f in (torch.contiguous_format, torch.channels_last, torch.channels_last_3d, torch.preserve_format)
}


def dtype_name(dtype: torch.dtype) -> str:
    """``float32`` for ``torch.float32``."""
    return str(dtype).removeprefix("torch.")


def torch_dtype(name: str) -> torch.dtype:
    """Inverse of :func:`dtype_name`."""
    return cast(torch.dtype, getattr(torch, name))


def from_torch(value: Any) -> Argument:
    """A torch-free form of an op argument without tensors. Raises TraceError for an unknown type."""
    if value is None or isinstance(value, (bool, int, float, complex, str, Ref)):
        return value
    if isinstance(value, torch.dtype):
        return DType(dtype_name(value))
    if isinstance(value, torch.device):
        return DEVICE
    if isinstance(value, torch.layout):
        return Marker("layout", str(value).removeprefix("torch."))
    if isinstance(value, torch.memory_format):
        return Marker("memory_format", str(value).removeprefix("torch."))
    if isinstance(value, (list, tuple)):
        return tuple(from_torch(v) for v in value)
    raise TraceError(
        f"an argument of type {type(value).__name__} ({value!r}) cannot be part of a static graph; "
        "dynamic shapes are not supported"
    )


def to_torch(value: Argument, device: torch.device) -> Any:
    """The torch object for an argument; ``Ref`` stays as it is, tuples become lists."""
    if isinstance(value, DType):
        return torch_dtype(value.name)
    if isinstance(value, Marker):
        if value.kind == "device":
            return device
        return _LAYOUTS[value.name] if value.kind == "layout" else _MEMORY_FORMATS[value.name]
    if isinstance(value, tuple):
        return [to_torch(v, device) for v in value]
    return value


def draws(name: str) -> bool:
    """Whether torch says of the op called ``name`` that it draws random numbers."""
    return torch.Tag.nondeterministic_seeded in torch_op(name).tags


def is_random(instruction: Instruction) -> bool:
    """Whether an instruction calls an op that draws random numbers."""
    if instruction.is_source or instruction.op.startswith("hetspmd."):
        return False
    return draws(instruction.op)


def torch_op(name: str) -> Any:
    """The op overload called ``namespace.op.overload``. Raises TraceError if torch does not have it."""
    if name == REBALANCE:
        return torch.ops.aten.alias.default
    namespace, op, overload = name.split(".")
    try:
        return getattr(getattr(getattr(torch.ops, namespace), op), overload)
    except AttributeError as error:
        raise TraceError(
            f"op {name} is not registered in this process; import the library that defines it"
        ) from error
