"""BERT, masked language modelling: Hugging Face's BertForMaskedLM as it is.

hetspmd compile examples/bert.py --cluster examples/clusters/four-unlike.yaml
hetspmd verify examples/bert.py:small --cluster examples/clusters/four-unlike.yaml
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import BertConfig, BertForMaskedLM

Example = dict[str, Tensor]


def build(batch: int = 64, tokens: int = 128) -> tuple[nn.Module, Example]:
    """BERT base on the meta device: shapes without weights, which is all that compiling needs."""
    with torch.device("meta"):
        model = BertForMaskedLM(BertConfig())
        ids = torch.zeros(batch, tokens, dtype=torch.int64)
    return model, {"input_ids": ids, "attention_mask": ids, "labels": ids}


def small(batch: int = 6, tokens: int = 16) -> tuple[nn.Module, Example]:
    """Two layers with seeded weights and data, no dropout, uneven padding and 15 % of the tokens masked."""
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=101, hidden_size=48, num_hidden_layers=2, num_attention_heads=6, intermediate_size=96,
        max_position_embeddings=32, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    model = BertForMaskedLM(config)
    ids = torch.randint(4, 101, (batch, tokens))
    kept = torch.arange(tokens) < torch.randint(tokens // 2, tokens + 1, (batch, 1))
    chosen = kept & (torch.rand(batch, tokens) < 0.15)
    chosen[0, 0] = True
    return model, {
        "input_ids": ids.masked_fill(chosen, 3),
        "attention_mask": kept.long(),
        "labels": ids.masked_fill(~chosen, -100),
    }
