"""Reports about what a forward computes: means over unlike parts, pairs over the batch, tied and frozen weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from harness import case
from torch import nn
from torch.nn import functional as F

Made = tuple[nn.Module, Sequence[Any]]


class Body(nn.Module):
    """Two linear layers from 12 to 7 features, and whatever a case adds."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(12, 24)
        self.second = nn.Linear(24, 7)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.first(x)))


def rows(count: int = 3, batch: int = 16) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(torch.randn(batch, 12), torch.randint(0, 7, (batch,))) for _ in range(count)]


def only_x(count: int = 3, batch: int = 16) -> list[tuple[torch.Tensor]]:
    return [(torch.randn(batch, 12),) for _ in range(count)]


@case("transformers#34242: the loss is a mean over tokens, and ranks hold unlike numbers of them")
def tokens_ignored_unevenly() -> Made:
    class Model(Body):
        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            return F.cross_entropy(self.logits(x), labels, ignore_index=0)

    batches = rows()
    for _, labels in batches:
        labels[:9] = 0
    return Model(), batches


@case("pytorch#37079: an LSTM's parameters after training differ from the single device's")
def lstm_over_time() -> Made:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(6, 8, num_layers=2, batch_first=True)
            self.head = nn.Linear(8, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden, _ = self.lstm(x)
            return self.head(hidden).pow(2).sum()

    return Model(), [(torch.randn(8, 5, 6),) for _ in range(2)]


@case("pytorch#163241: a mean over a dimension that divides unevenly")
def mean_over_an_uneven_dimension() -> Made:
    class Model(Body):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.logits(x).mean(0).pow(2).sum()

    return Model(), only_x(batch=13)


@case("pytorch#150336: linear layers of five features")
def five_features() -> Made:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(5, 5), nn.Linear(5, 5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.down(torch.tanh(self.up(x))).pow(2).mean()

    return Model(), [(torch.randn(7, 5),) for _ in range(3)]


@case("pytorch#110948: a frozen layer that is used twice in one forward")
def frozen_layers_used_twice() -> Made:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            block = [nn.Linear(12, 12), nn.ReLU()] * 3
            self.head = nn.Linear(12, 12)
            self.body = nn.Sequential(*block)
            self.body.requires_grad_(False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.body(self.head(x)).pow(2).mean()

    return Model(), only_x()


@case("openai/CLIP#25, accelerate#1154: every pair of the batch counts, not the pairs of each rank")
def pairs_over_the_whole_batch() -> Made:
    class Model(Body):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(1.0))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            a = F.normalize(self.logits(x), dim=-1)
            b = F.normalize(self.logits(x.flip(1)), dim=-1)
            pairs = self.scale.exp() * a @ b.t()
            target = torch.arange(x.shape[0])
            return (F.cross_entropy(pairs, target) + F.cross_entropy(pairs.t(), target)) / 2

    return Model(), only_x()


@case("pytorch-metric-learning#302: triplets mined over the whole batch")
def hardest_triplets() -> Made:
    class Model(Body):
        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            distance = torch.cdist(
                self.logits(x), self.logits(x), compute_mode="donot_use_mm_for_euclid_dist"
            )
            same = labels[:, None] == labels[None]
            farthest = (distance * same).amax(1)
            nearest = distance.masked_fill(same, 1e9).amin(1)
            return F.relu(farthest - nearest + 0.3).mean()

    return Model(), rows()


@case("sentence-transformers#3415: the cosine similarity of two encodings, one row a device")
def cosine_of_two_encodings() -> Made:
    class Model(Body):
        def forward(self, a: torch.Tensor, b: torch.Tensor, score: torch.Tensor) -> torch.Tensor:
            return F.mse_loss(F.cosine_similarity(self.logits(a), self.logits(b)), score)

    return Model(), [(torch.randn(4, 12), torch.randn(4, 12), torch.rand(4)) for _ in range(3)]


@case("NVIDIA-NeMo/RL#227: an embedding that is tied to the head")
def embedding_tied_to_the_head() -> Made:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens = nn.Embedding(19, 10)
            self.mix = nn.Linear(10, 10)
            self.head = nn.Linear(10, 19, bias=False)
            self.head.weight = self.tokens.weight

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            logits = self.head(torch.tanh(self.mix(self.tokens(ids[:, :-1]))))
            return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())

    return Model(), [(torch.randint(0, 19, (8, 6)),) for _ in range(3)]


@case("facebookresearch/lingua#84: one weight for every layer")
def one_weight_for_every_layer() -> Made:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(12, 12) for _ in range(3))
            for layer in self.layers[1:]:
                layer.weight = self.layers[0].weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = torch.tanh(layer(x))
            return x.pow(2).mean()

    return Model(), only_x()


