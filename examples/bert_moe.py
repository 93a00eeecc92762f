"""BERT with a mixture of experts in every other layer: GShard's top-2 gating, written as einsums.

Each batch row is a group. A token goes to its two best experts, an expert takes at most ``capacity``
tokens of a group (first come, first served), the rest pass by on the residual connection. The number of
experts is free: six experts on four unlike devices are as good as eight, because shards may be uneven.

    hetspmd compile examples/bert_moe.py --cluster examples/clusters/four-unlike.yaml

Dimensions in tensor names: B batch (groups), T tokens, D model width, H hidden width, E experts, C capacity.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu, one_hot, scaled_dot_product_attention, softmax

Example = dict[str, Tensor]


class Top2Gate(nn.Module):
    """``forward(x_BTD)``: combine weights ``[B, T, E, C]`` and the load-balancing loss (GShard 2.2)."""

    def __init__(self, width: int, experts: int, capacity: int) -> None:
        super().__init__()
        self.experts, self.capacity = experts, capacity
        self.score = nn.Linear(width, experts, bias=False)

    def forward(self, x_BTD: Tensor) -> tuple[Tensor, Tensor]:
        gates_BTE = softmax(self.score(x_BTD), dim=-1)
        first_BTE = one_hot(gates_BTE.argmax(-1), self.experts).to(x_BTD.dtype)
        others_BTE = gates_BTE.masked_fill(first_BTE > 0, 0.0)
        second_BTE = one_hot(others_BTE.argmax(-1), self.experts).to(x_BTD.dtype)
        # E * sum of (share of tokens x mean gate) is least, 1, where the tokens spread evenly.
        balance = self.experts * (first_BTE.mean(1) * gates_BTE.mean(1)).sum(-1).mean()

        place1_BTE = first_BTE.cumsum(1) - first_BTE
        place2_BTE = second_BTE.cumsum(1) - second_BTE + first_BTE.sum(1, keepdim=True)
        weight1_BT, weight2_BT = (gates_BTE * first_BTE).sum(-1), (gates_BTE * second_BTE).sum(-1)
        total_BT = weight1_BT + weight2_BT
        combine_BTEC = self._slots(first_BTE, place1_BTE, weight1_BT / total_BT)
        combine_BTEC = combine_BTEC + self._slots(second_BTE, place2_BTE, weight2_BT / total_BT)
        return combine_BTEC, balance

    def _slots(self, chosen_BTE: Tensor, place_BTE: Tensor, weight_BT: Tensor) -> Tensor:
        """``weight`` at the token's expert and its place there; zero where the expert is full."""
        place_BT = (place_BTE * chosen_BTE).sum(-1).long()
        fits_BT = (place_BT < self.capacity).to(weight_BT.dtype)
        slot_BTC = one_hot(place_BT.clamp(max=self.capacity - 1), self.capacity).to(weight_BT.dtype)
        return torch.einsum("bte,btc,bt->btec", chosen_BTE, slot_BTC, weight_BT * fits_BT)


class Experts(nn.Module):
    """A feed-forward network per expert, reached through the gate's dispatch and combine einsums."""

    def __init__(self, width: int, hidden: int, experts: int, capacity: int) -> None:
        super().__init__()
        self.gate = Top2Gate(width, experts, capacity)
        self.w1_EDH = nn.Parameter(torch.empty(experts, width, hidden))
        self.b1_EH = nn.Parameter(torch.zeros(experts, hidden))
        self.w2_EHD = nn.Parameter(torch.empty(experts, hidden, width))
        self.b2_ED = nn.Parameter(torch.zeros(experts, width))
        for weight in (self.w1_EDH, self.w2_EHD):
            nn.init.normal_(weight, std=0.02)

    def forward(self, x_BTD: Tensor) -> tuple[Tensor, Tensor]:
        combine_BTEC, balance = self.gate(x_BTD)
        dispatch_BTEC = (combine_BTEC > 0).to(x_BTD.dtype)
        x_EBCD = torch.einsum("btec,btd->ebcd", dispatch_BTEC, x_BTD)
        h_EBCH = gelu(torch.einsum("ebcd,edh->ebch", x_EBCD, self.w1_EDH) + self.b1_EH[:, None, None])
        y_EBCD = torch.einsum("ebch,ehd->ebcd", h_EBCH, self.w2_EHD) + self.b2_ED[:, None, None]
        return torch.einsum("btec,ebcd->btd", combine_BTEC, y_EBCD), balance


class Dense(nn.Module):
    """The ordinary feed-forward network; its balance loss is zero."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x_BTD: Tensor) -> tuple[Tensor, Tensor]:
        return self.down(gelu(self.up(x_BTD))), x_BTD.new_zeros(())


class Layer(nn.Module):
    """Self-attention and a feed-forward network, each with a residual connection and layer norm after."""

    def __init__(self, width: int, heads: int, feed_forward: nn.Module) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.feed_forward = feed_forward

    def forward(self, x_BTD: Tensor) -> tuple[Tensor, Tensor]:
        batch, tokens, width = x_BTD.shape
        qkv = self.qkv(x_BTD).view(batch, tokens, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        attended_BTD = scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, tokens, width)
        x_BTD = self.norm1(x_BTD + self.out(attended_BTD))
        y_BTD, balance = self.feed_forward(x_BTD)
        return self.norm2(x_BTD + y_BTD), balance


class BertMoE(nn.Module):
    """``forward(input_ids, labels)``: mean cross entropy over the labelled tokens plus the balance loss."""

    def __init__(
        self, vocabulary: int, tokens: int, width: int, layers: int, heads: int, experts: int,
        capacity_factor: float = 1.25, balance_weight: float = 0.01,
    ) -> None:  # fmt: skip
        super().__init__()
        capacity = math.ceil(2 * tokens / experts * capacity_factor)
        self.balance_weight = balance_weight
        self.word, self.position = nn.Embedding(vocabulary, width), nn.Embedding(tokens, width)
        self.norm = nn.LayerNorm(width)
        self.layers = nn.ModuleList(
            Layer(
                width,
                heads,
                Experts(width, 4 * width, experts, capacity) if i % 2 else Dense(width, 4 * width),
            )
            for i in range(layers)
        )
        self.head = nn.Linear(width, vocabulary)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)
        x_BTD = self.norm(self.word(input_ids) + self.position(positions))
        balance = x_BTD.new_zeros(())
        for layer in self.layers:
            x_BTD, term = layer(x_BTD)
            balance = balance + term
        loss = cross_entropy(self.head(x_BTD).flatten(0, 1), labels.flatten())
        return loss + self.balance_weight * balance


def build(batch: int = 64, tokens: int = 128, experts: int = 6) -> tuple[nn.Module, Example]:
    """12 layers of BERT base's width, six of them with experts, on the meta device."""
    with torch.device("meta"):
        model = BertMoE(30522, tokens, width=768, layers=12, heads=12, experts=experts)
        ids = torch.zeros(batch, tokens, dtype=torch.int64)
    return model, {"input_ids": ids, "labels": ids}


def small(batch: int = 6, tokens: int = 12, experts: int = 6) -> tuple[nn.Module, Example]:
    """Two layers with seeded weights and data; some experts overflow."""
    torch.manual_seed(0)
    model = BertMoE(53, tokens, width=24, layers=2, heads=3, experts=experts)
    ids = torch.randint(0, 53, (batch, tokens))
    labels = ids.masked_fill(torch.rand(batch, tokens) > 0.3, -100)
    labels[0, 0] = ids[0, 0]
    return model, {"input_ids": ids, "labels": labels}
