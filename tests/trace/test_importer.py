"""What a graph of ATen ops becomes, for ops that no CPU runs: traced with fake tensors of a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from hetspmd.trace.compat.tensors import FakeTensorMode
from hetspmd.trace.importer import import_graph

KERNELS = {
    "flash": lambda q: torch.ops.aten._scaled_dot_product_flash_attention(q, q, q, 0.0, True),
    "cudnn": lambda q: torch.ops.aten._scaled_dot_product_cudnn_attention(q, q, q, None, True, 0.0, True),
}


def backward(kernel: str, q: torch.Tensor, found: tuple[Any, ...]) -> Any:
    out, statistics, cum_q, cum_k, longest_q, longest_k, seed, offset, _ = found
    if kernel == "flash":
        return torch.ops.aten._scaled_dot_product_flash_attention_backward(
            out, q, q, q, out, statistics, cum_q, cum_k, longest_q, longest_k, 0.0, True, seed, offset
        )
    bias = torch.empty(0, device=q.device, dtype=q.dtype)
    return torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
        out, q, q, q, out, statistics, seed, offset, bias, cum_q, cum_k, longest_q, longest_k, 0.0, True
    )


@pytest.mark.parametrize("kernel", KERNELS)
def test_numbers_of_shapes_that_a_kernel_returns_are_constants(kernel: str) -> None:
    """The longest sequences, which the backward takes."""

    def both(q: torch.Tensor) -> Any:
        found = KERNELS[kernel](q)
        return [backward(kernel, q, found)[0]]

    with FakeTensorMode():
        q = torch.empty(4, 2, 24, 64, device="cuda", dtype=torch.bfloat16)
        module = make_fx(both)(q)
    draft = import_graph(module)
    forward, gradient = draft.instructions[0], draft.instructions[-1]
    assert forward.op == f"aten._scaled_dot_product_{kernel}_attention.default"
    assert [value is None for value in forward.outputs[4:6]] == [True, True]
    assert gradient.op == f"aten._scaled_dot_product_{kernel}_attention_backward.default"
    first = 8 if kernel == "flash" else 11
    assert gradient.args[first : first + 2] == (24, 24)
