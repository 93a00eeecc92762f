"""Attention on a GPU of a plan that was compiled on a CPU: the parts against the CPU's kernel."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hetspmd.errors import PlanError
from hetspmd.lower import calls
from hetspmd.lower.attention import kernel_of
from hetspmd.run.captured_regions import is_captured
from hetspmd.trace import gpu_attention as attention
from hetspmd.trace.compat.tensors import FakeTensorMode
from hetspmd.trace.evaluate import local_op

aten = torch.ops.aten
CPU, CUDA = torch.device("cpu"), torch.device("cuda")
FORWARD = "aten._scaled_dot_product_flash_attention_for_cpu.default"
BACKWARD = "aten._scaled_dot_product_flash_attention_for_cpu_backward.default"


def made(lengths: tuple[int, int] = (6, 6), width: int = 8, dtype: torch.dtype = torch.float64) -> Any:
    torch.manual_seed(0)
    return [torch.randn(3, 2, lengths[i > 0], width, dtype=dtype) for i in range(3)]


def masked(shape: tuple[int, ...]) -> torch.Tensor:
    """Also -inf, but not in all of a row."""
    mask = torch.randn(shape, dtype=torch.float64)
    mask[..., 2] = -torch.inf
    return mask


CASES: dict[str, tuple[tuple[int, int], dict[str, Any]]] = {
    "plain": ((6, 6), {}),
    "causal": ((6, 6), {"is_causal": True}),
    "other lengths": ((5, 7), {}),
    "a scale": ((5, 7), {"scale": 0.3}),
    "a mask": ((5, 7), {"attn_mask": masked((3, 2, 5, 7))}),
    "a mask for all heads": ((5, 7), {"attn_mask": masked((3, 1, 1, 7))}),
    "no samples": ((5, 7), {}),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_what_is_computed_in_parts_is_that_of_the_kernel(name: str, dtype: torch.dtype) -> None:
    lengths, options = CASES[name]
    query, key, value = (t[: 0 if name == "no samples" else 3] for t in made(lengths, dtype=dtype))
    options = {k: v.to(dtype) if isinstance(v, torch.Tensor) else v for k, v in options.items()}
    causal, mask = options.get("is_causal", False), options.get("attn_mask")
    close = {"rtol": 1e-10, "atol": 1e-12} if dtype == torch.float64 else {"rtol": 2e-2, "atol": 2e-2}
    if dtype == torch.float32:
        close = {"rtol": 1e-4, "atol": 1e-5}
    found = attention._in_parts(query, key, value, causal, mask, options.get("scale"))
    if not query.numel():
        assert [tuple(t.shape) for t in found] == [(0, 2, 5, 8), (0, 2, 5)]
        return
    want = aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, **options)
    for got, of in zip(found, want, strict=True):
        torch.testing.assert_close(got, of.to(got.dtype), **close)
    grad = torch.randn_like(want[0])
    rest = {k: v for k, v in options.items() if k != "is_causal"}
    wanted = aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, query, key, value, *want, 0.0, causal, **rest
    )
    gradients = attention._in_parts_backward(
        grad, query, key, value, found[0], causal, mask, options.get("scale")
    )
    for got, of in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(got, of, **close)


def test_a_row_that_is_masked_whole_is_zero() -> None:
    query, key, value = made()
    mask = torch.zeros(6, 6, dtype=torch.float64)
    mask[1] = -torch.inf
    out, _ = attention._in_parts(query, key, value, False, mask, None)
    grads = attention._in_parts_backward(torch.ones_like(out), query, key, value, out, False, mask, None)
    assert not out[:, :, 1].any()
    assert not grads[0][:, :, 1].any()
    assert all(g.isfinite().all() for g in grads)


@pytest.mark.parametrize("mask", [None, (4, 1, 1, 30), (30, 30)], ids=str)
def test_a_gpu_takes_its_own_kernels(mask: tuple[int, ...] | None) -> None:
    """By shapes alone: fake tensors of a GPU."""
    with FakeTensorMode():
        query = torch.empty(4, 2, 30, 64, device="cuda", dtype=torch.bfloat16)
        bias = None if mask is None else torch.empty(mask, device="cuda", dtype=torch.bfloat16)
        out, statistics = local_op(FORWARD, CUDA)(query, query, query, 0.0, attn_mask=bias)
        assert (out.shape, out.device.type) == (query.shape, "cuda")
        assert (tuple(statistics.shape), statistics.dtype) == ((4, 2, 30), torch.float32)
        found = local_op(BACKWARD, CUDA)(
            out, query, query, query, out, statistics, 0.0, False, attn_mask=bias
        )
        assert [g.shape for g in found] == [query.shape] * 3
    assert local_op(FORWARD, CPU) is aten._scaled_dot_product_flash_attention_for_cpu.default


def test_an_op_that_a_device_does_not_have_is_named() -> None:
    assert local_op("aten.mm.default", CUDA) is aten.mm.default
    assert local_op("aten.silu.default", CUDA) is aten.silu.default
    with pytest.raises(
        PlanError, match=r"aten\.mkldnn_linear\.default, which the plan calls, has no kernel for"
    ):
        local_op("aten.mkldnn_linear.default", CUDA)


@pytest.mark.parametrize("op", [FORWARD, BACKWARD, "hetspmd_ops.dropout_attention.default"])
def test_a_call_of_a_gpus_kernel_can_be_captured(op: str) -> None:
    graph = torch.fx.Graph()
    kernel = kernel_of(op, CUDA) or local_op(op, CUDA)
    assert is_captured(graph.call_function(kernel, (graph.placeholder("query"),)))
    assert not is_captured(graph.call_function(calls.attend, (None, kernel, ())))
