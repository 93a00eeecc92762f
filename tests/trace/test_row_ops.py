"""What is said of an op's rows holds: where elements along a dim change places in all tensors that have it, they do
so in the results, and nothing else changes."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from hetspmd.rules.brute import ConcreteCall, case_of, execute, mismatch, seeded
from hetspmd.rules.oracle import uninitialised
from hetspmd.rules.samples import load
from hetspmd.trace.graph import Instruction
from hetspmd.trace.row_ops import Shape, row_dims

Order = dict[int, torch.Tensor]
"""By dim: the order in which its elements come."""


def instruction_of(case: ConcreteCall) -> tuple[Instruction, list[Shape]]:
    call = case.call
    inputs, outputs = range(len(call.inputs)), range(len(call.outputs))
    made = Instruction(0, "", call.op, call.args, tuple(call.kwargs.items()), tuple(inputs), tuple(outputs))
    return made, [() if t is None else t.shape for t in (*call.inputs, *call.outputs)]


def closed(
    instruction: Instruction, shapes: Sequence[Shape], position: int, dim: int
) -> set[tuple[int, int]] | None:
    """All dims, of positions, that have the same rows; None where their order matters."""
    found, waiting = {(position, dim)}, [(position, dim)]
    while waiting:
        dims = row_dims(instruction, shapes, *waiting.pop())
        if dims is None:
            return None
        new = {(p, d) for p, d in enumerate(dims) if d is not None} - found
        found |= new
        waiting += new
    return found


def reordered(tensor: torch.Tensor, dims: Sequence[int], order: torch.Tensor) -> torch.Tensor:
    for dim in dims:
        tensor = tensor.index_select(dim, order)
    return tensor


def check_case(case: ConcreteCall) -> int:
    """How many dims of a call were tried."""
    instruction, shapes = instruction_of(case)
    tried = 0
    for position, shape in enumerate(shapes):
        for dim, extent in enumerate(shape):
            rows = closed(instruction, shapes, position, dim) if extent > 1 else None
            if rows is None:
                continue
            order = torch.randperm(extent)
            at = [[d for p, d in rows if p == i] for i in range(len(shapes))]
            moved = [reordered(t, at[i], order) for i, t in enumerate(case.inputs)]
            call = (case.call.op, case.call.args, dict(case.call.kwargs))
            got = execute(call, moved, case.device, 0)
            for o, want in enumerate(case.outputs):
                result = got[o]
                if want is not None and result is not None and not uninitialised(case.call.op):
                    want = reordered(want, at[len(case.inputs) + o], order)
                    assert mismatch(result, want, case.tolerance) is None, (case.call.op, shape, dim, o)
            tried += 1
    return tried


def test_all_samples_of_rules() -> None:
    tried: dict[str, int] = {}
    samples = load()
    for op, factory in samples.samples.items():
        with seeded(0):
            calls = factory()
        for args, kwargs in calls:
            tried[op] = tried.get(op, 0) + check_case(case_of(op, args, kwargs))
    known = [op for op, count in tried.items() if count]
    assert len(known) > 200
    for op in (
        "mm", "addmm", "t", "permute", "sum", "mean", "_softmax", "_log_softmax_backward_data", "gather", "scatter",
        "scatter_add", "slice", "cat", "select", "unbind", "select_backward", "split", "native_layer_norm",
        "native_layer_norm_backward", "embedding", "embedding_dense_backward", "_to_copy", "where", "full",
        "native_dropout_backward", "expand",
    ):  # fmt: skip
        assert any(name.split(".")[1] == op for name in known), op


@pytest.mark.parametrize("op", ["aten.cumsum.default", "aten.flip.default", "aten.native_dropout.default"])
def test_ops_to_which_the_order_matters_are_not_known(op: str) -> None:
    with seeded(0):
        calls = load().samples[op]()
    assert all(check_case(case_of(op, args, kwargs)) == 0 for args, kwargs in calls)
