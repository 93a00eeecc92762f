"""Decompositions that the trace applies, so that each piece has an exact rule.

- A mean over a dimension that may be sharded becomes a sum and a division by the global count.
- Batch norm in training becomes sums over the global batch, which is what one device computes.
- Convolution backward becomes one instruction per gradient, so that each may be sharded in its own way.
- The gradient of a mean loss over no elements, whose count torch's decomposition would divide by, has no elements.
- ``new_zeros`` and its like, which read no values of their tensor, become ``full``: the tensor need not be whole.
  So does ``ones_like`` of a scalar, such as the seed of a gradient inside of the model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch

from hetspmd.errors import TraceError
from hetspmd.trace.compat.joint import Decompositions, decomposition_table

aten = torch.ops.aten

_FROM_TORCH = (
    aten.nll_loss_forward, aten.nll_loss_backward, aten.nll_loss2d_forward, aten.nll_loss2d_backward,
    aten.mse_loss, aten.mse_loss_backward, aten.smooth_l1_loss, aten.smooth_l1_loss_backward,
    aten.huber_loss, aten.huber_loss_backward, aten.binary_cross_entropy,
    aten.binary_cross_entropy_backward, aten.binary_cross_entropy_with_logits, aten.soft_margin_loss,
    aten.soft_margin_loss_backward,
    aten.native_batch_norm, aten._native_batch_norm_legit, aten._native_batch_norm_legit_functional,
    aten._native_batch_norm_legit_no_training, aten.native_batch_norm_backward, aten.batch_norm_backward,
    aten._batch_norm_with_update, aten._batch_norm_with_update_functional, aten._batch_norm_no_update,
    aten.cudnn_batch_norm, aten.cudnn_batch_norm_backward, aten.miopen_batch_norm_backward,
    aten.mkldnn_rnn_layer, aten.lstm, aten.gru, aten.rnn_tanh, aten.rnn_relu,
    aten._thnn_fused_lstm_cell, aten.std, aten.std_mean, aten.native_group_norm_backward,
)  # fmt: skip


@cache
def table() -> Decompositions:
    """The decomposition table of the trace."""
    decompositions = decomposition_table(list(_FROM_TORCH))
    for op in (aten.mse_loss_backward, aten.smooth_l1_loss_backward, aten.huber_loss_backward):
        decompositions[op.default] = _unless_empty(decompositions[op.default])
    decompositions.update(_own())
    return decompositions


def _own() -> dict[Any, Callable[..., Any]]:
    return {
        aten.mean.default: _mean,
        aten.mean.dim: _mean_dim,
        aten.var.correction: _var,
        aten.var_mean.correction: _var_mean,
        aten.convolution_backward.default: _convolution_backward,
        aten.new_zeros.default: partial(_new, 0),
        aten.new_ones.default: partial(_new, 1),
        aten.new_full.default: _new_full,
        # What is read of it is written first, as by feature dropout.
        aten.new_empty.default: partial(_new, 0),
        aten.ones_like.default: partial(_scalar_like, fill=1),
        aten.full_like.default: _scalar_like,
        aten.multi_margin_loss.default: _multi_margin_loss,
        aten.multilabel_margin_loss_forward.default: _multilabel_margin_loss,
    }


def _unless_empty(gradient: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """The gradient of a loss with respect to its first tensor, also where that has no elements."""

    def of(grad_output: torch.Tensor, x: torch.Tensor, *args: Any) -> torch.Tensor:
        return gradient(grad_output, x, *args) if x.numel() else torch.zeros_like(x)

    return of


def _count(x: torch.Tensor, dims: Sequence[int]) -> int:
    count = 1
    for d in dims:
        count *= x.shape[d]
    return count


def _all_dims(x: torch.Tensor, dim: Sequence[int] | int | None) -> list[int]:
    if dim is None or (not isinstance(dim, int) and len(dim) == 0):
        return list(range(x.ndim))
    dims = [dim] if isinstance(dim, int) else list(dim)
    return [d % x.ndim if x.ndim else 0 for d in dims]


def _mean_dim(
    x: torch.Tensor, dim: Sequence[int] | None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """sum / global count."""
    dims = _all_dims(x, dim)
    if x.ndim == 0:
        return x.to(dtype) if dtype is not None else x.clone()
    return torch.sum(x, dims, keepdim, dtype=dtype) / _count(x, dims)


def _mean(x: torch.Tensor, *, dtype: torch.dtype | None = None) -> torch.Tensor:
    return _mean_dim(x, None, dtype=dtype)


def _var_mean(
    x: torch.Tensor,
    dim: Sequence[int] | None = None,
    *,
    correction: float | None = None,
    keepdim: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Two passes: the mean by a sum, then the sum of squared distances from it (no cancellation)."""
    if x.is_complex():
        raise TraceError("the variance of a complex tensor has no rule")
    dims = _all_dims(x, dim)
    count = _count(x, dims)
    mean = torch.sum(x, dims, True) / count
    centred = x - mean
    divisor = max(count - (1 if correction is None else correction), 0)
    var = torch.sum(centred * centred, dims, keepdim) / divisor
    return var, mean if keepdim else mean.reshape(var.shape)


