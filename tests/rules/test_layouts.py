"""Some kernels read memory as if it were contiguous; a slice of a whole tensor is not.

Every sample call of the oracle is made again with one input at a time laid out otherwise: a slice of a larger
tensor, and a transposed copy. An op whose result changes must be listed in ``rules/kernels.py``, so that
lowering makes its inputs contiguous.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

import hetspmd.rules.ops  # noqa: F401  # registers the rules
from hetspmd.rules import samples
from hetspmd.rules.brute import Outputs, case_of, execute, seeded
from hetspmd.rules.kernels import dense, dense_rows, reader_of
from hetspmd.rules.registry import rule_for

REFUSES = ("aten.view.", "aten._unsafe_view.")
"""Ops that raise for such inputs; lowering calls reshape instead."""


def layouts(tensor: Tensor) -> Iterator[Tensor]:
    """The same values in other strides."""
    for dim in range(tensor.ndim):
        shape = list(tensor.shape)
        shape[dim] += 3
        part = tensor.new_ones(shape).narrow(dim, 2, tensor.shape[dim]).copy_(tensor)
        if not part.is_contiguous():
            yield part
    if tensor.ndim > 1:
        turned = tensor.transpose(0, -1).contiguous().transpose(0, -1)
        if not turned.is_contiguous():
            yield turned


def same(got: Outputs, want: Outputs, skip: tuple[int, ...]) -> bool:
    return all(
        a is None or b is None or i in skip
        or (a.shape == b.shape and torch.allclose(a, b, rtol=1e-4, atol=1e-6, equal_nan=True))
        for i, (a, b) in enumerate(zip(got, want, strict=True))
    )  # fmt: skip


def test_ops_that_ignore_strides_are_listed() -> None:
    bundled = samples.load()
    calls, wrong = 0, set()
    for op, factory in bundled.samples.items():
        if "empty" in op or op.startswith(REFUSES):
            continue
        with seeded(20):
            made = factory()
        reader = reader_of(op)
        for args, kwargs in made:
            case = case_of(op, args, kwargs)
            rule = rule_for(case.call)
            if rule is None or rule.random:
                continue  # random numbers are drawn for the tensor's values, apart from its layout
            call = (op, case.call.args, dict(case.call.kwargs))
            for position, tensor in enumerate(case.inputs):
                for other in layouts(tensor):
                    inputs = [*case.inputs[:position], other, *case.inputs[position + 1 :]]
                    if reader is not None:
                        inputs = [reader(t) for t in inputs]
                    calls += 1
                    try:
                        right = same(
                            execute(call, inputs, case.device, 0),
                            case.outputs,
                            bundled.shape_only.get(op, ()),
                        )
                    except RuntimeError:
                        right = False
                    if not right:
                        wrong.add(op)
    assert calls > 5000
    assert not wrong


def test_readers_copy_only_where_they_must() -> None:
    x = torch.randn(2, 3, 4, 5)
    assert dense(x) is x
    assert dense_rows(x) is x
    heads = x.transpose(1, 2)
    assert dense_rows(heads) is heads
    assert dense(heads).is_contiguous()
    assert dense_rows(x.transpose(-1, -2)).is_contiguous()
    assert dense_rows(torch.randn(4, 6, 5)[:, 1:]).is_contiguous()
    assert reader_of("aten.mm.default") is None
    assert reader_of("aten.native_layer_norm_backward.default") is dense
    assert reader_of("aten._scaled_dot_product_efficient_attention.default") is dense_rows
