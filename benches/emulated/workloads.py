"""Models whose step takes about a second on a core or two, with a batch and what its rows weigh in the loss.

Each function returns a :class:`Workload` with seeded weights and data. The model takes the batch as keyword
arguments and returns the mean loss of its rows (images) or labelled tokens; every row has a labelled token, so that
any share of the rows has a loss. No dropout and no batch norm: a step has one right answer however it is divided.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class Workload:
    """``weights``: what each row of the batch adds to the loss's denominator, shape (rows,). ``blocks``: names of
    submodules that FSDP gathers one at a time."""

    model: nn.Module
    batch: Mapping[str, Tensor]
    weights: Tensor
    blocks: tuple[str, ...]

    @property
    def rows(self) -> int:
        return len(self.weights)


class Classifier(nn.Module):
    """Mean cross entropy of a network's logits."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.network(images), labels)


class MaskedLanguageModel(nn.Module):
    """The loss of a Hugging Face model, without its other outputs."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> Tensor:
        output = self.network(input_ids=input_ids, attention_mask=attention_mask, labels=labels)
        loss: Tensor = output.loss
        return loss


def mlp(batch: int = 24, width: int = 64, classes: int = 10) -> Workload:
    """Three linear layers, for tests."""
    torch.manual_seed(0)
    network = nn.Sequential(
        nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, classes)
    )
    images, labels = torch.randn(batch, width), torch.randint(0, classes, (batch,))
    return Workload(
        Classifier(network),
        {"images": images, "labels": labels},
        torch.ones(batch),
        ("network.0", "network.2"),
    )


def vgg(batch: int = 32, width: int = 64, hidden: int = 1024, size: int = 32) -> Workload:
    """VGG in small: three stages of two convolutions, then a head that holds nearly all parameters."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    channels = 3
    for out in (width, 2 * width, 4 * width):
        for _ in range(2):
            layers += [nn.Conv2d(channels, out, 3, padding=1), nn.ReLU()]
            channels = out
        layers.append(nn.MaxPool2d(2))
    features = channels * (size // 8) ** 2
    head = [
        nn.Flatten(), nn.Linear(features, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(),
        nn.Linear(hidden, 10),
    ]  # fmt: skip
    network = nn.Sequential(*layers, *head)
    images, labels = torch.randn(batch, 3, size, size), torch.randint(0, 10, (batch,))
    first = len(layers) + 1
    blocks = (f"network.{first}", f"network.{first + 2}")
    return Workload(Classifier(network), {"images": images, "labels": labels}, torch.ones(batch), blocks)


def bert(
    batch: int = 24, tokens: int = 64, layers: int = 2, hidden: int = 256, vocabulary: int = 2000
) -> Workload:
    """BertForMaskedLM as it is, small: uneven padding, 15 % of the tokens labelled."""
    from transformers import BertConfig, BertForMaskedLM

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=vocabulary, hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=hidden // 32,
        intermediate_size=4 * hidden, max_position_embeddings=tokens, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    model = MaskedLanguageModel(BertForMaskedLM(config))
    ids = torch.randint(4, vocabulary, (batch, tokens))
    kept = torch.arange(tokens) < torch.randint(tokens // 2, tokens + 1, (batch, 1))
    chosen = kept & (torch.rand(batch, tokens) < 0.15)
    chosen[:, 0] = True
    batch_of = {
        "input_ids": ids.masked_fill(chosen, 3),
        "attention_mask": kept.long(),
        "labels": ids.masked_fill(~chosen, -100),
    }
    blocks = tuple(f"network.bert.encoder.layer.{i}" for i in range(layers))
    return Workload(model, batch_of, chosen.sum(1).float(), blocks)