@case("pytorch#169320: layers of unlike width beside each other")
def heads_of_unlike_width() -> Made:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.heads = nn.ModuleList(nn.Linear(12, width) for width in (1, 3, 8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cat([head(x) for head in self.heads], -1).softmax(-1).pow(2).sum()

    return Model(), only_x()


@case("pytorch#35118: a last batch that is smaller than the others")
def a_smaller_last_batch() -> Made:
    class Model(Body):
        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            return F.cross_entropy(self.logits(x), labels)

    return Model(), [*rows(2), *rows(1, batch=5)]


@case("Lightning#20404: a batch of fewer rows than devices")
def fewer_rows_than_devices() -> Made:
    class Model(Body):
        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            return F.cross_entropy(self.logits(x), labels)

    return Model(), [*rows(2), *rows(1, batch=2), *rows(1, batch=1)]


@case("pytorch#67253: class weights in the loss's denominator")
def class_weights_in_the_denominator() -> Made:
    class Model(Body):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("balance", torch.rand(7) + 0.1)

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            return F.cross_entropy(self.logits(x), labels, weight=self.balance, label_smoothing=0.1)

    return Model(), rows()


@case("pytorch#31553: a sum over valid positions, divided by how many there are")
def masked_mean() -> Made:
    class Model(Body):
        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            per_row = self.logits(x).pow(2).mean(-1)
            return (per_row * mask).sum() / mask.sum().clamp(min=1)

    return Model(), [(torch.randn(16, 12), (torch.arange(16) > 10).to(torch.float64)) for _ in range(3)]


@case("torchtitan#1081: rows that are packed to one long row, with positions that begin anew")
def packed_rows() -> Made:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens, self.places = nn.Embedding(23, 12), nn.Embedding(8, 12)
            self.qkv, self.head = nn.Linear(12, 36), nn.Linear(12, 23)

        def forward(self, ids: torch.Tensor, document: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
            x = self.tokens(ids) + self.places(place)
            q, k, v = self.qkv(x).chunk(3, -1)
            same = document[:, :, None] == document[:, None, :]
            causal = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).tril()
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=same & causal)
            return F.cross_entropy(self.head(y)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())

    document = torch.tensor([[0] * 5 + [1] * 3 + [2] * 4]).repeat(4, 1)
    place = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 0, 1, 2, 3]]).repeat(4, 1)
    return Model(), [(torch.randint(0, 23, (4, 12)), document, place) for _ in range(2)]


@case(
    "pytorch#19024: a gradient penalty needs the gradient's gradient within forward",
    refused=r"(?i)autograd\.grad|gradient",
)
def gradient_penalty_within_forward() -> Made:
    class Model(Body):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x.detach().requires_grad_()
            score = self.logits(x).sum()
            (slope,) = torch.autograd.grad(score, x, create_graph=True)
            return (slope.norm(2, dim=1) - 1).pow(2).mean() + score

    return Model(), only_x()


@case("pytorch#57081: an output that takes no part in the loss")
def an_output_without_part_in_the_loss() -> Made:
    class Model(Body):
        def __init__(self) -> None:
            super().__init__()
            self.side = nn.Linear(12, 3)

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": self.logits(x).pow(2).mean(), "side": self.side(x)}

    return Model(), only_x()


@case("pytorch#40566: a parameter that no batch uses")
def a_parameter_that_no_batch_uses() -> Made:
    class Model(Body):
        def __init__(self) -> None:
            super().__init__()
            self.unused = nn.Linear(12, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.logits(x).pow(2).mean()

    return Model(), only_x()


@case("pytorch#61470: a weight that is a function of another one")
def a_weight_made_by_another_network() -> Made:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.maker = nn.Linear(4, 12 * 5)
            self.code = nn.Parameter(torch.randn(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            weight = self.maker(self.code).view(5, 12)
            return F.linear(x, weight).pow(2).mean()

    return Model(), only_x()
