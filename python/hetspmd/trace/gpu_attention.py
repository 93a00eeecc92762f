"""Attention of a graph that was traced on a CPU, where it runs on a GPU.

A plan that was compiled without a GPU calls the CPU's fused kernel, ``(output, log-sum-exp)`` of four dims without
dropout. A GPU has none of that name. The memory-efficient kernel computes the same on every kind of GPU that torch
supports; what it refuses (float64, head sizes that are no multiple of 8) is computed in parts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional as F

from hetspmd.trace.dropout_attention import attention_weights, scale_of

aten = torch.ops.aten

_HEAD_MULTIPLE: Final = 8
"""What a head's size must be a multiple of for the fused kernel, in all dtypes; its mask's rows too."""
STATISTICS_MULTIPLE: Final = 32
"""The kernel's log-sum-exps of a head are padded to a multiple of this many positions."""


def is_fused(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether the memory-efficient kernel takes these."""
    sizes = (query.shape[3], value.shape[3])
    return (
        query.dtype in (torch.float32, torch.float16, torch.bfloat16)
        and all(size % _HEAD_MULTIPLE == 0 for size in sizes)
        and query.shape[1] == key.shape[1] == value.shape[1]
        and min(*query.shape, *key.shape) > 0
    )


def dense_bias(mask: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
    """The mask for every sample and head, in rows that begin where the kernel wants them."""
    if mask is None:
        return None
    length = key.shape[2]
    whole = mask.to(query.dtype).expand(*query.shape[:3], length)
    return F.pad(whole, (0, -length % (2 * _HEAD_MULTIPLE)))[..., :length]


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """``(output [B, H, L, E], log-sum-exp [B, H, L])`` of the CPU's kernel of the same arguments."""
    assert dropout_p == 0.0
    if not is_fused(query, key, value):
        return _in_parts(query, key, value, is_causal, attn_mask, scale)
    bias = dense_bias(attn_mask, query, key)
    output, statistics, *_ = aten._scaled_dot_product_efficient_attention.default(
        query, key, value, bias, True, 0.0, is_causal, scale=scale
    )
    return output, statistics[..., : query.shape[2]]


def attention_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    dropout_p: float,
    is_causal: bool,
    **options: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of query, key and value. ``options``: ``attn_mask`` and ``scale``."""
    attn_mask, scale = options.get("attn_mask"), options.get("scale")
    assert dropout_p == 0.0
    if not is_fused(query, key, value):
        return _in_parts_backward(grad_out, query, key, value, out, is_causal, attn_mask, scale)
    seed = torch.zeros((), dtype=torch.int64, device=query.device)  # of dropout, which there is none of
    statistics = F.pad(logsumexp, (0, -query.shape[2] % STATISTICS_MULTIPLE))
    bias = dense_bias(attn_mask, query, key)
    wanted = [True, True, True, False]
    gradients = aten._scaled_dot_product_efficient_attention_backward.default(
        grad_out, query, key, value, bias, out, statistics, seed, seed, 0.0, wanted, is_causal, scale=scale
    )
    return gradients[0], gradients[1], gradients[2]


def _in_parts(
    query: Tensor, key: Tensor, value: Tensor, causal: bool, mask: Tensor | None, scale: float | None
) -> tuple[Tensor, Tensor]:
    weights, statistics = attention_weights(query, key, causal, mask, scale)
    return (weights @ value.to(weights.dtype)).to(query.dtype), statistics


def _in_parts_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    causal: bool,
    mask: Tensor | None,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    weights, _ = attention_weights(query, key, causal, mask, scale)
    wide = weights.dtype
    grad, whole = grad_out.to(wide), out.to(wide)
    of_weights = grad @ value.to(wide).transpose(2, 3)
    of_scores = weights * (of_weights - (grad * whole).sum(3, keepdim=True)) * scale_of(query, scale)
    return (
        (of_scores @ key.to(wide)).to(query.dtype),
        (of_scores.transpose(2, 3) @ query.to(wide)).to(key.dtype),
        (weights.transpose(2, 3) @ grad).to(value.dtype),
    )


ON_GPU: Final[Mapping[str, Callable[..., Any]]] = {
    "aten._scaled_dot_product_flash_attention_for_cpu.default": attention,
    "aten._scaled_dot_product_flash_attention_for_cpu_backward.default": attention_backward,
}
"""What computes an op of the CPU on a GPU, by the op's name."""
