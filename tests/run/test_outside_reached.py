"""Modules outside of the model that a step reads, a teacher in ``loss=``, by whatever they are reached."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable

import pytest
import torch
from outside import Holder, Step, by_closure, deep, distance, equal, moved, student
from torch import nn
from torch.nn import functional as F

from workbench import traced

pytestmark = pytest.mark.filterwarnings("ignore::hetspmd.errors.PlanPerValueWarning")


class Net(nn.Module):
    """A model with teachers in a list, which are no modules of its own."""

    def __init__(self, teacher: nn.Module) -> None:
        super().__init__()
        self.body = student()
        self.teachers = [teacher]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x) - self.teachers[0](x)


def by_default(teacher: nn.Module) -> Step:
    def loss(model: nn.Module, x: torch.Tensor, teacher: nn.Module = teacher) -> torch.Tensor:
        return distance(model, x, teacher)

    return Step(student(), loss)


def _given(model: nn.Module, x: torch.Tensor, *, teacher: nn.Module) -> torch.Tensor:
    return distance(model, x, teacher)


def by_partial(teacher: nn.Module) -> Step:
    return Step(student(), functools.partial(_given, teacher=teacher))


def by_method(teacher: nn.Module) -> Step:
    return Step(student(), Holder(teacher).loss)


def by_object(teacher: nn.Module) -> Step:
    holder = Holder(teacher)
    return Step(student(), lambda model, x: distance(model, x, holder.teacher))


def by_bound_forward(teacher: nn.Module) -> Step:
    encode = teacher.forward
    return Step(student(), lambda model, x: distance(model, x, encode))


def by_dict(teacher: nn.Module) -> Step:
    teachers = {"first": [teacher]}
    return Step(student(), lambda model, x: distance(model, x, teachers["first"][0]))


def by_list(teacher: nn.Module) -> Step:
    return Step(Net(teacher), lambda model, x: model(x).square().mean())


def by_cache(teacher: nn.Module) -> Step:
    @functools.cache
    def known() -> nn.Module:
        return teacher

    return Step(student(), lambda model, x: distance(model, x, known()))


def by_module(teacher: nn.Module) -> Step:
    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.teacher = teacher

        def forward(self, model: nn.Module, x: torch.Tensor) -> torch.Tensor:
            return distance(model, x, self.teacher)

    return Step(student(), Loss())


def by_parameters(teacher: nn.Module) -> Step:
    """Its parameters are read, and no module of it is called."""

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return model(x).square().mean() * sum(p.square().sum() for p in teacher.parameters())

    return Step(student(), loss)


def by_slots(teacher: nn.Module) -> Step:
    """Its tensors are read where a module holds them."""

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(model(x), x * teacher._modules["1"]._buffers["scale"])

    return Step(student(), loss)


def by_function(teacher: nn.Module) -> Step:
    state = {"0.weight": torch.ones(12, 12)}
    inner = nn.Sequential(nn.Linear(12, 12), teacher).requires_grad_(False)

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return distance(model, x, lambda x: torch.func.functional_call(inner, state, (x,)))

    return Step(student(), loss)


REACHED = (
    by_closure,
    by_default,
    by_partial,
    by_method,
    by_object,
    by_bound_forward,
    by_dict,
    by_list,
    by_cache,
    by_module,
    by_parameters,
    by_slots,
    by_function,
)


@pytest.mark.parametrize("reached", REACHED)
def test_a_teacher_is_followed(reached: Callable[[nn.Module], Step]) -> None:
    def make() -> Step:
        teacher = deep()
        step = reached(teacher)
        step.each = moved(teacher)
        return step

    equal(make)


TEACHER: nn.Module | None = None


def _global(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    assert TEACHER is not None
    return distance(model, x, TEACHER)


def test_a_teacher_in_a_variable_of_the_module_is_followed() -> None:
    global TEACHER
    torch.manual_seed(2)
    TEACHER = deep()
    scale = TEACHER[1].scale

    def make() -> Step:  # all ranks have the same one: what changes is set
        return Step(student(), _global, lambda step: scale.fill_(1.0 + step))

    try:
        equal(make)
    finally:
        TEACHER = None


def _made(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    layer = nn.Sequential(nn.LayerNorm(12), nn.Softmax(1))
    return layer(model(x)).square().mean()


def _copied(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return copy.deepcopy(ACTIVATION)(model(x)).square().mean()


ACTIVATION = nn.ELU(0.5)


@pytest.mark.parametrize("loss", [_made, _copied])
def test_a_module_that_the_step_makes_is_its_own(loss: Callable[..., torch.Tensor]) -> None:
    equal(lambda: Step(student(), loss), moves=False)


def test_a_module_in_a_variable_of_an_installed_package() -> None:
    """An activation function there is a module without tensors (``transformers.activations.gelu``), which a model
    of that package calls."""
    graph = traced("roberta").theory.graph
    assert any(i.op == "aten.gelu.default" for i in graph.instructions)
