"""Under autocast a step casts no more often than eager PyTorch does: parameters once, gradients as they leave."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch
from small_plans import cluster
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import hetspmd
from hetspmd.dist.simulated_world import run_ranks
from hetspmd.run.module import HAP

transformers = pytest.importorskip("transformers")
Case = tuple[nn.Module, dict[str, torch.Tensor]]


class Casts(TorchDispatchMode):
    """Counts casts between floating-point dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default:
            self.count += args[0].is_floating_point() and result.dtype != args[0].dtype
        return result


def bert() -> Case:
    config = transformers.BertConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, vocab_size=50
    )
    tokens = torch.randint(0, 50, (8, 8))
    model = transformers.BertForSequenceClassification(config)
    return model, {
        "input_ids": tokens,
        "labels": torch.arange(8) % 2,
        "attention_mask": torch.ones_like(tokens),
    }


def gpt2() -> Case:
    config = transformers.GPT2Config(
        n_embd=32, n_layer=2, n_head=4, vocab_size=50, n_positions=16, use_cache=False
    )
    tokens = torch.randint(0, 50, (8, 8))
    return transformers.GPT2LMHeadModel(config), {"input_ids": tokens, "labels": tokens}


def llama() -> Case:
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=50, use_cache=False, tie_word_embeddings=True,
    )  # fmt: skip
    tokens = torch.randint(0, 50, (8, 8))
    batch = {"input_ids": tokens, "labels": tokens, "attention_mask": torch.ones_like(tokens)}
    return transformers.LlamaForCausalLM(config), batch


def resnet() -> Case:
    config = transformers.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[2, 2], num_labels=2)
    batch = {"pixel_values": torch.randn(8, 3, 16, 16), "labels": torch.arange(8) % 2}
    return transformers.ResNetForImageClassification(config), batch


def casts_of(model: nn.Module, batch: dict[str, torch.Tensor]) -> int:
    """Of a second step: the first may do what is done once."""
    for _ in range(2):
        with Casts() as casts:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = model(**batch).loss
            loss.backward()
        model.zero_grad()
    return casts.count


ALONE, UNLIKE = (1,), (4, 2, 1)
CASES = [
    *((make, ALONE, None) for make in (bert, gpt2, llama, resnet)),
    # Not of ResNet: between ranks batch norm is a sum of float32 numbers, into which eager's kernel casts itself.
    *((make, UNLIKE, zero) for make in (bert, gpt2, llama) for zero in (None, 3)),
]


@pytest.mark.parametrize(("make", "speeds", "zero"), CASES)
def test_no_more_casts_than_eager(
    make: Callable[[], Case], speeds: tuple[int, ...], zero: Literal[3] | None
) -> None:
    torch.manual_seed(0)
    model, batch = make()
    eager = casts_of(model, batch)
    assert eager > 20
    on = cluster(*speeds)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        plan = hetspmd.compile(model, batch, on, zero=zero)
    assert len(plan.active) == len(speeds)
    models = [make()[0] for _ in speeds]  # threads would draw from one generator

    def counted(communicator: Any) -> int:
        hap = HAP(models[communicator.rank], on, plan=plan, process_group=communicator)
        return casts_of(hap, batch)

    for of_rank in run_ranks(len(speeds), counted):
        assert 0 < of_rank <= eager
