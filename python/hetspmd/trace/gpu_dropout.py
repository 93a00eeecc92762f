"""The fused kernels of attention with dropout, on a GPU.

They draw their mask inside, from the default generator of the GPU, and give back the state that it had. A rank may
call them for its own samples and heads where the backward that reads the state gets the same samples and heads
(:mod:`hetspmd.lower.attention`). Each rank takes the kernel that its device has for its shapes and dtypes: flash,
memory-efficient, or, where there is none, the op in parts (:mod:`hetspmd.trace.dropout_attention`). The backward
asks for the kernel in the same way as the forward, of tensors of the same shapes, and so gets the same answer.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_flash_attention
from torch.nn import functional as F

from hetspmd.trace.dropout_attention import (
    dropout_attention,
    dropout_attention_backward,
    for_heads,
    of_groups,
)
from hetspmd.trace.gpu_attention import STATISTICS_MULTIPLE, dense_bias, is_fused

aten = torch.ops.aten

_FLASH_WIDTH: Final = 128
"""The largest head of which every GPU that has the flash kernel has its gradient."""


def _is_flash(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, causal: bool) -> bool:
    """Whether the flash kernel takes these: heads of one size, no mask but a causal one of a square."""
    return (
        bias is None
        and query.dtype in (torch.float16, torch.bfloat16)
        and query.shape[3] == key.shape[3] == value.shape[3]
        and query.shape[3] % 8 == 0
        and query.shape[3] <= _FLASH_WIDTH
        and (not causal or query.shape[2] == key.shape[2])
        and min(*query.shape, *key.shape) > 0
        and _may_be_flash(query, key, value, causal)
    )


_ASKED: Final[dict[object, bool]] = {}
"""What torch has said of tensors: it is asked once, so that a forward and its backward get the same answer whatever
is turned on or off between them."""


def _may_be_flash(query: Tensor, key: Tensor, value: Tensor, causal: bool) -> bool:
    """Whether this GPU has the flash kernel for these."""
    asked = query.device, query.dtype, query.shape, key.shape, causal
    if asked not in _ASKED:
        _ASKED[asked] = can_use_flash_attention(SDPAParams(query, key, value, None, 0.0, causal, True))
    return _ASKED[asked]


def _of_all(state: Tensor, query: Tensor) -> Tensor:
    """The state of a generator, two int64, for each sample and head. It stays where the kernel has put it, maybe in
    the host's memory: its backward reads it there."""
    return state.expand(query.shape[0], query.shape[1], 2)


def fused_dropout_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | None,
    seeds: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """What :func:`~hetspmd.trace.dropout_attention.dropout_attention` gives, with another mask. ``seeds`` matter
    only where no kernel takes these tensors."""
    if _is_flash(query, key, value, attn_bias, is_causal):
        output, statistics, *_, rng_state, _unused, _mask = aten._scaled_dot_product_flash_attention.default(
            query, key, value, dropout_p, is_causal, False, scale=scale
        )
        return output, statistics, _of_all(rng_state.view(torch.int64), query)
    heads = query.shape[1]
    keys, values = for_heads(key, heads), for_heads(value, heads)
    if not is_fused(query, keys, values):
        return dropout_attention(query, key, value, attn_bias, seeds, dropout_p, is_causal, scale)
    bias = dense_bias(attn_bias, query, keys)
    output, statistics, seed, offset = aten._scaled_dot_product_efficient_attention.default(
        query, keys, values, bias, True, dropout_p, is_causal, scale=scale
    )
    state = torch.stack((seed.view(()), offset.view(())))
    return output, statistics[..., : query.shape[2]], _of_all(state, query)


def fused_dropout_attention_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | None,
    out: Tensor,
    logsumexp: Tensor,
    state: Tensor,
    *options: *tuple[float, bool, float | None],
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of :func:`fused_dropout_attention`, whose last arguments ``options`` are."""
    dropout_p, is_causal, scale = options
    if _is_flash(query, key, value, attn_bias, is_causal):
        rng_state = state[0, 0].contiguous().view(torch.uint64)
        unused = torch.empty((), dtype=torch.uint64, device=query.device)
        lengths = None, None, query.shape[2], key.shape[2]
        gradients = aten._scaled_dot_product_flash_attention_backward.default(
            grad_out,
            query,
            key,
            value,
            out,
            logsumexp,
            *lengths,
            dropout_p,
            is_causal,
            rng_state,
            unused,
            scale=scale,
        )
        return gradients[0], gradients[1], gradients[2]
    heads = query.shape[1]
    keys, values = for_heads(key, heads), for_heads(value, heads)
    if not is_fused(query, keys, values):
        own = grad_out, query, key, value, attn_bias, out, logsumexp, state
        return dropout_attention_backward(*own, *options)
    statistics = F.pad(logsumexp, (0, -query.shape[2] % STATISTICS_MULTIPLE))
    bias = dense_bias(attn_bias, query, keys)
    seed, offset = state[0, 0].unbind()
    wanted = [True, True, True, False]
    gradients = aten._scaled_dot_product_efficient_attention_backward.default(
        grad_out,
        query,
        keys,
        values,
        bias,
        out,
        statistics,
        seed,
        offset,
        dropout_p,
        wanted,
        is_causal,
        scale=scale,
    )
    return gradients[0], of_groups(gradients[1], key), of_groups(gradients[2], value)
