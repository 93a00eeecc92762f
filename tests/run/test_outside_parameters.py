"""Parameters outside of the model: the loss depends on them, and a plan has no gradient for them."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from outside import Step, both, distance, steps, student
from small_plans import cluster
from torch import nn

from hetspmd.dist.simulated_world import run_ranks
from hetspmd.errors import OptimizerError, OutsideParameterWarning, TraceError
from hetspmd.run.module import HAP
from hetspmd.trace.trace import trace

X = torch.randn(16, 12, generator=torch.Generator().manual_seed(0))


class Head(nn.Module):
    """A head with a class for each row of its weight, as of ArcFace."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(12, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


class WithList(nn.Module):
    """A model with a head in a plain list, which is no module of its own."""

    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.body, self.heads = student(), [head]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.heads[0](self.body(x))


class Weights:
    """A plain object with the learned weights of tasks."""

    def __init__(self) -> None:
        self.log_variances = [nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(()))]

    def loss(self, model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        first, second = self.log_variances
        return model(x).square().mean() * (-first[0]).exp() + first.sum() + second


def of_tasks() -> tuple[Step, Iterable[torch.Tensor]]:
    weights = nn.Parameter(torch.zeros(2))
    return Step(student(), lambda model, x: model(x).square().mean() * (-weights[0]).exp() + weights.sum()), [
        weights
    ]


def of_an_object() -> tuple[Step, Iterable[torch.Tensor]]:
    weights = Weights()
    return Step(student(), weights.loss), weights.log_variances


def of_a_head() -> tuple[Step, Iterable[torch.Tensor]]:
    head = Head()
    return Step(student(), lambda model, x: head(model(x)).square().mean()), list(head.parameters())


def of_a_list() -> tuple[Step, Iterable[torch.Tensor]]:
    head = Head()
    return Step(WithList(head), lambda model, x: model(x).square().mean()), list(head.parameters())


def of_a_leaf() -> tuple[Step, Iterable[torch.Tensor]]:
    prompt = torch.zeros(12, requires_grad=True)
    return Step(student(), lambda model, x: model(x + prompt).square().mean()), [prompt]


def of_a_computed_tensor() -> tuple[Step, Iterable[torch.Tensor]]:
    """It is computed before each step, of a leaf that the step does not read."""
    raw = nn.Parameter(torch.zeros(12))
    held = {"scale": raw.exp()}

    def each(_number: int) -> None:
        held["scale"] = raw.exp()

    return Step(student(), lambda model, x: (model(x) * held["scale"]).square().mean(), each), [raw]


def of_a_default() -> tuple[Step, Iterable[torch.Tensor]]:
    def loss(model: nn.Module, x: torch.Tensor, scale: torch.Tensor = nn.Parameter(torch.ones(12))) -> Any:  # noqa: B008
        return (model(x) * scale).square().mean()

    return Step(student(), loss), list(loss.__defaults__ or ())


def _made(make: Callable[[], Any]) -> list[Any]:
    """The same for each of four ranks."""
    made = []
    for _ in range(4):
        torch.manual_seed(1)
        made.append(make())
    return made


MADE: dict[Callable[[], tuple[Step, Iterable[torch.Tensor]]], tuple[str, str]] = {
    of_tasks: ("weights, a variable around", "model.weights = weights,"),
    of_an_object: (r"loss.__self__.log_variances\[0\]", "loss.__self__.log_variances"),
    of_a_head: ("head.inner.0.weight", "model.head = head,"),
    of_a_list: (r"heads\[0\].inner.0.weight", r"model.heads\[0\].requires_grad_"),
    of_a_leaf: ("prompt", r"model.prompt = nn.Parameter\(prompt\)"),
    of_a_computed_tensor: (r'held\["scale"\], a variable', r'held\["scale"\].detach\(\)'),
    of_a_default: ("a default", "requires_grad_"),
}


@pytest.mark.parametrize("make", MADE)
def test_a_trace_names_what_gets_no_gradient_and_the_line_to_write(make: Any) -> None:
    name, line = MADE[make]
    step, _ = make()
    with pytest.warns(OutsideParameterWarning, match=f"{name}(.|\n)*{line}"):
        trace(step.model, (X,), {}, loss=step.loss)


@pytest.mark.filterwarnings("ignore::hetspmd.errors.OutsideParameterWarning")
@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("make", MADE)
def test_an_optimizer_that_holds_it_is_refused_at_its_first_step(make: Any, alone: bool) -> None:
    made = _made(make)

    def rank(communicator: Any) -> str:
        step, more = made[communicator.rank]
        hap = HAP(step.model, cluster(4, 2, 1, 1), example=(X,), loss=step.loss, process_group=communicator)
        optimizer = torch.optim.SGD([*(() if alone else hap.parameters()), *more], lr=0.1)
        hap(X).backward()
        with pytest.raises(OptimizerError, match="is no parameter of its model") as error:
            optimizer.step()
        return str(error.value)

    assert len(set(run_ranks(4, rank))) == 1


@pytest.mark.filterwarnings("ignore::hetspmd.errors.OutsideParameterWarning")
def test_a_net_that_requires_gradients_and_is_not_stepped_works() -> None:
    def make() -> Step:
        step, _ = of_a_head()
        return step

    single, ranks = both(make)
    for found in ranks:
        torch.testing.assert_close(found.losses, single.losses, rtol=1e-5, atol=1e-7)


def frozen() -> Step:
    step, more = of_a_head()
    for tensor in more:
        tensor.requires_grad_(False)
    return step


def without_gradients() -> Step:
    teacher = Head()

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            wanted = teacher.inner[0](x).mean(1, keepdim=True)
        return distance(model, x, lambda x: wanted.expand(-1, 12))

    return Step(student(), loss, more=list(teacher.parameters()))


def detached() -> Step:
    scale = nn.Parameter(torch.ones(12))
    return Step(student(), lambda model, x: (model(x) * scale.detach()).square().mean(), more=[scale])


@pytest.mark.parametrize("make", [frozen, without_gradients, detached])
def test_what_gets_no_gradient_on_one_device_either_is_not_told_of(make: Callable[[], Step]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        single, ranks = both(make)
    for found in ranks:
        torch.testing.assert_close(found.losses, single.losses, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("hold", [lambda t: {t}, weakref.ref, lambda t: {object(): t}.values()])
def test_a_leaf_to_which_no_place_leads_is_refused(hold: Callable[[torch.Tensor], Any]) -> None:
    """No rank could say which optimizer holds it."""
    scale = nn.Parameter(torch.ones(12))
    held = hold(scale)

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return (model(x) * (held() if callable(held) else next(iter(held)))).square().mean()

    with pytest.raises(TraceError, match=r"a tensor \[12\] that requires a gradient.*cannot be followed"):
        trace(student(), (X,), {}, loss=loss)


@pytest.mark.filterwarnings("ignore::hetspmd.errors.OutsideParameterWarning")
def test_what_is_thawed_again_is_refused() -> None:
    """By an optimizer that has stepped while it was frozen, where a plan serves that was made before."""
    made = _made(of_a_head)

    def rank(communicator: Any) -> None:
        step, more = made[communicator.rank]
        hap = HAP(step.model, cluster(4, 2, 1, 1), example=(X,), loss=step.loss, process_group=communicator)
        optimizer = torch.optim.SGD([*hap.parameters(), *more], lr=0.1)
        for tensor in more:
            tensor.requires_grad_(False)
        hap(X).backward()
        optimizer.step()
        for tensor in more:
            tensor.requires_grad_(True)
        hap(X).backward()
        with pytest.raises(OptimizerError, match="is no parameter of its model"):
            optimizer.step()

    run_ranks(4, rank)


def test_what_is_thawed_later_is_told_of() -> None:
    made = _made(of_a_head)

    def rank(communicator: Any) -> None:
        step, more = made[communicator.rank]
        for tensor in more:
            tensor.requires_grad_(False)
        hap = HAP(step.model, cluster(4, 2, 1, 1), example=(X,), loss=step.loss, process_group=communicator)
        optimizer = torch.optim.SGD([*hap.parameters(), *more], lr=0.1)
        steps(hap, hap.parameters(), step, 1)
        optimizer.step()
        for tensor in more:
            tensor.requires_grad_(True)
        hap(X).backward()
        with pytest.raises(OptimizerError, match="is no parameter of its model"):
            optimizer.step()

    with pytest.warns(OutsideParameterWarning):
        run_ranks(4, rank)


def test_a_net_that_another_loop_trains_is_frozen_around_the_step() -> None:
    """A discriminator that every rank holds whole, and trains itself."""

    def make() -> Step:
        critic = nn.Sequential(nn.Linear(12, 1))
        own = torch.optim.SGD(critic.parameters(), lr=0.1)

        def each(_number: int) -> None:
            critic.requires_grad_(True)
            own.zero_grad()
            critic(X).mean().backward()
            own.step()
            critic.requires_grad_(False)

        critic.requires_grad_(False)
        return Step(student(), lambda model, x: -critic(model(x)).mean(), each)

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*plans were compiled")
        single, ranks = both(make)
    for found in ranks:
        torch.testing.assert_close(found.losses, single.losses, rtol=1e-5, atol=1e-7)
