"""Reports about linear algebra, whose ops check what they are given, beside normalization."""

from __future__ import annotations

import torch
from cases_forward import Body, Made, only_x
from harness import case
from torch import nn


class Mixed(Body):
    """A body that normalizes and mixes its features with what ``mix`` makes of a positive definite matrix."""

    def __init__(self, norm: nn.Module | None = None) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(24) if norm is None else norm
        self.matrix = nn.Parameter(torch.eye(24) + 0.01 * torch.randn(24, 24))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a = self.matrix @ self.matrix.T + torch.eye(24)
        return self.second(self.mix(self.norm(self.first(x)), a)).pow(2).mean()

    def mix(self, h: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


@case("forum: RMSNorm and torch.linalg.solve in one forward")
def a_solution_beside_rms_norm() -> Made:
    class Model(Mixed):
        def mix(self, h: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
            return torch.linalg.solve(a, h.T).T

    return Model(), only_x()


@case("forum: an inverse, twice, beside batch norm")
def inverses_beside_batch_norm() -> Made:
    class Model(Mixed):
        def mix(self, h: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
            return h @ torch.linalg.inv(a) @ torch.linalg.inv_ex(a, check_errors=True)[0]

    return Model(nn.BatchNorm1d(24)), only_x()


@case("forum: a Cholesky factor beside RMSNorm")
def a_cholesky_factor_beside_rms_norm() -> Made:
    class Model(Mixed):
        def mix(self, h: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
            return h @ torch.linalg.cholesky(a) * torch.linalg.eigh(a)[0]

    return Model(), only_x()


@case("forum: a gradient penalty through torch.linalg.solve beside RMSNorm")
def a_penalty_through_a_solution() -> Made:
    class Model(Mixed):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x.clone().requires_grad_()
            with torch.enable_grad():
                loss = super().forward(x)
                (slope,) = torch.autograd.grad(loss, x, create_graph=True)
            return loss + slope.pow(2).sum()

        def mix(self, h: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
            return torch.linalg.solve(a, h.T).T

    return Model(), only_x()
