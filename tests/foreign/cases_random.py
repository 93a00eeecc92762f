"""Reports about randomness on the host: coins, permutations and seeds that shape the graph when it is traced."""

from __future__ import annotations

import random

import numpy as np
import torch
from cases_forward import Body, Made, only_x
from harness import case
from torch import nn


@case(
    "pytorch#95425: layers that are left out by a coin of Python's", refused=r"random.*cases_random\.py:\d+"
)
def layers_left_out_by_a_coin() -> Made:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(12, 12) for _ in range(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                if self.training and random.uniform(0, 1) < 0.5:
                    continue
                x = torch.tanh(layer(x))
            return x.pow(2).mean()

    return Model(), only_x()


@case("pytorch#197085: the order of layers is shuffled", refused=r"random.*cases_random\.py:\d+")
def layers_in_shuffled_order() -> Made:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(12, 12) for _ in range(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            order = list(range(4))
            random.shuffle(order)
            for k in order:
                x = torch.tanh(self.layers[k](x))
            return x.pow(2).mean()

    return Model(), only_x()


@case("pytorch#197085: a sample of the features", refused=r"random.*cases_random\.py:\d+")
def a_sample_of_the_features() -> Made:
    class Model(Body):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.logits(x)[:, random.sample(range(7), 3)].pow(2).mean()

    return Model(), only_x()


@case("pytorch#95425: numpy draws the factor of a mixup in forward", refused=r"numpy.*cases_random\.py:\d+")
def numpy_draws_the_factor_of_a_mixup() -> Made:
    class Model(Body):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            factor = float(np.random.beta(0.2, 0.2))
            return self.logits(factor * x + (1 - factor) * x.flip(0)).pow(2).mean()

    return Model(), only_x()


@case("pytorch#172206: a generator that the model holds", refused=r"cases_random\.py:\d+")
def a_generator_that_the_model_holds() -> Made:
    class Model(Body):
        def __init__(self) -> None:
            super().__init__()
            self.coins = random.Random(0)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.logits(x).pow(2).mean() * (1.0 + self.coins.random())

    return Model(), only_x()


@case("pytorch#142853: a seed is set in forward", refused=r"(?i)seed|random.*cases_random\.py:\d+")
def a_seed_is_set_in_forward() -> Made:
    class Model(Body):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            torch.manual_seed(0)
            return torch.dropout(self.logits(x), 0.5, self.training).pow(2).mean()

    return Model(), only_x()
