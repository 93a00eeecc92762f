"""Reports about statistics that a model keeps of its batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from cases_forward import Body, Made, only_x
from harness import Run, case
from torch import nn
from torch.nn import functional as F


class Normed(Body):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.norm(self.first(x)))).pow(2).mean()


@case("forum: batch norm with momentum=None averages over all batches")
def batch_norm_without_momentum() -> Made:
    return Normed(nn.BatchNorm1d(24, momentum=None)), only_x()


@case("forum: batch norm with momentum=None that is called twice, and a count of calls")
def batch_norm_without_momentum_twice() -> Made:
    class Model(Normed):
        calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return self.second(self.norm(torch.relu(self.norm(self.first(x))))).pow(2).mean()

    return Model(nn.BatchNorm1d(24, momentum=None, affine=False)), only_x()


@case("forum: batch norm of images with momentum=None, below a class of its own")
def batch_norm_of_images_without_momentum() -> Made:
    class Norm(nn.BatchNorm2d):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2.0 * super().forward(x)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv2d(3, 5, 3), Norm(5, momentum=None)
            self.head = nn.Linear(5, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.norm(self.conv(x)).relu().mean((2, 3))).pow(2).mean()

    return Model(), [(torch.randn(8, 3, 6, 6),) for _ in range(3)]


def updated(run: Run, model: nn.Module, batches: Sequence[Any]) -> dict[str, Any]:
    wrapped = run.wrap(model, batches[0])
    wrapped(*batches[0]).backward()
    torch.optim.swa_utils.update_bn([x for (x,) in batches], wrapped)
    wrapped.eval()
    with torch.no_grad():
        loss = wrapped(*batches[1]).clone()
    return {"loss": loss, "state": run.state(wrapped)}


@case("forum: torch.optim.swa_utils.update_bn", loop=updated)
def statistics_are_taken_anew() -> Made:
    return Normed(nn.BatchNorm1d(24)), only_x()


@case(
    "forum: a batch norm of one's own, which reads the number of batches", refused=r"1\.0 / self\.num_batches"
)
def a_batch_norm_of_its_own() -> Made:
    class Norm(nn.BatchNorm1d):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            assert self.num_batches_tracked is not None
            self.num_batches_tracked += 1
            factor = 1.0 / float(self.num_batches_tracked)
            return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, True, factor)

    return Normed(Norm(24, momentum=None)), only_x()
