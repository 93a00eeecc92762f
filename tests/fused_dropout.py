"""Models whose attention has dropout inside of fused kernels, and a stand-in for these, which run on GPUs only.

The models call the kernels on tensors without data, as a trace on a GPU would. The stand-in draws a mask that
depends on where an element lies in what it is given, as the kernels do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from hetspmd.trace.dropout_attention import dropout_attention, dropout_attention_backward
from nets import Net

aten = torch.ops.aten
SAMPLES, TOKENS, HEADS, WIDTH = 6, 5, 4, 4
DROPOUT = 0.3


def efficient(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, p: float, bias: Any) -> torch.Tensor:
    out: torch.Tensor = aten._scaled_dot_product_efficient_attention.default(q, k, v, bias, True, p, False)[0]
    return out


def flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, p: float, bias: Any) -> torch.Tensor:
    out: torch.Tensor = aten._scaled_dot_product_flash_attention.default(q, k, v, p, True)[0]
    return out


def cudnn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, p: float, bias: Any) -> torch.Tensor:
    out: torch.Tensor = aten._scaled_dot_product_cudnn_attention.default(q, k, v, bias, True, p, False)[0]
    return out


Kernel = Callable[..., torch.Tensor]


def model(kernel: Kernel, p: float = DROPOUT, *, bias: torch.Tensor | None = None) -> nn.Module:
    """Two blocks, the second of which reads what the first one makes."""
    torch.manual_seed(3)
    features = HEADS * WIDTH

    def forward(net: Any, x: torch.Tensor) -> torch.Tensor:
        for block in net.blocks:
            heads = block[0](x).view(*x.shape[:2], 3, HEADS, WIDTH).permute(2, 0, 3, 1, 4)
            mixed = net.kernel(*heads.unbind(), p, net.bias)
            x = x + block[1](mixed.transpose(1, 2).reshape(x.shape))
        return x.square().mean()

    blocks = [nn.ModuleList([nn.Linear(features, 3 * features), nn.Linear(features, features)]) for _ in "ab"]
    return Net(forward, blocks=nn.ModuleList(blocks), kernel=kernel, bias=bias).double()


def batch() -> torch.Tensor:
    torch.manual_seed(4)
    return torch.randn(SAMPLES, TOKENS, HEADS * WIDTH, dtype=torch.float64)


def _place_seeds(number: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """One seed for each sample and head of what a kernel is given: by where they lie in it."""
    batch, heads = like.shape[:2]
    return number + torch.arange(batch * heads, dtype=torch.int64).view(batch, heads) * 977


def kernel_forward(
    query: torch.Tensor, key: Any, value: Any, bias: Any, seeds: Any, *options: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    number = torch.randint(1 << 60, ())
    drawn = _place_seeds(number, query)
    out, logsumexp, _ = dropout_attention(query, key, value, bias, drawn.view(torch.float64), *options)
    return out, logsumexp, number.expand(*query.shape[:2], 2)


def kernel_backward(
    grad: Any, query: torch.Tensor, key: Any, value: Any, bias: Any, out: Any, logsumexp: Any, state: Any,
    *options: Any,
) -> Any:  # fmt: skip
    if state.numel():
        state = _place_seeds(state[0, 0, 0], query)[..., None]
    return dropout_attention_backward(grad, query, key, value, bias, out, logsumexp, state, *options)
