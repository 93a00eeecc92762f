"""Which reshapes are copies: as the single-device program's tensors lie in memory, and what ranks then hold."""

from __future__ import annotations

import random
from collections.abc import Set

import pytest
import torch
from torch import nn

from hetspmd.cost.copied_views import copied_views
from hetspmd.rules.theory import Theory, derive
from hetspmd.trace.evaluate import constant_value, run_instruction
from hetspmd.trace.trace import trace
from hetspmd.trace.values import torch_dtype
from workbench import CPU, traced


def copies(theory: Theory, delivered: Set[int] = frozenset()) -> set[int]:
    """The instructions whose rule says that they make views, but that make tensors with memory of their own.
    ``delivered``: tensors that are read as a collective delivers them."""
    graph, found = theory.graph, set[int]()
    values = {c.tensor: constant_value(graph, c, CPU) for c in graph.constants}
    for instruction in graph.instructions:
        if instruction.is_source:
            for t in instruction.outputs:
                meta = graph.tensors[t]
                values.setdefault(t, torch.zeros(meta.shape, dtype=torch_dtype(meta.dtype)))
            continue
        made = run_instruction(instruction, values, CPU)
        if theory.rules[instruction.id].alias:
            own = made[0].untyped_storage().data_ptr()
            if made[0].numel() and own not in {
                values[t].untyped_storage().data_ptr() for t in instruction.inputs
            }:
                found.add(instruction.id)
        read = [
            v.contiguous() if t in delivered else v for t, v in zip(instruction.outputs, made, strict=True)
        ]
        values.update({t: v for t, v in zip(instruction.outputs, read, strict=True) if t >= 0})
    return found


def attention(batch_first: bool) -> Theory:
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=batch_first)
    graph = trace(
        layer,
        (torch.randn(6, 5, 16),),
        {},
        loss=lambda m, x: m(x if batch_first else x.transpose(0, 1)).mean(),
    )
    return derive(graph)


@pytest.mark.parametrize("batch_first", [True, False])
def test_attention_of_torch(batch_first: bool) -> None:
    theory = attention(batch_first)
    assert copied_views(theory) == copies(theory)
    assert copied_views(theory)


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "vit", "t5", "bert-moe", "lstm", "nn-transformer"])
def test_models_of_the_zoo(name: str) -> None:
    theory = traced(name).theory
    assert copied_views(theory) == copies(theory)


@pytest.mark.parametrize("name", ["bert", "gpt2", "vit", "lstm", "nn-transformer"])
def test_what_collectives_deliver_is_contiguous(name: str) -> None:
    """Of some tensors that are not contiguous on a single device: reshapes behind them copy, or no longer do."""
    theory, draw = traced(name).theory, random.Random(name)
    strided = strided_tensors(theory)
    different = 0
    for size in (1, 1, 1, 1, 3, len(strided) // 2, len(strided)):
        delivered = set(draw.sample(strided, min(size, len(strided))))
        assert copied_views(theory, delivered) == copies(theory, delivered)
        different += copied_views(theory, delivered) != copied_views(theory)
    assert different


def test_what_is_contiguous_anyway_changes_nothing() -> None:
    theory = traced("bert").theory
    others = {t.id for t in theory.graph.tensors} - set(strided_tensors(theory))
    assert copied_views(theory, others) is copied_views(theory)


def strided_tensors(theory: Theory) -> list[int]:
    """The tensors that are not contiguous on a single device."""
    copied_views(theory)
    return sorted(vars(theory)["_laid"].strided)
