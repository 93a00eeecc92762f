"""Attention with dropout as one op whose random numbers are of samples and heads.

PyTorch's fused kernels draw the mask of a dropout inside of them. Which number an element gets depends on where it
lies in what the kernel is given, so that a part of what one device draws cannot be had by calling the kernel on a
part. The ops defined here draw nothing: they are given a ``seeds`` tensor [samples, heads], and the mask of a
sample and a head is a function of its seed alone. Samples and heads are therefore parallel, as they are without
dropout.

    dropout_attention(query, key, value, attn_bias, seeds, dropout_p, is_causal, scale)
        -> (output, log-sum-exp, state)

``query`` is [B, H, L, E], ``key`` [B, H', S, E] and ``value`` [B, H', S, F] with H a multiple of H'; ``attn_bias``
broadcasts to [B, H, L, S] and is added to the scores. ``output`` is [B, H, L, F], ``log-sum-exp`` [B, H, L], and
``state`` [B, H, 2] is what the gradient needs in order to have the same mask: here the bits of the seeds, and
from a fused kernel the state of its generator (:mod:`hetspmd.trace.gpu_dropout`).

``dropout_attention_backward`` gives the gradients of query, key and value.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor

NAMESPACE: Final = "hetspmd_ops"
FORWARD: Final = f"{NAMESPACE}.dropout_attention.default"
BACKWARD: Final = f"{NAMESPACE}.dropout_attention_backward.default"
STATE: Final = 2
"""Which output of the forward the state is."""
STATE_INPUT: Final = "state"
"""What the backward calls it."""

SCORES: Final = 1 << 22
"""Scores of a piece, at most, where the op runs in parts: no account of memory has what is computed for them, in 8
bytes each. One head may have more."""
_BITS: Final = 53
"""Bits of a random number that is compared with the probability: as many as a double's fraction has."""


def _mixed(x: Tensor) -> Tensor:
    """The finaliser of splitmix64 (Steele, Lea and Flood, 2014), on int64 whose products wrap around."""
    x = (x ^ ((x >> 30) & ((1 << 34) - 1))) * -0x40A7_B892_E31B_1A47
    x = (x ^ ((x >> 27) & ((1 << 37) - 1))) * -0x6B2F_B644_ECCE_EE15
    return x ^ ((x >> 31) & ((1 << 33) - 1))


def kept(seeds: Tensor, like: Tensor, dropout_p: float) -> Tensor:
    """Which of the weights [B, H, L, S] a dropout keeps, by the int64 ``seeds`` [B, H]."""
    length, keys = like.shape[2:]
    place = torch.arange(length * keys, dtype=torch.int64, device=seeds.device).view(length, keys)
    numbers = _mixed(_mixed(seeds)[..., None, None] + place * -0x61C8_8646_80B5_83EB)
    return ((numbers >> (64 - _BITS)) & ((1 << _BITS) - 1)) >= round(dropout_p * (1 << _BITS))


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """What weights are computed in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def scale_of(query: Tensor, scale: float | None) -> float:
    """What scores are multiplied by."""
    return 1.0 / math.sqrt(query.shape[3]) if scale is None else scale


def attention_weights(
    query: Tensor, key: Tensor, causal: bool, bias: Tensor | None, scale: float | None
) -> tuple[Tensor, Tensor]:
    """The attention weights [B, H, L, S] and their log-sum-exps [B, H, L]; rows where all is masked are zeros."""
    wide = wide_dtype(query.dtype)
    scores = query.to(wide) @ key.to(wide).transpose(2, 3) * scale_of(query, scale)
    if bias is not None:
        scores = scores + bias.to(wide)
    if causal:
        seen = torch.ones(scores.shape[2:], dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(~seen, -math.inf)
    statistics = scores.logsumexp(3)
    weights = torch.exp(scores - statistics[..., None])
    return weights.masked_fill(torch.isneginf(statistics)[..., None], 0.0), statistics


def for_heads(x: Tensor, heads: int) -> Tensor:
    """Keys or values with as many heads as the query has."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], 1)


