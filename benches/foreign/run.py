"""Where a case runs: on one device, or as one of four unlike ranks.

A loop is written once, for a :class:`Run`: on one device ``run.wrap(model, batch)`` is the model itself, on ranks
it is a :class:`~hetspmd.HAP`. What differs between a script for one device and one for HAP (docs/training.md) is a
method here, and nothing else may differ.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

import hetspmd
from hetspmd.cluster.cluster import Cluster
from hetspmd.dist.communicator import Communicator
from hetspmd.placement import REPLICATE
from hetspmd.program.program import Compute

RANKS = 4
SLOW = Cluster.load(Path(__file__).parents[2] / "examples" / "clusters" / "four-slow.yaml")
"""Speeds 4 : 2 : 1 : 1, slow beside the network, so that the program divides nearly everything."""


@dataclass
class Run:
    """One device (``communicator`` is None) or one of the ranks.

    On one device every weight is multiplied by ``1 + disturbance * N(0, 1)``: what a loop makes of that is what
    rounding may make of it. Random numbers of a loop come from ``generator``, which all ranks seed alike.
    """

    communicator: Communicator | None = None
    disturbance: float = 0.0
    generator: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(5))
    wrapped: list[hetspmd.HAP] = field(default_factory=list)

    @property
    def alone(self) -> bool:
        return self.communicator is None

    def wrap(self, model: nn.Module, example: Any, **options: Any) -> Any:
        """The model on one device (called with ``loss`` where that is a function), HAP on ranks."""
        if self.communicator is not None:
            hap = hetspmd.HAP(model, SLOW, example=example, process_group=self.communicator, **options)
            self.wrapped.append(hap)
            return hap
        if self.disturbance:
            disturb(model, self.disturbance)
        loss = options.get("loss")
        return WithLoss(model, loss) if callable(loss) else model

    def state(self, wrapped: Any) -> dict[str, torch.Tensor]:
        """The whole state, copied."""
        if isinstance(wrapped, WithLoss):
            wrapped = wrapped.model
        state = wrapped.full_state_dict() if isinstance(wrapped, hetspmd.HAP) else wrapped.state_dict()
        return {name: v.detach().clone() for name, v in state.items() if isinstance(v, torch.Tensor)}

    def load(self, wrapped: Any, state: Mapping[str, torch.Tensor]) -> None:
        """Take over a whole state."""
        if isinstance(wrapped, hetspmd.HAP):
            wrapped.load_full_state_dict(state)
        else:
            (wrapped.model if isinstance(wrapped, WithLoss) else wrapped).load_state_dict(state)

    def whole(self, wrapped: Any) -> nn.Module:
        """A copy of the model of one device with the weights of now, for methods other than ``forward``."""
        if isinstance(wrapped, hetspmd.HAP):
            return wrapped.full_module()
        return copy.deepcopy(wrapped.model if isinstance(wrapped, WithLoss) else wrapped)

    def optimizer_state(self, wrapped: Any, optimizer: torch.optim.Optimizer) -> Any:
        """The optimizer's whole state."""
        if isinstance(wrapped, hetspmd.HAP):
            return hetspmd.full_optimizer_state_dict(wrapped, optimizer)
        return copy.deepcopy(optimizer.state_dict())

    def load_optimizer(self, wrapped: Any, optimizer: torch.optim.Optimizer, state: Any) -> None:
        """Take over an optimizer's whole state."""
        if isinstance(wrapped, hetspmd.HAP):
            hetspmd.load_full_optimizer_state_dict(wrapped, optimizer, state)
        else:
            optimizer.load_state_dict(state)

    def randn(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator)

    def integers(self, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(0, high, shape, generator=self.generator)

    def divided(self) -> float | None:
        """The part of the first program's instructions that no device computes whole; None without a program."""
        if not self.wrapped or self.wrapped[0].plan is None:
            return None
        plan = self.wrapped[0].plan
        work = [
            s for s in plan.program.steps
            if isinstance(s, Compute) and not plan.graph.instructions[s.instruction].is_source
        ]  # fmt: skip
        return sum(any(f != REPLICATE for f in (*s.row.pre, *s.row.post)) for s in work) / max(len(work), 1)


class WithLoss(nn.Module):
    """On one device: a model that is called as ``HAP(..., loss=loss)`` is."""

    def __init__(self, model: nn.Module, loss: Any) -> None:
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.loss(self.model, *args, **kwargs)

    def parameters(self, recurse: bool = True) -> Any:
        return self.model.parameters(recurse)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        return self.model.named_parameters(*args, **kwargs)

    def buffers(self, recurse: bool = True) -> Any:
        return self.model.buffers(recurse)


def disturb(model: nn.Module, size: float) -> None:
    """Multiply each weight by ``1 + size * N(0, 1)``, from a generator of its own."""
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for p in model.parameters():
            if p.is_floating_point():
                noise = torch.randn(p.shape, generator=generator, dtype=torch.float32)
                p.mul_(1 + (size * noise).to(p.dtype))


@contextmanager
def in_float64() -> Iterator[None]:
    """New models compute in float64, so that a difference is no rounding."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def called(model: Any, batch: Any) -> Any:
    """What a model makes of a batch: a dict of keyword arguments or a tuple of positional ones."""
    return model(**batch) if isinstance(batch, Mapping) else model(*batch)


def loss_of(output: Any, at: str | int | None = None) -> torch.Tensor:
    """The loss as HAP finds it."""
    if at is not None:
        return output[at]
    if isinstance(output, torch.Tensor):
        return output
    if isinstance(output, Mapping) and "loss" in output:
        return output["loss"]
    found = getattr(output, "loss", None)
    return output[0] if found is None else found


def trainable(model: Any) -> Iterable[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]
