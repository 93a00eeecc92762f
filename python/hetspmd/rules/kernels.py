"""Functions that lowered programs call where no single op computes the local result, or around an op."""

from __future__ import annotations

from typing import Any, Final

import torch

DENSE: Final = frozenset(
    {
        "aten.native_group_norm.default", "aten.native_group_norm_backward.default",
        "aten.native_layer_norm_backward.default", "aten._fused_rms_norm_backward.default",
        "aten._weight_norm_interface.default", "aten._weight_norm_interface_backward.default",
        "aten.adaptive_max_pool3d_backward.default", "aten.fractional_max_pool2d_backward.default",
        "aten.fractional_max_pool3d_backward.default", "aten.nll_loss2d_backward.default",
        "aten.as_strided.default", "aten.as_strided_copy.default", "aten.as_strided_scatter.default",
        "aten._reshape_alias.default", "aten._grouped_mm.default", "aten.view.dtype", "aten.view_copy.dtype",
        "aten.view_as_complex.default", "aten.view_as_complex_copy.default",
    }
)  # fmt: skip
"""Ops whose result depends on more than the values of their inputs: the kernel reads some input's memory as if
it were contiguous, refuses it if it is not, or the op is told strides. A slice of a whole tensor is not
contiguous."""

WRITTEN_OUT: Final = frozenset(
    f"aten.{name}.default"
    for name in (
        "native_group_norm",
        "native_group_norm_backward",
        "native_layer_norm_backward",
        "_fused_rms_norm_backward",
    )
)
"""Those of :data:`DENSE` that compilers write out in smaller ops, which read values wherever they lie."""

DENSE_ROWS: Final = (
    "aten._scaled_dot_product_", "aten._flash_attention_", "aten._efficient_attention_",
    "hetspmd_ops.dropout_attention",
)  # fmt: skip
"""Beginnings of ops that read the last dim as if its stride were 1."""


def reader_of(op: str) -> Any:
    """What an op's inputs must pass through on a device (:func:`dense`, :func:`dense_rows`), None for most."""
    if op in DENSE:
        return dense
    return dense_rows if op.startswith(DENSE_ROWS) else None


def lies_as_compiled(reader: Any, op: str) -> bool:
    """Whether a compiler that is given ``reader`` with ``op`` lets what the op reads lie as it must: it knows what
    torch's kernels of attention read, and writes others out (:data:`WRITTEN_OUT`)."""
    return (reader is dense_rows and op.startswith("aten.")) or (reader is dense and op in WRITTEN_OUT)


def dense(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in contiguous memory; itself if it is."""
    return tensor.contiguous()


def dense_rows(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor with its last dim contiguous; itself if it is, or has fewer than four dims and is contiguous."""
    if tensor.ndim >= 4 and tensor.stride(-1) == 1:
        return tensor
    return tensor.contiguous()


def empty_shards(shapes: list[list[int]], dtypes: list[torch.dtype | None], device: torch.device) -> Any:
    """What a device without any unit of the sharded factor contributes: zeros of the local shapes
    (of no elements for a cut output, the neutral summand for an All-Reduce output); None where the dtype
    is None."""
    tensors = [
        None if d is None else torch.zeros(s, dtype=d, device=device)
        for s, d in zip(shapes, dtypes, strict=True)
    ]
    return tensors[0] if len(tensors) == 1 else tuple(tensors)
