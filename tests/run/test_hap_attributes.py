"""What others set on a HAP module and take from it: a method as any other, and copies that are apart."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable
from types import MethodType
from typing import Any

import pytest
import torch
from divided import X, net, on_four
from ranks import lone
from small_models import case
from small_plans import cluster
from torch import nn

from hetspmd.run.module import HAP


def in_front(model: nn.Module) -> None:
    """As Accelerate puts a function in front of forward with mixed precision."""
    function = model.forward.__func__

    @functools.wraps(function)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return function(self, *args, **kwargs) * 2

    model._original_forward = model.forward  # type: ignore[assignment]  # as Accelerate does
    model.forward = MethodType(forward, model)


def by_partial(model: nn.Module) -> None:
    """The same around the bound method."""
    forward = model.forward
    model.forward = functools.partial(_twice, forward)


def _twice(forward: Callable[..., Any], *args: Any) -> Any:
    return forward(*args) * 2


def in_a_list(model: nn.Module) -> None:
    model.ways = [model.forward]  # type: ignore[assignment]  # not a tensor
    model.forward = functools.partial(_first_twice, model.ways)


def _first_twice(ways: list[Callable[..., Any]], *args: Any) -> Any:
    return ways[0](*args) * 2


@pytest.mark.parametrize("put", [in_front, by_partial, in_a_list])
def test_a_forward_that_was_put_in_front_is_the_copys_own(put: Callable[[nn.Module], None]) -> None:
    def zeroed(model: nn.Module) -> tuple[float, float]:
        before = model(X).item()
        put(model)
        other = copy.deepcopy(model)
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.zero_()
        assert model(X).item() == pytest.approx(2 * before)
        return other(X).item(), model(X).item()

    want = zeroed(net())
    assert want[0] == pytest.approx(2 * X.square().mean().item())
    for found in on_four(zeroed):
        assert found == pytest.approx(want)


class Counter:
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, *_: Any) -> None:
        self.calls += 1


def test_hooks_and_attributes_are_the_copys_own() -> None:
    """As ``copy.deepcopy`` of any module has it."""

    def told(model: nn.Module) -> list[Any]:
        counter = Counter()
        model.register_forward_hook(counter)
        model.numbers = {"a": [1]}  # type: ignore[assignment]  # not a tensor
        model.extra = nn.Linear(2, 2)
        other = copy.deepcopy(model)
        other.register_forward_pre_hook(Counter())
        other.numbers["a"].append(2)  # type: ignore[index, union-attr]  # a dict
        with torch.no_grad():
            other(X)
        (mine,) = other._forward_hooks.values()
        assert isinstance(mine, Counter)
        found = [counter.calls, mine.calls, model.numbers, len(model._forward_pre_hooks)]
        return [*found, other.extra is model.extra, list(dict(other.named_children()))[-1]]

    want = told(net())
    assert want == [0, 1, {"a": [1]}, 0, False, "extra"]
    assert on_four(told) == [want] * 4


def test_forward_is_a_method() -> None:
    """Of a function of its own, which can be taken out, wrapped, compared and put back."""
    c = case("mlp")
    hap, other = lone(c), lone(c)
    method = hap.forward
    assert inspect.ismethod(method)
    assert method == hap.forward
    assert method.__func__ is hap.forward.__func__
    assert method.__self__ is hap
    assert method != other.forward
    assert method.__name__ == "forward"
    assert method.__func__.__qualname__ == "HAP.forward"
    want = hap(**c.batch)["loss"].item()
    for forward in (method, MethodType(method.__func__, hap), MethodType(HAP.forward, hap)):
        assert forward(**c.batch)["loss"].item() == want
    hap.eval()
    in_front_of(hap)
    assert inspect.signature(hap.forward) == inspect.signature(c.model.forward)
    forward = hap.forward
    while hasattr(forward, "__wrapped__"):  # as unwrap_model(keep_fp32_wrapper=False)
        forward = forward.__wrapped__
    hap.forward = MethodType(forward, hap)
    assert hap(**c.batch)["loss"].item() == want
    assert inspect.signature(hap.forward) == inspect.signature(c.model.forward)


def in_front_of(model: nn.Module) -> None:
    function = model.forward.__func__
    model.forward = MethodType(
        functools.wraps(function)(lambda self, **batch: function(self, **batch)), model
    )


class Out(nn.Module):
    """Its loss is at another place than usual."""

    def __init__(self, nested: bool = False, listed: bool = False) -> None:
        super().__init__()
        self.a, self.nested, self.listed = nn.Linear(3, 3), nested, listed

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> Any:
        y = self.a(x) * scale
        total = y.square().mean()
        found = {"total": total}
        return (y, total) if self.listed else {"losses": found} if self.nested else found


class Loss(nn.Module):
    def forward(self, model: nn.Module, x: torch.Tensor, labels: Any = None) -> Any:
        return model(x=x, labels=labels)["loss"]


def test_the_signature_with_a_loss() -> None:
    """A place in the model's output leaves the model's; a function has its own, without the model."""
    batch = {"x": torch.randn(4, 3)}
    for place, out in (("total", {}), ("losses.total", {"nested": True}), (1, {"listed": True})):
        hap = HAP(Out(**out), cluster(1), example=batch, loss=place)
        assert list(inspect.signature(hap.forward).parameters) == ["x", "scale"]
        assert "total" in repr(hap(**batch)) or isinstance(hap(**batch), tuple)
    c = case("mlp")
    for loss in (Loss(), functools.partial(Loss().forward), Loss().forward):
        found = inspect.signature(lone(c, loss=loss).forward)
        assert list(found.parameters) == ["x", "labels"]
