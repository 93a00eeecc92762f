"""Whatever changes, between steps, of a module outside of the model that a step reads."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from outside import Holder, Step, by_closure, deep, distance, equal, moved, student
from torch import nn

pytestmark = pytest.mark.filterwarnings("ignore::hetspmd.errors.PlanPerValueWarning")


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.GRU(12, 12, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x[:, None])[0][:, 0]


def _body(teacher: Any) -> Any:
    return teacher[0]


def _hook(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
    return output * 3.0


def _pre_hook(module: nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return (args[0] * 3.0,)


def _load(teacher: Any) -> None:
    teacher.load_state_dict({name: 2 * tensor for name, tensor in teacher.state_dict().items()})


def _one_parameter(teacher: Any) -> None:
    _body(teacher)[4].weight = nn.Parameter(torch.ones(12, 24), requires_grad=False)


def _no_bias(teacher: Any) -> None:
    _body(teacher)[4].bias = None


def _data(teacher: Any) -> None:
    _body(teacher)[4].bias.data[3] = 5.0


def _buffer(teacher: Any) -> None:
    _body(teacher)[3].running_mean[1] = 3.0


def _other_buffer(teacher: Any) -> None:
    teacher[1].scale = torch.full((12,), 2.0)


def _eps(teacher: Any) -> None:
    _body(teacher)[2].eps = 1.0


def _number(teacher: Any) -> None:
    teacher[1].factor = 2.5


def _replaced(teacher: Any) -> None:
    _body(teacher)[1] = nn.ReLU()


def _longer(teacher: Any) -> None:
    teacher.append(nn.Tanh())


def _longer_list(teacher: Any) -> None:
    teacher[2].layers.append(nn.Identity())


def _shorter(teacher: Any) -> None:
    del teacher[2]


def _hooked(teacher: Any) -> None:
    _body(teacher)[4].register_forward_hook(_hook)


def _pre_hooked(teacher: Any) -> None:
    _body(teacher).register_forward_pre_hook(_pre_hook)


def _training(teacher: Any) -> None:
    teacher[1].train()


def _forward(teacher: Any) -> None:
    teacher[1].forward = torch.sin


def _parametrized(teacher: Any) -> None:
    nn.utils.parametrize.register_parametrization(_body(teacher)[4], "weight", Scaled24())


def _recurrent(teacher: Any) -> None:
    teacher[3].inner.weight_ih_l0.mul_(2.0)


def _listed(teacher: Any) -> None:
    teacher[2].rows[1].mul_(2.0)


class Scaled24(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight * 2.0


CHANGES = (
    _load,
    _one_parameter,
    _no_bias,
    _data,
    _buffer,
    _other_buffer,
    _eps,
    _number,
    _replaced,
    _longer,
    _longer_list,
    _shorter,
    _hooked,
    _pre_hooked,
    _training,
    _forward,
    _parametrized,
    _recurrent,
    _listed,
)


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_inside_a_teacher_is_followed(change: Callable[[Any], None]) -> None:
    def make() -> Step:
        teacher = nn.Sequential(*deep(), Recurrent()).requires_grad_(False).eval()
        step = by_closure(teacher)

        def each(number: int) -> None:
            if number == 2:
                with torch.no_grad():
                    change(teacher)

        step.each = each
        return step

    equal(make)


def test_a_copy_in_the_place_of_a_teacher_is_followed() -> None:
    def make() -> Step:
        holder = Holder(deep())

        def each(number: int) -> None:
            if number == 1:
                holder.teacher = copy.deepcopy(holder.teacher)
            if number == 3:
                moved(holder.teacher)(number)

        return Step(student(), holder.loss, each)

    equal(make)


def test_a_copy_in_the_place_of_a_part_is_followed() -> None:
    def make() -> Step:
        teacher = deep()
        step = by_closure(teacher)

        def each(number: int) -> None:
            if number == 1:
                teacher[0] = copy.deepcopy(teacher[0])
            if number == 3:
                moved(teacher[0])(number)

        step.each = each
        return step

    equal(make)


def test_what_a_step_does_not_read_of_a_module_makes_no_plan() -> None:
    def make() -> Step:
        nets = nn.ModuleDict({"read": deep(), "other": deep()})
        step = Step(student(), lambda model, x: distance(model, x, nets["read"]))
        step.each = moved(nets["other"])
        return step

    equal(make, moves=False)