def of_groups(gradient: Tensor, like: Tensor) -> Tensor:
    """The gradient of keys or values of fewer heads, of that of :func:`for_heads`."""
    if gradient.shape == like.shape:
        return gradient
    batch, heads, *rest = like.shape
    return gradient.reshape(batch, heads, gradient.shape[1] // heads, *rest).sum(2)


Piece: TypeAlias = tuple[slice, slice]
"""Some samples and some heads."""


def _pieces(query: Tensor, key: Tensor) -> Iterator[tuple[Piece, Piece]]:
    """Samples and heads of the query, with those of the keys, piece by piece, so that no piece has many scores."""
    batch, heads, length, _width = query.shape
    groups, keys = key.shape[1:3]
    group = heads // groups
    most = max(1, SCORES // max(1, group * length * keys))
    some_groups, samples = min(groups, most), max(1, most // groups)
    for first in range(0, batch, samples):
        for low in range(0, groups, some_groups):
            high = min(groups, low + some_groups)
            of_samples = slice(first, first + samples)
            yield (of_samples, slice(low * group, high * group)), (of_samples, slice(low, high))


def _of_piece(bias: Tensor | None, piece: Piece) -> Tensor | None:
    """The part of a bias that is added to the scores of a piece."""
    if bias is None:
        return None
    bias = bias.view((1,) * (4 - bias.ndim) + bias.shape)
    samples, heads = (part if n > 1 else slice(None) for part, n in zip(piece, bias.shape, strict=False))
    return bias[samples, heads]


def dropout_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | None,
    seeds: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The forward in parts, on any device; ``seeds`` are float64, and None without dropout."""
    output, statistics, state = _results(query, key, value)
    state.zero_()
    if seeds is not None:
        state[..., 0] = seeds.contiguous().view(torch.int64)
    for own, of_keys in _pieces(query, key):
        heads = own[1].stop - own[1].start
        keys, values = for_heads(key[of_keys], heads), for_heads(value[of_keys], heads)
        bias = _of_piece(attn_bias, own)
        weights, statistics[own] = attention_weights(query[own], keys, is_causal, bias, scale)
        if dropout_p > 0.0:
            weights = weights * kept(state[own][..., 0], weights, dropout_p) / (1.0 - dropout_p)
        output[own] = (weights @ values.to(weights.dtype)).to(query.dtype)
    return output, statistics, state


def dropout_attention_backward(
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
    """The gradients of query, key and value in parts, on any device; ``options`` are those of the forward."""
    dropout_p, is_causal, scale = options
    found = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
    wide, factor = wide_dtype(query.dtype), scale_of(query, scale)
    for own, of_keys in _pieces(query, key):
        queries, heads = query[own].to(wide), own[1].stop - own[1].start
        keys, values = for_heads(key[of_keys], heads).to(wide), for_heads(value[of_keys], heads).to(wide)
        weights, _ = attention_weights(queries, keys, is_causal, _of_piece(attn_bias, own), scale)
        dropped, grad = weights, grad_out[own].to(wide)
        of_weights = grad @ values.transpose(2, 3)
        if dropout_p > 0.0:
            scaled = kept(state[own][..., 0], weights, dropout_p).to(wide) / (1.0 - dropout_p)
            dropped, of_weights = weights * scaled, of_weights * scaled
        of_scores = weights * (of_weights - (grad * out[own].to(wide)).sum(3, keepdim=True)) * factor
        found[0][own] = (of_scores @ keys).to(query.dtype)
        found[1][of_keys] = of_groups(of_scores.transpose(2, 3) @ queries, key[of_keys]).to(key.dtype)
        found[2][of_keys] = of_groups(dropped.transpose(2, 3) @ grad, value[of_keys]).to(value.dtype)
    return found


def _results(query: Tensor, key: Tensor, value: Tensor, *_: object) -> tuple[Tensor, Tensor, Tensor]:
    """Tensors like the results of the forward."""
    batch, heads, length, _width = query.shape
    return (
        query.new_empty(batch, heads, length, value.shape[3]),
        query.new_empty(batch, heads, length, dtype=wide_dtype(query.dtype)),
        query.new_empty(batch, heads, 2, dtype=torch.int64),
    )


def _results_backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: object
) -> tuple[Tensor, Tensor, Tensor]:
    """Tensors like the results of the backward."""
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


_TENSORS: Final = "Tensor query, Tensor key, Tensor value, Tensor? attn_bias"
_OPTIONS: Final = "float dropout_p, bool is_causal, float? scale"
_RESULTS: Final = "(Tensor, Tensor, Tensor)"
torch.library.define(
    f"{NAMESPACE}::dropout_attention",
    f"({_TENSORS}, Tensor? seeds, {_OPTIONS}) -> {_RESULTS}",
    # A copy that a recomputation makes may run by another kernel, with another mask: its results are held.
    tags=(torch.Tag.nondeterministic_seeded,),
)
torch.library.define(
    f"{NAMESPACE}::dropout_attention_backward",
    f"(Tensor grad_out, {_TENSORS}, Tensor out, Tensor logsumexp, Tensor state, {_OPTIONS}) -> {_RESULTS}",
)
for _name, _op, _shapes in (
    ("dropout_attention", dropout_attention, _results),
    ("dropout_attention_backward", dropout_attention_backward, _results_backward),
):
    torch.library.impl(f"{NAMESPACE}::{_name}", "default", _op)
    torch.library.register_fake(f"{NAMESPACE}::{_name}", _shapes)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    query, key, value, bias, _, *ctx.options = inputs
    ctx.save_for_backward(query, key, value, bias, *output)


def _gradient(ctx: Any, grad_out: Tensor, *_: object) -> tuple[Tensor | None, ...]:
    op = getattr(torch.ops, NAMESPACE).dropout_attention_backward.default
    gradients = op(grad_out, *ctx.saved_tensors, *ctx.options)
    return (*gradients, None, None, None, None, None)


torch.library.register_autograd(f"{NAMESPACE}::dropout_attention", _gradient, setup_context=_save)
