"""Hooks on tensors that forward makes: what changes a gradient is traced, what only looks is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook

from hetspmd.errors import TraceError
from hetspmd.trace.trace import trace

SEEN: list[Any] = []
X = torch.randn(4, 6)


class Net(nn.Module):
    def __init__(self, at: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.first, self.second, self.at = nn.Linear(6, 6), nn.Linear(6, 3), at

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        self.at(hidden)
        return self.second(hidden.relu()).square().mean()


def looks(hidden: Tensor) -> None:
    hidden.register_hook(print)


def keeps(hidden: Tensor) -> None:
    hidden.register_hook(SEEN.append)


def measures(hidden: Tensor) -> None:
    hidden.register_hook(lambda g: SEEN.append(g.norm()))


def looks_at_a_view(hidden: Tensor) -> None:
    hidden[:2].sum()
    hidden.view(-1).register_hook(print)
    hidden.register_hook(lambda g: print(g.shape))


def retains(hidden: Tensor) -> None:
    hidden.retain_grad()


def returns_it(hidden: Tensor) -> None:
    def logs(gradient: Tensor) -> Tensor:
        SEEN.append(gradient.norm())
        return gradient

    hidden.register_hook(logs)


def returns_a_view(hidden: Tensor) -> None:
    hidden.register_hook(lambda g: g.view_as(g))


def of_several(hidden: Tensor) -> None:
    register_multi_grad_hook([hidden, hidden * 2], SEEN.append)


def of_any(hidden: Tensor) -> None:
    torch.autograd.graph.register_multi_grad_hook([hidden], SEEN.append, mode="any")


def of_a_node(hidden: Tensor) -> None:
    node = hidden.grad_fn
    assert node is not None
    node.register_hook(lambda inputs, outputs: SEEN.append(outputs))


def before_a_node(hidden: Tensor) -> None:
    node = hidden.grad_fn
    assert node is not None
    node.register_prehook(lambda outputs: outputs)


class Logged(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: Any, x: Tensor) -> Tensor:
        return x * 1.0

    @staticmethod
    def backward(_ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0]


def of_a_node_of_python(hidden: Tensor) -> None:
    made: Any = Logged.apply(hidden)
    made.grad_fn.register_hook(print)
    hidden.add_(made)


@pytest.mark.parametrize("at", [looks, keeps, measures, looks_at_a_view, returns_it, returns_a_view])
def test_hooks_that_only_look_are_refused(at: Callable[[Tensor], Any]) -> None:
    with pytest.raises(
        TraceError, match=r"test_tensor_hooks\.py:\d+: .*register_hook.*only looks at the grad"
    ):
        trace(Net(at), (X,), {})
    alone = Net(lambda hidden: hidden.register_hook(lambda g: None))
    alone(X).backward()  # as ever outside of a trace
    assert alone.first.weight.grad is not None


def test_a_kept_gradient_is_refused() -> None:
    with pytest.raises(TraceError, match=r"retain_grad\(\) at .*test_tensor_hooks\.py"):
        trace(Net(retains), (X,), {})
    hidden = X.clone().requires_grad_().square()
    hidden.retain_grad()
    hidden.sum().backward()
    assert hidden.grad is not None


@pytest.mark.parametrize("at", [of_several, of_any, of_a_node, before_a_node, of_a_node_of_python])
def test_hooks_on_nodes_and_on_several_tensors_are_refused_as_well(at: Callable[[Tensor], Any]) -> None:
    with pytest.raises(TraceError, match=r"test_tensor_hooks\.py:\d+: .*register_.* only looks at the grad"):
        trace(Net(at), (X,), {})
    Net(at)(X).backward()  # as ever outside of a trace


class OnModules(nn.Module):
    """Registers a hook on one of its modules, or on all, and takes it off again."""

    def __init__(self, register: Callable[..., Any], hook: Callable[..., Any] = lambda *_: None) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 3)
        self.register, self.hook = register, hook

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        handle = self.register(self.second, self.hook)
        out: Tensor = self.second(hidden)
        handle.remove()
        return out.square().mean()


ON_MODULES: dict[str, Callable[..., Any]] = {
    "a module": lambda m, hook: m.register_full_backward_hook(hook),
    "before a module": lambda m, hook: m.register_full_backward_pre_hook(hook),
    "the older kind": lambda m, hook: m.register_backward_hook(hook),
    "all modules": lambda m, hook: nn.modules.module.register_module_full_backward_hook(hook),
}


@pytest.mark.parametrize("name", ON_MODULES)
def test_hooks_on_modules_for_the_time_of_forward_are_refused_as_well(name: str) -> None:
    with pytest.raises(TraceError, match=r"test_tensor_hooks\.py:\d+: .*only looks at the grad"):
        trace(OnModules(ON_MODULES[name]), (X,), {})


@pytest.mark.parametrize("name", ["a module", "before a module"])
def test_hooks_on_modules_that_change_the_gradient_are_part_of_the_graph(name: str) -> None:
    plain = trace(Net(lambda hidden: None), (X,), {})
    changed = trace(OnModules(ON_MODULES[name], lambda _module, *g: (g[0][0] * 0.5,)), (X,), {})
    assert len(changed.instructions) != len(plain.instructions)


def in_place(gradient: Tensor) -> None:
    gradient.mul_(0.5)


def in_place_and_returned(gradient: Tensor) -> Tensor:
    return gradient.mul_(0.5)


def in_place_of_a_part(gradient: Tensor) -> None:
    gradient[:2].zero_()


@pytest.mark.parametrize("change", [in_place, in_place_and_returned, in_place_of_a_part])
def test_hooks_that_change_the_gradient_in_place_are_part_of_the_graph(
    change: Callable[[Tensor], Any],
) -> None:
    changed = trace(Net(lambda hidden: hidden.register_hook(change)), (X,), {})
    returned = trace(
        Net(lambda hidden: hidden.register_hook(lambda g: (change(h := g.clone()), h)[1])), (X,), {}
    )
    assert [i.op for i in changed.instructions] == [
        i.op for i in returned.instructions if "clone" not in i.op
    ]


@pytest.mark.parametrize(
    "change", [lambda g: g * 0.5, lambda g: -g, lambda g: g.clamp(-0.1, 0.1), torch.zeros_like]
)
def test_hooks_that_change_the_gradient_are_part_of_the_graph(change: Callable[[Tensor], Tensor]) -> None:
    plain = trace(Net(lambda hidden: None), (X,), {})
    changed = trace(Net(lambda hidden: hidden.register_hook(change)), (X,), {})
    assert [i.op for i in changed.instructions] != [i.op for i in plain.instructions]


def test_evaluation_registers_nothing() -> None:
    net = Net(lambda hidden: hidden.register_hook(print) if hidden.requires_grad else None)
    assert trace(net, (X,), {}, training=False).instructions
