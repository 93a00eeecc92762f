"""Llama with grouped queries: Hugging Face's LlamaForCausalLM as it is.

hetspmd compile examples/llama.py --cluster examples/clusters/four-unlike.yaml
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

Example = dict[str, Tensor]


def build(batch: int = 32, tokens: int = 256) -> tuple[nn.Module, Example]:
    """1.1 billion parameters (22 layers, 32 query heads on 4 key-value heads) on the meta device."""
    config = LlamaConfig(
        vocab_size=32000, hidden_size=2048, intermediate_size=5632, num_hidden_layers=22,
        num_attention_heads=32, num_key_value_heads=4, use_cache=False,
    )  # fmt: skip
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
        ids = torch.zeros(batch, tokens, dtype=torch.int64)
    return model, {"input_ids": ids, "labels": ids}


def small(batch: int = 6, tokens: int = 16) -> tuple[nn.Module, Example]:
    """Two layers with seeded weights and data."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=101, hidden_size=48, intermediate_size=80, num_hidden_layers=2, num_attention_heads=6,
        num_key_value_heads=3, max_position_embeddings=32, use_cache=False,
    )  # fmt: skip
    ids = torch.randint(0, 101, (batch, tokens))
    return LlamaForCausalLM(config), {"input_ids": ids, "labels": ids}
