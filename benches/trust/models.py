"""The seven models of the bench: unchanged torchvision and Hugging Face classes (the mixture of experts
is that of ``examples/bert_moe.py``), so small that a step takes about a second on an
emulated cluster of a core or two.

Each function returns ``(model, batch)`` with seeded weights and data. The model takes the batch as keyword
arguments and returns the loss. No dropout: a step has one right answer however it is divided.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from emulated.workloads import Classifier

Built = tuple[nn.Module, dict[str, Tensor]]

VOCABULARY = 2000


class LossOf(nn.Module):
    """The loss of a Hugging Face model, without its other outputs."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, **batch: Tensor) -> Tensor:
        loss: Tensor = self.network(**batch).loss
        return loss


def build(name: str, **options: int) -> Built:
    """A model by name, seeded; ``options`` of its function. Raises KeyError for a name that there is not."""
    torch.manual_seed(0)
    model, batch = MODELS[name](**options)
    return model.train(), batch


def _images(batch: int, size: int, classes: int) -> dict[str, Tensor]:
    return {
        "images": torch.randn(batch, 3, size, size),
        "labels": torch.randint(0, classes, (batch,)),
    }


def _tokens(batch: int, length: int, vocabulary: int) -> dict[str, Tensor]:
    ids = torch.randint(4, vocabulary, (batch, length))
    return {"input_ids": ids, "labels": ids.clone()}


def vgg19(
    batch: int = 16, size: int = 64, channels: int = 256, hidden: int = 512, classes: int = 10
) -> Built:
    """torchvision's VGG19 with half its channels and 512 hidden units: 12 million parameters, 7 in the head
    (``channels=512, hidden=4096, classes=1000``: as it is)."""
    from torchvision.models.vgg import VGG, cfgs, make_layers

    widths = [v if isinstance(v, str) else v * channels // 512 for v in cfgs["E"]]
    features = make_layers(widths, batch_norm=False)
    with torch.device("meta"):  # the head, of which every layer is replaced
        model = VGG(features, num_classes=classes, dropout=0.0)
    model.classifier[0] = nn.Linear(channels * 49, hidden)
    model.classifier[3] = nn.Linear(hidden, hidden)
    model.classifier[6] = nn.Linear(hidden, classes)
    return Classifier(model), _images(batch, size, classes)


def resnet50(batch: int = 48, size: int = 64, width: int = 32, classes: int = 10) -> Built:
    """torchvision's ResNet-50 whose inner convolutions have half their channels (``width=64``: as it is).

    The batch is large for its hundreds of collectives a step: a rank that has used up its quota of CPU time stands
    still for milliseconds, and at each of them the others wait for it.
    """
    from torchvision.models.resnet import Bottleneck, ResNet

    model = ResNet(Bottleneck, [3, 4, 6, 3], num_classes=classes, width_per_group=width)
    return Classifier(model), _images(batch, size, classes)


def vit(
    batch: int = 24, layers: int = 4, width: int = 256, head: int = 32, size: int = 64, patch: int = 8,
    classes: int = 10,
) -> Built:  # fmt: skip
    """ViTForImageClassification: 4 layers of 256, heads of 32, 65 tokens."""
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        num_hidden_layers=layers, hidden_size=width, num_attention_heads=width // head,
        intermediate_size=4 * width, image_size=size, patch_size=patch, num_labels=classes,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    images = _images(batch, size, classes)
    return LossOf(ViTForImageClassification(config)), {
        "pixel_values": images["images"],
        "labels": images["labels"],
    }


def bert(
    batch: int = 24, tokens: int = 64, layers: int = 4, width: int = 256, head: int = 32,
    vocabulary: int = VOCABULARY,
) -> Built:  # fmt: skip
    """BertForMaskedLM: 4 layers of 256, heads of 32, uneven padding, 15 % of the tokens labelled."""
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=vocabulary, hidden_size=width, num_hidden_layers=layers, num_attention_heads=width // head,
        intermediate_size=4 * width, max_position_embeddings=tokens, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    ids = torch.randint(4, vocabulary, (batch, tokens))
    kept = torch.arange(tokens) < torch.randint(tokens // 2, tokens + 1, (batch, 1))
    chosen = kept & (torch.rand(batch, tokens) < 0.15)
    chosen[:, 0] = True
    return LossOf(BertForMaskedLM(config)), {
        "input_ids": ids.masked_fill(chosen, 3),
        "attention_mask": kept.long(),
        "labels": ids.masked_fill(~chosen, -100),
    }


def gpt2(
    batch: int = 16, tokens: int = 64, layers: int = 4, width: int = 256, head: int = 32,
    vocabulary: int = VOCABULARY,
) -> Built:  # fmt: skip
    """GPT2LMHeadModel: 4 layers of 256, heads of 32."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=layers, n_embd=width, n_head=width // head, vocab_size=vocabulary, n_positions=tokens,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0, use_cache=False,
    )  # fmt: skip
    return LossOf(GPT2LMHeadModel(config)), _tokens(batch, tokens, vocabulary)


def llama(
    batch: int = 16, tokens: int = 64, layers: int = 4, width: int = 256, head: int = 32, queries: int = 2,
    hidden: int | None = None, vocabulary: int = VOCABULARY, tied: int = 0,
) -> Built:  # fmt: skip
    """LlamaForCausalLM: 4 layers of 256, 8 query heads on 4 of keys and values.

    ``head``: width of a head; ``queries``: query heads to one of keys and values; ``hidden``: width of the
    feed-forward layers (None: three times ``width``); ``tied``: 1 where the embedding is the head's weight, too.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=width, intermediate_size=hidden or 3 * width, num_hidden_layers=layers,
        num_attention_heads=width // head, num_key_value_heads=width // (head * queries),
        max_position_embeddings=tokens, use_cache=False, bos_token_id=0, eos_token_id=0, pad_token_id=1,
        tie_word_embeddings=bool(tied),
    )  # fmt: skip
    return LossOf(LlamaForCausalLM(config)), _tokens(batch, tokens, vocabulary)


def bert_moe(
    batch: int = 32, tokens: int = 32, layers: int = 4, width: int = 192, heads: int = 6, experts: int = 6,
    vocabulary: int = VOCABULARY,
) -> Built:  # fmt: skip
    """The example's BERT with experts: 4 layers of 192, two of them with 6 experts."""
    examples = str(Path(__file__).parents[2] / "examples")
    if examples not in sys.path:
        sys.path.append(examples)
    from bert_moe import BertMoE

    model = BertMoE(vocabulary, tokens, width=width, layers=layers, heads=heads, experts=experts)
    return model, _tokens(batch, tokens, vocabulary)


MODELS: Mapping[str, Callable[..., Any]] = {
    "VGG19": vgg19, "ResNet-50": resnet50, "ViT": vit, "BERT": bert, "GPT-2": gpt2, "Llama": llama,
    "BERT-MoE": bert_moe,
}  # fmt: skip