def _var(
    x: torch.Tensor,
    dim: Sequence[int] | None = None,
    *,
    correction: float | None = None,
    keepdim: bool = False,
) -> torch.Tensor:
    return _var_mean(x, dim, correction=correction, keepdim=keepdim)[0]


def _convolution_backward(grad_output: torch.Tensor, *rest: Any) -> Any:
    """One instruction per gradient; the bias gradient is a sum over batch and space. The last argument says which
    gradients are wanted."""
    *arguments, output_mask = rest
    wanted = [i for i in range(3) if output_mask[i]]
    if wanted in ([0], [1]):
        return NotImplemented
    results: list[torch.Tensor | None] = [None, None, None]
    for i in wanted:
        if i == 2:
            dims = [d for d in range(grad_output.ndim) if d != 1]
            results[2] = torch.sum(grad_output, dims)
        else:
            mask = [i == 0, i == 1, False]
            results[i] = aten.convolution_backward.default(grad_output, *arguments, mask)[i]
    return tuple(results)


def _new_full(
    x: torch.Tensor,
    size: Sequence[int],
    fill_value: float,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    **_: Any,
) -> torch.Tensor:
    """Of x only dtype and device matter."""
    return torch.full(size, fill_value, dtype=dtype or x.dtype, device=device or x.device)


def _new(fill_value: float, x: torch.Tensor, size: Sequence[int], **kwargs: Any) -> torch.Tensor:
    return _new_full(x, size, fill_value, **kwargs)


def _scalar_like(
    x: torch.Tensor,
    fill: float,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    **_: Any,
) -> torch.Tensor:
    """A larger tensor stays as it is, for it is cut as x is."""
    return NotImplemented if x.ndim else _new_full(x, (), fill, dtype=dtype, device=device)


def _reduced(rows: torch.Tensor, reduction: int) -> torch.Tensor:
    """The losses of the samples as they are (0), their mean (1) or their sum (2)."""
    return rows if reduction == 0 else rows.mean() if reduction == 1 else rows.sum()


def _multi_margin_loss(
    x: torch.Tensor,
    target: torch.Tensor,
    p: float = 1,
    margin: float = 1,
    weight: torch.Tensor | None = None,
    reduction: int = 1,
) -> torch.Tensor:
    """``sum(max(0, margin - x[target] + x[others]) ** p) / classes`` of each sample.

    A margin that is just met has no gradient, as in the kernel: ``clamp`` gives it one in torch 2.11.
    """
    rows, labels = x.reshape(-1, x.shape[-1]), target.reshape(-1)
    violated = torch.relu(margin - rows.gather(1, labels[:, None]) + rows)
    if p == 2:
        violated = violated * violated
    if weight is not None:
        violated = violated * weight[labels][:, None]
    classes = torch.arange(rows.shape[1], device=x.device)
    losses = torch.where(classes != labels[:, None], violated, 0).sum(1) / rows.shape[1]
    return _reduced(losses if x.ndim > 1 else losses[0], reduction)


def _multilabel_margin_loss(
    x: torch.Tensor, target: torch.Tensor, reduction: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """``sum(max(0, 1 - x[a label] + x[no label])) / classes`` of each sample, and 1 where a class is a label.

    A sample's labels end at its first -1. torch 2.11's own decomposition counts what follows as well.
    """
    rows, labels = (t.reshape(-1, x.shape[-1]) for t in (x, target))
    classes = torch.arange(rows.shape[1], device=x.device)
    ends = torch.where(labels == -1, classes, rows.shape[1]).amin(1, keepdim=True)
    mask = classes < ends
    scores = rows.gather(1, torch.where(mask, labels, 0))
    is_label = (classes == torch.where(mask, labels, -1)[:, :, None]).any(1)
    violated = torch.relu(1.0 - scores[:, :, None] + rows[:, None, :])
    counted = mask[:, :, None] & ~is_label[:, None, :]
    losses = torch.where(counted, violated, 0).sum((1, 2)) / rows.shape[1]
    return _reduced(losses if x.ndim > 1 else losses[0], reduction), is_label.to(x.dtype).reshape(
        target.shape
    )
