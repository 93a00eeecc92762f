"""Modules outside of the model that a step reads: a teacher in ``loss=``, by whatever it is reached, and whatever
of it changes between steps."""

from __future__ import annotations

import contextvars
import copy
import functools
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from outside import Step, distance, equal, student
from torch import nn
from torch.nn import functional as F

from hetspmd.errors import TraceError
from hetspmd.trace.trace import trace

pytestmark = pytest.mark.filterwarnings("ignore::hetspmd.errors.PlanPerValueWarning")


class Scaled(nn.Module):
    """A layer with a buffer, a number, and another way in training."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(12))
        self.factor = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale * self.factor * (2.0 if self.training else 1.0)


class Listed(nn.Module):
    """Layers in the containers of torch, of which the forward asks for one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(12, 12), nn.Linear(12, 12)])
        self.named = nn.ModuleDict({"a": nn.Linear(12, 12)})
        self.rows = nn.ParameterList([torch.ones(12), torch.ones(12)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.named["a"](x) * self.rows[1] * len(self.layers)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.GRU(12, 12, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x[:, None])[0][:, 0]


def deep() -> nn.Module:
    """A teacher whose tensors lie below its top."""
    body = nn.Sequential(
        nn.Linear(12, 24), nn.GELU(), nn.GroupNorm(4, 24), nn.BatchNorm1d(24), nn.Linear(24, 12)
    )
    return nn.Sequential(body, Scaled(), Listed()).requires_grad_(False).eval()


def moved(teacher: nn.Module) -> Callable[[int], None]:
    """What moves all tensors of a teacher in place, as averages of weights do."""

    def each(step: int) -> None:
        with torch.no_grad():
            for tensor in (*teacher.parameters(), *teacher.buffers()):
                if tensor.is_floating_point() and step:
                    tensor.mul_(0.9).add_(0.2)

    return each


class Holder:
    """A plain object with a teacher, and a method that is the loss."""

    def __init__(self, teacher: nn.Module) -> None:
        self.teacher = teacher

    def loss(self, model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return distance(model, x, self.teacher)


class Net(nn.Module):
    """A model with teachers in a list, which are no modules of its own."""

    def __init__(self, teacher: nn.Module) -> None:
        super().__init__()
        self.body = student()
        self.teachers = [teacher]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x) - self.teachers[0](x)


def by_closure(teacher: nn.Module) -> Step:
    return Step(student(), lambda model, x: distance(model, x, teacher))


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


@pytest.mark.parametrize("reached", [_in_a_set, _by_a_reference, _as_a_key, _under_an_object, _in_a_context])
def test_a_teacher_that_cannot_be_found_again_is_refused(reached: Callable[..., Any]) -> None:
    teacher = deep()
    asked = reached(teacher)
    with pytest.raises(TraceError, match="is no module of the model, in a way that cannot be followed"):
        trace(student(), (torch.randn(16, 12),), {}, loss=lambda model, x: distance(model, x, asked))


def test_a_module_that_the_step_makes_is_its_own() -> None:
    def make() -> Step:
        def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
            layer = nn.Sequential(nn.LayerNorm(12), nn.Softmax(1))
            return layer(model(x)).square().mean()

        return Step(student(), loss)

    equal(make, moves=False)
