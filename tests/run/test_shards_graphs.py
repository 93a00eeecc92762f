"""Parameters that are in a graph, have a gradient, an optimizer or a second holder when they are wrapped."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from divided import X, divided_plan, net, on_four, train
from torch import nn
from torch.nn.utils import parametrizations, prune

from hetspmd.errors import GradientHookWarning, ShardError, TraceError
from hetspmd.run.module import HAP


def warm(model: nn.Module) -> Any:
    """A first try, whose output is kept."""
    return model(X)


def cached(model: Any) -> Any:
    model.last = model.a(X)
    model.kept = [model.norm(model.last), {"b": model.b[0].weight * 2.0}]


def gradient_graph(model: nn.Module) -> Any:
    """Gradients of gradients."""
    return torch.autograd.grad(model(X), list(model.parameters()), create_graph=True)


def edges(model: nn.Module) -> Any:
    """What accumulates gradients, held by hand as some libraries do."""
    return [p.expand_as(p).grad_fn.next_functions[0][0] for p in model.parameters()]


BEFORE: dict[str, Callable[[nn.Module], Any]] = {
    "first try": warm, "cached": cached, "gradients of gradients": gradient_graph, "accumulators": edges,
}  # fmt: skip


@pytest.mark.parametrize("name", list(BEFORE))
def test_what_was_computed_before_does_not_matter(name: str) -> None:
    single = net()
    kept = BEFORE[name](single)
    want = train(single)
    for losses in on_four(lambda hap, _: train(hap), before=BEFORE[name]):
        assert losses == pytest.approx(want, rel=1e-10)
    del kept


def test_the_graph_of_a_first_try_is_over() -> None:
    """torch says that its parameters have changed, instead of gradients of another shape."""

    def body(hap: HAP, kept: torch.Tensor) -> None:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            kept.backward()
        assert train(hap)

    on_four(body, before=warm)


def spectral(layer: nn.Module) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return nn.utils.spectral_norm(layer)


def normed(layer: nn.Module) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return nn.utils.weight_norm(layer)


def pruned(layer: nn.Module) -> nn.Module:
    torch.manual_seed(3)
    return prune.random_unstructured(layer, "weight", 0.3)


WRAPS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "weight_norm": normed,
    "spectral_norm": spectral,
    "pruned": pruned,
    "parametrized weight_norm": parametrizations.weight_norm,
    "parametrized spectral_norm": parametrizations.spectral_norm,
}


@pytest.mark.parametrize("name", list(WRAPS))
def test_weights_that_are_computed_from_others(name: str) -> None:
    """By hooks, which leave a tensor with a graph on the module, or by a parametrization."""

    def make() -> nn.Module:
        return net(wrap=WRAPS[name])

    single = make()
    warm(single)
    models = iter([make() for _ in range(4)])
    want = train(single)
    state = single.state_dict()

    def body(hap: HAP, _: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
        return train(hap), hap.full_state_dict()

    plan = divided_plan(make(), constraints=stored(make()))
    for losses, found in on_four(body, lambda: next(models), plan, before=warm):
        assert losses == pytest.approx(want, rel=1e-9)
        assert list(found) == list(state)
        for key, value in state.items():
            torch.testing.assert_close(found[key], value, rtol=1e-8, atol=1e-10)


def stored(model: nn.Module) -> dict[str, str]:
    """The first layer's own parameters and others in shards."""
    return {
        name: "shard(0)"
        for name, p in model.named_parameters()
        if p.dim() and p.shape[0] >= 4 and p.dim() > 1
    }


def backward_before(model: nn.Module) -> None:
    model(X).backward()


def test_a_gradient_from_before_is_accumulated() -> None:
    single = net()
    backward_before(single)
    single(X * 2.0).backward()
    want = {name: p.grad for name, p in single.named_parameters()}

    def body(hap: HAP, _: Any) -> dict[str, torch.Tensor]:
        hap(X * 2.0).backward()
        return hap.full_gradients()

    for found in on_four(body, before=backward_before):
        for name, value in want.items():
            torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-11)


def test_gradients_from_before_are_those_of_the_first_rank() -> None:
    """As parameters are; some ranks have none."""
    single = net()
    backward_before(single)
    turn = iter(range(4))

    def some(model: nn.Module) -> None:
        rank = next(turn)
        if rank != 1:
            (model(X) * (rank + 1.0)).backward()

    def body(hap: HAP, _: Any) -> dict[str, torch.Tensor]:
        return hap.full_gradients()

    for found in on_four(body, before=some):
        for name, parameter in single.named_parameters():
            torch.testing.assert_close(found[name], parameter.grad, rtol=1e-9, atol=1e-11)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, eps=1e-4),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "foreach": lambda p: torch.optim.Adam(p, lr=0.01, eps=1e-4, foreach=True),
    "groups": lambda p: torch.optim.RMSprop(
        [{"params": [q]} for q in p], lr=0.01, momentum=0.5, centered=True
    ),
}


