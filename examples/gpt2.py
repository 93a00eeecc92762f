"""GPT-2, language modelling: Hugging Face's GPT2LMHeadModel as it is (tied embeddings).

hetspmd compile examples/gpt2.py --cluster examples/clusters/four-unlike.yaml
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

Example = dict[str, Tensor]


def build(batch: int = 64, tokens: int = 256) -> tuple[nn.Module, Example]:
    """GPT-2 small (12 layers) on the meta device."""
    with torch.device("meta"):
        model = GPT2LMHeadModel(GPT2Config(use_cache=False))
        ids = torch.zeros(batch, tokens, dtype=torch.int64)
    return model, {"input_ids": ids, "labels": ids}


def small(batch: int = 6, tokens: int = 16) -> tuple[nn.Module, Example]:
    """Two layers with seeded weights and data, no dropout."""
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=101, n_positions=32, n_embd=48, n_layer=2, n_head=6, use_cache=False,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    ids = torch.randint(0, 101, (batch, tokens))
    return GPT2LMHeadModel(config), {"input_ids": ids, "labels": ids}
