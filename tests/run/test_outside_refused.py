"""Modules outside of the model that a step changes itself, or that no rank could find again: they are refused."""

from __future__ import annotations

import contextvars
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from outside import by_closure, deep, distance, student
from torch import nn

from hetspmd.errors import TraceError
from hetspmd.trace.trace import trace


class Average(nn.Module):
    """Puts another tensor in the place of a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(12))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
        return x - self.mean


class Registers(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if "scale" not in self._buffers:
            self.register_buffer("scale", torch.ones(12))
        return x * self.scale


class Grows(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.add_module(f"layer{len(self._modules)}", nn.Identity())
        return x * len(self._modules)


def _hook(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
    return output * 3.0


class Hooks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.layer.register_forward_hook(_hook)
        return self.layer(x)


@pytest.mark.parametrize(
    ("kind", "what"),
    [(Average, "a buffer"), (Registers, "a buffer"), (Grows, "a submodule"), (Hooks, "a hook")],
)
def test_what_a_step_changes_of_a_teacher_is_refused(kind: type[nn.Module], what: str) -> None:
    teacher = nn.Sequential(kind())
    before = _structure(teacher)
    step = by_closure(teacher)
    with pytest.raises(TraceError, match=f"{what} of teacher.0.*is no module of the model"):
        trace(step.model, (torch.randn(16, 12),), {}, loss=step.loss)
    assert _structure(teacher) == before


def _structure(teacher: nn.Module) -> list[Any]:
    slots = ("_buffers", "_modules", "_forward_hooks")
    return [
        (name, *(list(vars(module)[slot].items()) for slot in slots))
        for name, module in teacher.named_modules()
    ]


def test_statistics_that_a_teacher_moves_are_refused() -> None:
    step = by_closure(nn.Sequential(nn.BatchNorm1d(12)))
    with pytest.raises(TraceError, match="neither a parameter nor a buffer of the model"):
        trace(step.model, (torch.randn(16, 12),), {}, loss=step.loss)


def _in_a_set(teacher: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    held = {teacher}
    return lambda x: next(iter(held))(x)


def _by_a_reference(teacher: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    held = weakref.WeakValueDictionary({"teacher": teacher})
    return lambda x: held["teacher"](x)


def _as_a_key(teacher: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    held = {teacher: 1}
    return lambda x: next(iter(held))(x)


def _under_an_object(teacher: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    key = object()
    held = {key: teacher}
    return lambda x: held[key](x)


def _in_a_context(teacher: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    held = contextvars.ContextVar("held", default=teacher)
    return lambda x: held.get()(x)


class Factor(nn.Module):
    """A module with a number and no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor


def _plain() -> nn.Module:
    """One of torch's own class of modules, of which a trace has some itself."""
    module = nn.Module()
    module.register_buffer("scale", torch.ones(12))
    module.forward = lambda x: x * module.scale  # type: ignore[method-assign]  # it has none of its own
    return module


@pytest.mark.parametrize("make", [deep, Factor, _plain])
@pytest.mark.parametrize("reached", [_in_a_set, _by_a_reference, _as_a_key, _under_an_object, _in_a_context])
def test_a_teacher_that_cannot_be_found_again_is_refused(
    reached: Callable[..., Any], make: Callable[[], nn.Module]
) -> None:
    teacher = make()  # held here
    asked = reached(teacher)
    with pytest.raises(TraceError, match="is no module of the model, in a way that cannot be followed"):
        trace(student(), (torch.randn(16, 12),), {}, loss=lambda model, x: distance(model, x, asked))