@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_an_optimizer_with_state_from_before_goes_on(name: str) -> None:
    def begun(model: nn.Module) -> torch.optim.Optimizer:
        optimizer = OPTIMIZERS[name](model.parameters())
        train(model, 2, optimizer)
        return optimizer

    single = net()
    want = train(single, 3, begun(single))
    for losses in on_four(lambda hap, optimizer: train(hap, 3, optimizer), before=begun):
        assert losses == pytest.approx(want, rel=1e-9)


def test_what_is_set_and_hooked_on_parameters_stays() -> None:
    def before(model: Any) -> list[Any]:
        model.a.weight.no_weight_decay = True
        seen: list[Any] = []
        model.a.weight.register_hook(lambda g: seen.append(("hook", g.shape)))
        model.a.weight.register_post_accumulate_grad_hook(lambda p: seen.append(("after", p.shape)))
        return seen

    def body(hap: HAP, seen: list[Any]) -> tuple[bool, list[Any], torch.Size]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", GradientHookWarning)
            hap(X).backward()
        return hap.module.a.weight.no_weight_decay, seen, hap.module.a.weight.shape

    for flag, seen, shape in on_four(body, before=before):
        assert flag
        assert seen == [("hook", (24, 12)), ("after", shape)], "the hook is given the whole gradient"


class Tied(nn.Module):
    """Outside of the model, with a parameter of it."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.weight = model.a.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight.t()


def linear(model: Any) -> nn.Module:
    made = nn.Linear(12, 24)
    made.weight = model.a.weight
    return made


def parent(model: nn.Module) -> nn.Module:
    return nn.Sequential(model)


@pytest.mark.parametrize("make", [Tied, linear, parent])
def test_a_module_outside_refuses_what_the_model_does(make: Callable[[nn.Module], nn.Module]) -> None:
    want = train(net())

    def body(hap: HAP, outside: nn.Module) -> list[float]:
        with pytest.raises(ShardError, match=r"Write hap\(\.\.\.\)"):
            outside(X)
        with pytest.raises(ShardError, match="full_state_dict"):
            outside.state_dict()
        with pytest.raises(ShardError, match="deepcopy"):
            copy.deepcopy(outside)
        return train(hap)

    for losses in on_four(body, before=make):
        assert losses == pytest.approx(want, rel=1e-10)


def test_memory_that_is_shared_is_not_divided() -> None:
    def make() -> Any:
        model = net()
        model.b[2].bias.data = model.a.bias.data[:12]
        return model

    with pytest.raises(ShardError, match=r"a\.bias and b\.2\.bias are two tensors in the same memory"):
        on_four(train, make, divided_plan(make(), constraints={"a.bias": "shard(0)"}))


def test_one_flat_memory_of_many_parameters_is() -> None:
    """Side by side, and side by side in columns: nothing in common."""

    def make() -> Any:
        model = net()
        flat = torch.empty(sum(p.numel() for p in model.parameters()), dtype=torch.float64)
        start = 0
        for p in model.parameters():
            part = flat[start : start + p.numel()].view_as(p)
            p.data, start = part.copy_(p.data), start + p.numel()
        both = torch.cat((model.b[0].weight.data.t(), model.b[0].weight.data.t()), 1)
        model.b[0].weight.data = both[:, :16].t()
        model.a.extra = nn.Parameter(both[:, 16:])
        return model

    want = train(make())
    plan = divided_plan(make(), constraints={"a.weight": "shard(0)", "b.*.weight": "shard(1)"})
    for losses in on_four(train, make, plan):
        assert losses == pytest.approx(want, rel=1e-10)


class Scaled(nn.Parameter):
    """Doubles what is computed with it."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = super().__torch_function__(function, types, args, kwargs or {})
        return found * 2.0 if function is nn.functional.linear else found


class Labelled(nn.Parameter):
    """Has a label and computes as any other."""

    label = "mine"


def test_a_class_of_parameters_that_computes_is_refused() -> None:
    model = net()
    model.a.weight = Scaled(model.a.weight.data)
    with pytest.raises(TraceError, match=r"a\.weight is a Scaled, whose class changes what ops do"):
        divided_plan(model)


def test_a_class_of_parameters_stays() -> None:
    def make() -> Any:
        model = net()
        model.a.weight = Labelled(model.a.weight.data)
        return model

    want = train(make())

    def body(hap: Any) -> tuple[list[float], str]:
        assert isinstance(hap.module.a.weight, Labelled)
        with pytest.raises(ShardError, match=r"Write hap\.full_tensors\(\)\['a\.weight'\]\.norm"):
            hap.module.a.weight.norm()
        hap(X).backward()
        with pytest.raises(ShardError, match=r"Write hap\.full_gradients\(\)"):
            hap.module.a.weight.grad.norm()
        hap.zero_grad()
        for copied in (copy.deepcopy(hap).module, hap.full_module()):
            assert isinstance(copied.a.weight, Labelled)
        assert type(hap.full_module().a.weight) is Labelled
        return train(hap), hap.module.a.weight.label

    for losses, label in on_four(body, make):
        assert losses == pytest.approx(want, rel=1e-10)
        assert label == "mine"
