"""What is advised where a tensor is read as a number that is an index."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import hetspmd.rules.ops  # noqa: F401  # registers the rules
from hetspmd.errors import TraceError
from nets import parameter, traced

ROWS = re.escape("rows = (m.ptr + torch.arange(n, device=m.ptr.device)) % k")
MOVES = re.escape("m.ptr.copy_((m.ptr + n) % k)")


def members() -> dict[str, Any]:
    return {"w": parameter(3), "ptr": nn.Buffer(torch.tensor(1)), "queue": nn.Buffer(torch.randn(3, 8))}


def enqueue(m: Any, x: torch.Tensor) -> torch.Tensor:
    ptr = int(m.ptr)
    m.queue[:, ptr : ptr + len(x)] = (x * m.w).detach().T
    return (x * m.w).sum()


def one_row(m: Any, x: torch.Tensor) -> torch.Tensor:
    row = m.ptr.item()
    return (x * m.w).sum() + m.queue[row].sum()


def a_tensor_in_a_slice(m: Any, x: torch.Tensor) -> torch.Tensor:
    return (x * m.w).sum() + m.queue[m.ptr : m.ptr + 2].sum()


def a_row_by_a_tensor(m: Any, x: torch.Tensor) -> torch.Tensor:
    return (x * m.w).sum() + m.queue[m.ptr].sum()


def narrowed(m: Any, x: torch.Tensor) -> torch.Tensor:
    return (x * m.w).sum() + m.queue.narrow(0, int(m.ptr), 2).sum()


@pytest.mark.parametrize("forward", [enqueue, one_row, a_tensor_in_a_slice, a_row_by_a_tensor, narrowed])
def test_an_index_may_stay_a_tensor(forward: Callable[..., torch.Tensor]) -> None:
    with pytest.raises(TraceError, match=f"{ROWS}.*index_copy_.*index_select.*{MOVES}") as caught:
        traced(forward, torch.randn(3, 3), **members())
    assert "torch.where(condition" not in str(caught.value)


def test_the_advice_for_an_index_is_true() -> None:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        n, k = len(x), 8
        rows = (m.ptr + torch.arange(n, device=m.ptr.device)) % k
        m.queue.index_copy_(1, rows, (x * m.w).detach().T)
        m.ptr.copy_((m.ptr + n) % k)
        return (x * m.w).sum() + m.queue.index_select(1, rows).sum()

    graph = traced(forward, torch.randn(3, 3), **members())
    assert all(buffer.updated is not None for buffer in graph.buffers)


def a_length(m: Any, x: torch.Tensor) -> torch.Tensor:
    n = int(m.ptr)
    return (x * m.w)[:n].sum()


def a_factor(m: Any, x: torch.Tensor) -> torch.Tensor:
    return (x * m.w).sum() / float(m.ptr)


def a_branch(m: Any, x: torch.Tensor) -> torch.Tensor:
    if int(m.ptr) > 1:
        return (x * m.w).sum() * m.queue[0, 0]
    return (x * m.w).sum()


@pytest.mark.parametrize(
    ("forward", "advice"),
    [
        (a_length, r"torch\.where\(torch\.arange\(len\(x\), device=x\.device\) < m\.ptr, x, 0\.0\)"),
        (a_factor, r"leave out \.item\(\), float\(\)"),
        (a_branch, r"torch\.where\(condition, a, b\)"),
    ],
)
def test_what_is_no_index_has_other_advice(forward: Callable[..., torch.Tensor], advice: str) -> None:
    with pytest.raises(TraceError, match=advice) as caught:
        traced(forward, torch.randn(3, 3), **members())
    assert "index_copy_" not in str(caught.value)
