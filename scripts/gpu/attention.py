"""Do fused kernels of attention with dropout give gradients of the mask that they have drawn? What do they cost?

    python scripts/gpu/attention.py

Each case calls the kernel that hetspmd would choose on this GPU twice with the same random numbers: with values
that are the identity, so that the output is the dropped weights and tells the mask, and with random ones. Output
and gradients of the second call must be those of attention in float32 with that mask. Then training is timed:
forward and backward of eager PyTorch's ``scaled_dot_product_attention`` and of the same kernels by hetspmd, in
turns, and the op in parts. Prints a line a case; exit 1 if one is wrong. ``--device cpu`` tries the script itself
with the op in parts.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from hetspmd.lower.attention import kernel_of
from hetspmd.trace.dropout_attention import (
    BACKWARD,
    FORWARD,
    attention_weights,
    dropout_attention,
    dropout_attention_backward,
    for_heads,
)

DROPOUT = 0.2
CASES: dict[str, tuple[torch.dtype, int, bool, bool]] = {
    "bfloat16": (torch.bfloat16, 8, False, False),
    "bfloat16, causal": (torch.bfloat16, 8, False, True),
    "bfloat16, groups": (torch.bfloat16, 2, False, False),
    "bfloat16, bias": (torch.bfloat16, 8, True, False),
    "float16": (torch.float16, 8, False, False),
    "float32": (torch.float32, 8, False, False),
    "float32, causal": (torch.float32, 8, False, True),
    "float32, bias and groups": (torch.float32, 2, True, False),
}
"""The dtype, the number of key heads, whether there is a bias, and whether it is causal."""


def kernels(device: torch.device) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Forward and backward as this rank would call them."""
    return kernel_of(FORWARD, device) or dropout_attention, kernel_of(
        BACKWARD, device
    ) or dropout_attention_backward


def error(got: Tensor, want: Tensor) -> float:
    """Relative to the largest element."""
    return float((got.float() - want).abs().max() / want.abs().max())


def check(name: str, device: torch.device) -> bool:
    """Whether the gradients have the mask of the forward."""
    dtype, groups, biased, causal = CASES[name]
    forward, backward = kernels(device)
    torch.manual_seed(0)
    samples, heads, size = 3, 8, 64

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, device=device).to(dtype)

    query, key, value = (normal(samples, h, size, size) for h in (heads, groups, groups))
    bias = normal(samples, 1, size, size) if biased else None
    seeds = torch.rand(samples, heads, dtype=torch.float64, device=device)
    identity = torch.eye(size, dtype=dtype, device=device).expand(samples, groups, size, size).contiguous()
    options = DROPOUT, causal, None
    torch.manual_seed(1)
    dropped = forward(query, key, identity, bias, seeds, *options)[0].float()
    torch.manual_seed(1)
    out, logsumexp, state = forward(query, key, value, bias, seeds, *options)
    grad = normal(*out.shape)
    gradients = backward(grad, query, key, value, bias, out, logsumexp, state, *options)

    wide = [t.float().requires_grad_() for t in (query, key, value)]
    weights, _ = attention_weights(
        wide[0], for_heads(wide[1], heads), causal, None if bias is None else bias.float(), None
    )
    mask = dropped != 0
    want = (weights * mask / (1 - DROPOUT)) @ for_heads(wide[2], heads)
    wanted = torch.autograd.grad(want, wide, grad.float())
    seen = weights > 1e-4  # smaller ones may be zero in the output
    share = float(mask[seen].float().mean())
    worst = max(error(g, w) for g, w in zip((out, *gradients), (want.detach(), *wanted), strict=True))
    tolerance = 1e-3 if dtype == torch.float32 else 3e-2
    right = worst < tolerance and abs(share - (1 - DROPOUT)) < 0.02
    print(f"{name}: {'pass' if right else 'FAIL'}: error {worst:.1e}, {share:.1%} of the weights are kept")
    return right


def seconds(call: Callable[[], object], device: torch.device) -> float:
    """Of ten calls."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(10):
        call()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def cost(device: torch.device, rounds: int) -> None:
    """Prints how long kernels and parts take, beside eager PyTorch."""
    forward, backward = kernels(device)
    samples, heads, tokens, size = (32, 12, 512, 64) if device.type == "cuda" else (2, 2, 64, 16)
    query, key, value, grad = (
        torch.randn(samples, heads, tokens, size, device=device).to(torch.bfloat16) for _ in range(4)
    )
    seeds = torch.rand(samples, heads, dtype=torch.float64, device=device)
    options = DROPOUT, False, None
    leaves = [t.clone().requires_grad_() for t in (query, key, value)]

    def eager() -> None:
        torch.autograd.grad(F.scaled_dot_product_attention(*leaves, dropout_p=DROPOUT), leaves, grad)

    def by(one: Callable[..., Any], other: Callable[..., Any]) -> None:
        out = one(query, key, value, None, seeds, *options)
        other(grad, query, key, value, None, *out, *options)

    arms = {
        "eager": eager,
        "kernels": lambda: by(forward, backward),
        "in parts": lambda: by(dropout_attention, dropout_attention_backward),
    }
    found: dict[str, list[float]] = {name: [] for name in arms}
    for turn in range(rounds + 1):
        for name, arm in arms.items():
            took = seconds(arm, device)
            if turn:
                found[name].append(took)
    for name in ("kernels", "in parts"):
        ratio = statistics.median(a / b for a, b in zip(found[name], found["eager"], strict=True))
        print(f"{name}: {ratio:.2f} times eager PyTorch's {statistics.median(found['eager']) * 100:.2f} ms")


def main() -> int:
    """All cases."""
    parser = argparse.ArgumentParser(description="Fused attention with dropout on one GPU.")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rounds", type=int, default=10, help="turns of those that are timed")
    options = parser.parse_args()
    device = torch.device(options.device)
    right = [check(name, device) for name in CASES]
    cost(device, options.rounds)
    return 0 if all(right) else 1


if __name__ == "__main__":
    sys.exit(main())
