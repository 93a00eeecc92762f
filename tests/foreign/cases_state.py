"""Reports about state beside the graph: buffers that are written, attributes and forwards that change."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from cases_forward import Body, Made, only_x
from harness import Run, called, case
from torch import nn
from torch.nn import functional as F


def losses(wrapped: Any, batches: Sequence[Any]) -> list[torch.Tensor]:
    return [called(wrapped, batch).detach().clone() for batch in batches]


@case("pytorch#63916: a buffer is assigned anew in forward")
def a_buffer_is_assigned_anew() -> Made:
    class Model(Body):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(12))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.seen = 0.9 * self.seen + 0.1 * x.mean(0)
            return self.logits(x - self.seen).pow(2).mean()

    return Model(), only_x()


@case("pytorch#111676: `self.buffer += x` in forward")
def a_buffer_is_added_to() -> Made:
    class Model(Body):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("total", torch.zeros(12))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.total += x.sum(0)
            return (self.logits(x) * self.total.tanh().sum()).pow(2).mean()

    return Model(), only_x()


@case("pytorch#114967: an element of a buffer is written")
def an_element_of_a_buffer_is_written() -> Made:
    class Model(Body):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("cache", torch.zeros(2, 3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.cache[0, 1] = x.sum()
            return self.logits(x).pow(2).mean() + self.cache.tanh().sum()

    return Model(), only_x()


@case("pytorch#120424: a buffer is doubled in place in every forward")
def a_buffer_is_doubled() -> Made:
    class Model(Body):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scale", torch.full((7,), 0.5))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.scale.mul_(2)
            return (self.logits(x) * self.scale).pow(2).mean()

    return Model(), only_x()


@case("vector-quantize-pytorch#222, encodec#16: a codebook that follows its encodings")
def a_codebook_follows_its_encodings() -> Made:
    class Model(Body):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("codes", torch.randn(5, 7))
            self.register_buffer("sizes", torch.ones(5))
            self.register_buffer("sums", self.codes.clone())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            z = self.logits(x)
            distance = (z.detach()[:, None] - self.codes).pow(2).sum(-1)
            chosen = F.one_hot(distance.argmin(1), 5).to(z.dtype)
            if self.training:
                self.sizes.data.mul_(0.9).add_(chosen.sum(0), alpha=0.1)
                self.sums.data.mul_(0.9).add_(chosen.t() @ z.detach(), alpha=0.1)
                self.codes.data.copy_(self.sums / (self.sizes + 1e-5)[:, None])
            quantized = chosen @ self.codes
            return F.mse_loss(z, quantized.detach()) + (z + (quantized - z).detach()).pow(2).mean()

    return Model(), only_x()


@case("encodec#16: a codebook that is filled from the first batch", refused=r"cannot be traced|torch\.where")
def a_codebook_filled_from_the_first_batch() -> Made:
    class Model(Body):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("codes", torch.zeros(5, 7))
            self.register_buffer("filled", torch.zeros(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            z = self.logits(x)
            if not self.filled:
                self.codes.data.copy_(z.detach()[:5])
                self.filled.data.fill_(1)
            return (z[:, None] - self.codes).pow(2).sum(-1).amin(1).mean()

    return Model(), only_x()


@case(
    "pytorch#173915: a tensor is read as a number, here the pointer of a queue",
    refused=r"cannot be traced|\.item\(\)",
)
def a_queue_with_a_pointer() -> Made:
    class Model(Body):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("queue", torch.randn(7, 32))
            self.register_buffer("pointer", torch.zeros(1, dtype=torch.long))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            z = F.normalize(self.logits(x), dim=1)
            loss = (z @ self.queue.clone().detach()).logsumexp(1).mean()
            start = int(self.pointer)
            self.queue[:, start : start + 16] = z.detach().t()
            self.pointer[0] = (start + 16) % 32
            return loss

    return Model(), only_x()


def loop_with_factor(run: Run, model: nn.Module, batches: Sequence[Any]) -> dict[str, Any]:
    wrapped = run.wrap(model, batches[0])
    found = []
    for k, batch in enumerate(batches):
        model.factor = 1.0 + k
        found.append(called(wrapped, batch).detach().clone())
    return {"losses": found}


@case("pytorch#98928: an attribute that forward reads changes between calls", loop=loop_with_factor)
def an_attribute_changes_between_calls() -> Made:
    class Model(Body):
        factor = 1.0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.logits(x).pow(2).mean() * self.factor

    return Model(), only_x()


def loop_without_adapter(run: Run, model: nn.Module, batches: Sequence[Any]) -> dict[str, Any]:
    wrapped = run.wrap(model, batches[0])
    found = losses(wrapped, batches)
    model.disabled = True
    found += losses(wrapped, batches)
    model.disabled = False
    return {"losses": found + losses(wrapped, batches)}


@case("pytorch#124717: an adapter that a flag turns off", loop=loop_without_adapter)
def an_adapter_turned_off() -> Made:
    class Model(Body):
        def __init__(self) -> None:
            super().__init__()
            self.disabled = False
            self.down, self.up = nn.Linear(12, 2, bias=False), nn.Linear(2, 7, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.logits(x)
            return (y if self.disabled else y + self.up(self.down(x))).pow(2).mean()

    return Model(), only_x(2)


def loop_with_another_forward(run: Run, model: nn.Module, batches: Sequence[Any]) -> dict[str, Any]:
    wrapped = run.wrap(model, batches[0])
    found = losses(wrapped, batches)
    plain = model.first.forward
    model.first.forward = lambda x: 2.0 * plain(x)
    return {"losses": found + losses(wrapped, batches)}


@case(
    "pytorch#113333: a submodule's forward is replaced while the program runs", loop=loop_with_another_forward
)
def a_forward_is_replaced() -> Made:
    class Model(Body):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.logits(x).pow(2).mean()

    return Model(), only_x(2)


@case("pytorch#115774: a plain tensor attribute is written in forward", refused=r"register_buffer|memory")
def a_plain_tensor_is_written() -> Made:
    class Model(Body):
        def __init__(self) -> None:
            super().__init__()
            self.memory = torch.zeros(12)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.memory = 0.5 * self.memory + x.detach().mean(0)
            return self.logits(x - self.memory).pow(2).mean()

    return Model(), only_x()


@case("pytorch#112429: an input is changed through a view", refused=r"in place")
def an_input_is_changed_through_a_view() -> Made:
    class Model(Body):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x.view(-1).add_(2.0)
            return self.logits(x).pow(2).mean()

    return Model(), only_x()


@case("pytorch#114142: an input is scaled in place", refused=r"in place")
def an_input_is_scaled_in_place() -> Made:
    class Model(Body):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x.mul_(2)
            return self.logits(x).pow(2).mean()

    return Model(), only_x()


@case("fairscale#1061: a teacher inside the model follows the student in forward")
def a_teacher_follows_the_student() -> Made:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.student, self.teacher = nn.Linear(12, 7), nn.Linear(12, 7)
            self.teacher.load_state_dict(self.student.state_dict())
            self.teacher.requires_grad_(False)

        @torch.no_grad()
        def follow(self) -> None:
            for s, t in zip(self.student.parameters(), self.teacher.parameters(), strict=True):
                t.data = t.data * 0.9 + s.data * 0.1

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.training:
                self.follow()
            return F.mse_loss(self.student(x), self.teacher(x.flip(1)))

    return Model(), only_x()


@case("pytorch#17990: an EMA of the means under no_grad, written with copy_")
def means_that_are_copied() -> Made:
    class Model(Body):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("means", torch.zeros(1, 12))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                self.means.copy_(self.means * 0.9 + x.mean(0, keepdim=True) * 0.1)
            return self.logits(x - self.means).pow(2).mean()

    return Model(), only_x()


@case("pytorch#61470: weight_norm as a parametrization")
def weight_norm_as_a_parametrization() -> Made:
    class Model(Body):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.utils.parametrizations.weight_norm(self.first)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.logits(x).pow(2).mean()

    return Model(), only_x()


@case("pytorch#61470: spectral_norm instead of weight_norm; its power iterations are buffers")
def spectral_norm_in_training() -> Made:
    class Model(Body):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.utils.parametrizations.spectral_norm(self.first)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.logits(x).pow(2).mean()

    return Model(), only_x()


@case("gpleiss/efficient_densenet#73: running statistics are those of the whole batch, once a step")
def batch_norm_of_the_whole_batch() -> Made:
    class Model(Body):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(24)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(torch.relu(self.norm(self.first(x)))).pow(2).mean()

    return Model(), only_x()


def loop_with_a_patched_class(run: Run, model: nn.Module, batches: Sequence[Any]) -> dict[str, Any]:
    wrapped = run.wrap(model, batches[0])
    found = losses(wrapped, batches)
    kind: Any = type(model)
    plain = kind.forward
    kind.forward = lambda self, x: 3.0 * plain(self, x)
    return {"losses": found + losses(wrapped, batches)}


@case("pytorch#113333: a class's forward is replaced", loop=loop_with_a_patched_class)
def a_class_s_forward_is_replaced() -> Made:
    class Model(Body):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.logits(x).pow(2).mean()

    return Model(), only_x(2)
