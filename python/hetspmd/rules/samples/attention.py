"""Samples of attention kernels that run on a CPU."""

from __future__ import annotations

from collections.abc import Callable

import torch

from hetspmd.rules.samples import Sample
from hetspmd.rules.sampling import real

Samples = Callable[[], list[Sample]]


def _qkv(heads: int = 6, groups: int = 6) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return real(4, heads, 5, 8), real(4, groups, 7, 8, seed=1), real(4, groups, 7, 8, seed=2)


def _masks() -> list[torch.Tensor]:
    return [real(4, 6, 5, 7, seed=3), real(1, 1, 5, 7, seed=3), real(4, 1, 1, 7, seed=3), real(5, 7, seed=3)]


def _square() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return real(4, 6, 5, 8), real(4, 6, 5, 8, seed=1), real(4, 6, 5, 8, seed=2)


def _flash_cpu() -> list[Sample]:
    return [
        (_qkv(), {}),
        ((*_square(), 0.0, True), {}),
        ((*_qkv(), 0.0, False), {"scale": 0.3}),
        *[((*_qkv(),), {"attn_mask": mask}) for mask in _masks()],
    ]


def _flash_cpu_backward() -> list[Sample]:
    samples: list[Sample] = []
    for causal, qkv, mask in (
        (False, _qkv(), None),
        (True, _square(), None),
        *((False, _qkv(), m) for m in _masks()),
    ):
        forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
        out, logsumexp = forward(*qkv, 0.0, causal, attn_mask=mask)
        kwargs = {} if mask is None else {"attn_mask": mask}
        samples.append(((real(*out.shape, seed=5), *qkv, out, logsumexp, 0.0, causal), kwargs))
    return samples


def _composite() -> list[Sample]:
    return [
        (_qkv(), {}),
        ((*_square(), None, 0.0, True), {}),
        *[((*_qkv(), mask), {}) for mask in _masks()],
        (_qkv(groups=3), {"enable_gqa": True}),
        (_qkv(groups=1), {"enable_gqa": True}),
    ]


def _seeds() -> torch.Tensor:
    return real(4, 6, seed=7).abs().double()


def _dropout() -> list[Sample]:
    return [
        ((*_qkv(), None, _seeds(), 0.3, False, None), {}),
        ((*_square(), None, _seeds(), 0.3, True, 0.4), {}),
        *[((*_qkv(), mask, _seeds(), 0.3, False, None), {}) for mask in _masks()],
        ((*_qkv(groups=3), None, _seeds(), 0.3, False, None), {}),
        ((*_qkv(groups=1), None, _seeds(), 0.3, False, None), {}),
    ]


def _dropout_backward() -> list[Sample]:
    samples: list[Sample] = []
    for args, _ in _dropout():
        out, logsumexp, state = torch.ops.hetspmd_ops.dropout_attention.default(*args)
        tensors = real(*out.shape, seed=5), *args[:4], out, logsumexp, state
        samples.append(((*tensors, *args[5:]), {}))
    return samples


SAMPLES: dict[str, Samples] = {
    "aten._scaled_dot_product_flash_attention_for_cpu.default": _flash_cpu,
    "aten._scaled_dot_product_flash_attention_for_cpu_backward.default": _flash_cpu_backward,
    "aten.scaled_dot_product_attention.default": _composite,
    "aten._scaled_dot_product_attention_math.default": _composite,
    "hetspmd_ops.dropout_attention.default": _dropout,
    "hetspmd_ops.dropout_attention_backward.default": _dropout_backward,
}

_CUDA = "the kernel runs on CUDA only"

UNTESTED: dict[str, str] = {
    "aten._scaled_dot_product_flash_attention.default": _CUDA,
    "aten._scaled_dot_product_flash_attention_backward.default": _CUDA,
    "aten._scaled_dot_product_efficient_attention.default": _CUDA,
    "aten._scaled_dot_product_efficient_attention_backward.default": _CUDA,
    "aten._scaled_dot_product_cudnn_attention.default": _CUDA,
    "aten._scaled_dot_product_cudnn_attention_backward.default": _CUDA,
}
