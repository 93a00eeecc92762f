"""Attention on a GPU that a trace would take apart although the GPU has a kernel for it.

torch chooses the kernel of ``scaled_dot_product_attention`` by looks at its tensors, and where they are without
data it may choose the products and the softmax of which attention is made, for tensors that a GPU would give to a
fused kernel. :func:`whole_attention` keeps such a call as one op, the project's own
(:mod:`hetspmd.trace.dropout_attention`), and each rank chooses the kernel of its device for its part
(:mod:`hetspmd.trace.gpu_dropout`).
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from hetspmd.trace.compat.func_transforms import is_batched
from hetspmd.trace.compat.tensors import attention_choice
from hetspmd.trace.dropout_attention import NAMESPACE, for_heads
from hetspmd.trace.gpu_attention import is_fused

DEVICES: Final = {"cuda"}
"""Kinds of devices that have fused kernels which differ from one device to another."""


def whole_attention(device: torch.device) -> AbstractContextManager[Any]:
    """Within the context, attention that is traced for ``device`` stays one op wherever that has a kernel."""
    return _Whole(device.type) if device.type in DEVICES else nullcontext()


class _Whole(TorchFunctionMode):
    def __init__(self, device_type: str) -> None:
        super().__init__()
        self.device_type = device_type

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is scaled_dot_product_attention:
            found = self.whole(*args, **kwargs)
            if found is not None:
                return found
        return func(*args, **kwargs)

    def whole(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor | None:
        """The attention as one op; None where it stays as it is."""
        tensors = [t for t in (query, key, value, attn_mask) if t is not None]
        if any(t.device.type != self.device_type or is_batched(t) for t in tensors):
            return None
        query, key, value = (self._cast(t) for t in (query, key, value))
        if not query.ndim == key.ndim == value.ndim == 4 or not 0.0 <= dropout_p < 1.0:
            return None
        heads, groups = query.shape[1], key.shape[1]
        whole_groups = groups == heads or (enable_gqa and groups > 0 and heads % groups == 0)
        if (
            not whole_groups
            or value.shape[1] != groups
            or (attn_mask is not None and attn_mask.requires_grad)
        ):
            return None
        if not is_fused(query, for_heads(key, heads), for_heads(value, heads)):
            return None
        options = {"scale": scale, "enable_gqa": enable_gqa}
        if not _taken_apart(query, key, value, attn_mask, dropout_p, is_causal, **options):
            return None
        bias = None if attn_mask is None else _bias(attn_mask, query.dtype)
        seeds = None
        if dropout_p > 0.0:
            seeds = torch.rand(query.shape[:2], dtype=torch.float64, device=query.device)
        op = getattr(torch.ops, NAMESPACE).dropout_attention.default
        output: Tensor = op(query, key, value, bias, seeds, dropout_p, is_causal, scale)[0]
        return output

    def _cast(self, tensor: Tensor) -> Tensor:
        """The tensor as autocast would give it to attention."""
        if not torch.is_autocast_enabled(self.device_type) or tensor.dtype == torch.float64:
            return tensor
        return tensor.to(torch.get_autocast_dtype(self.device_type))


def _taken_apart(query: Tensor, *args: Any, **options: Any) -> bool:
    """Whether torch takes a call apart, unless the model has asked for that by turning the kernels off."""
    backends: Any = torch.backends.cuda
    if not backends.flash_sdp_enabled() and not backends.mem_efficient_sdp_enabled():
        return False
    return attention_choice(query, *args, **options) == SDPBackend.MATH.value


def _bias(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """What is added to the scores."""
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(~mask, -torch.inf)
