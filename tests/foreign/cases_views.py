"""Reports about views of parameters that a model keeps beside them."""

from __future__ import annotations

import functools

import torch
from cases_forward import Body, Made, only_x
from harness import case


@case(
    "forum: a row of a weight is kept as an attribute", refused=r"reads row of Model.*view of first\.weight"
)
def a_kept_row_of_a_weight() -> Made:
    class Model(Body):
        def __init__(self) -> None:
            super().__init__()
            self.row = self.first.weight.data[0]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.logits(x * self.row).pow(2).mean()

    return Model(), only_x()


@case("forum: rows of a weight in a list", refused=r"view of second\.weight.*from self\.second\.weight")
def kept_rows_in_a_list() -> Made:
    class Model(Body):
        def __init__(self) -> None:
            super().__init__()
            self.rows = [self.second.weight.detach()[0], self.second.bias.detach()]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (self.logits(x) * self.rows[0].sum()).pow(2).mean()

    return Model(), only_x()


@case("forum: a buffer that counts, seen through a view", refused=r"view of counts")
def a_view_of_a_buffer_that_counts() -> Made:
    class Model(Body):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("counts", torch.ones(3, 12))
            self.last = self.counts[-1]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.counts += 1
            return self.logits(x * self.last).pow(2).mean()

    return Model(), only_x()


@case(
    "forum: a cached view of a weight, of a call before the model is wrapped",
    refused=r"view of first\.weight",
)
def a_cached_view_of_a_weight() -> Made:
    class Model(Body):
        @functools.lru_cache  # noqa: B019  # a cached method is what the case is about
        def row(self) -> torch.Tensor:
            return self.first.weight.detach()[0]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.logits(x * self.row()).pow(2).mean()

    model, batches = Model(), only_x()
    model(*batches[0])
    return model, batches


@case("forum: a view of a buffer that stays, and of a frozen weight")
def views_of_what_stays() -> Made:
    class Model(Body):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", torch.randn(5, 12))
            self.row = self.table[2]
            self.second.weight.requires_grad_(False)
            self.frozen = self.second.weight[0]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (self.logits(x * self.row) * self.frozen.sum()).pow(2).mean()

    return Model(), only_x()
