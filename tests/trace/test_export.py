"""The export: a step without mutations is traced without functionalization, to the same graph."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from hetspmd.errors import TraceError
from hetspmd.trace.collector import collector_paused
from hetspmd.trace.compat import joint
from hetspmd.trace.graph import Graph
from hetspmd.trace.trace import trace

X = torch.randn(4, 6)


class Body(nn.Module):
    """A linear layer, a function of its output, and the sum of squares."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 5)
        self.register_buffer("calls", torch.zeros(()))
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self.linear(x)).square().sum()


class Counting(Body):
    """Counts its calls in a buffer."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1)
        return super().forward(x)


class Rewriting(Body):
    """Rewrites its input."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x.mul_(2)
        return super().forward(x)


class WriteInBackward(torch.autograd.Function):
    """Twice the input; the gradient is written into a new tensor."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(grad)
        out.copy_(grad)
        out.addcmul_(grad, grad, value=0.0)  # not among the mutations that end a trace early
        return out + grad


def exports(
    monkeypatch: pytest.MonkeyPatch, model: nn.Module, x: torch.Tensor = X
) -> tuple[Graph, list[bool]]:
    """The graph, and for each trace that was made whether it functionalized."""
    made: list[bool] = []
    original = joint._export

    def noted(*args: Any, functionalize: bool) -> Any:
        made.append(functionalize)
        return original(*args, functionalize=functionalize)

    with monkeypatch.context() as patch:
        patch.setattr(joint, "_export", noted)
        return trace(model, (x,), {}), made


def functional(monkeypatch: pytest.MonkeyPatch, model: nn.Module) -> Graph:
    """The graph as functionalization gives it."""
    original = joint._export

    def always(*args: Any, functionalize: bool) -> Any:
        return original(*args, functionalize=True)

    with monkeypatch.context() as patch:
        patch.setattr(joint, "_export", always)
        return trace(model, (X,), {})


@pytest.mark.parametrize(
    "function",
    [F.gelu, lambda h: F.dropout(h, 0.5), lambda h: h.t().reshape(5, 2, 2).transpose(0, 1).flatten(1)],
    ids=["gelu", "dropout", "views"],
)
def test_pure_steps_are_traced_once(
    monkeypatch: pytest.MonkeyPatch, function: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    model = Body(function)
    graph, made = exports(monkeypatch, model)
    assert made == [False]
    assert graph == functional(monkeypatch, model)


@pytest.mark.parametrize("function", [lambda h: F.relu(h, inplace=True), WriteInBackward.apply])
def test_mutations_are_functionalized(monkeypatch: pytest.MonkeyPatch, function: Any) -> None:
    graph, made = exports(monkeypatch, Body(function))
    assert made == [False, True]
    ops = {i.op.split(".")[1] for i in graph.instructions}
    assert not {op for op in ops if op.endswith("_")}


def test_in_place_is_the_same_step(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, _ = exports(monkeypatch, Body(lambda h: F.relu(h, inplace=True)))
    plain, _ = exports(monkeypatch, Body(F.relu))
    assert replace(graph, host=plain.host) == plain, "the models have other functions as attributes"


def test_an_unusual_mutation_is_found_in_the_finished_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, made = exports(monkeypatch, Body(lambda h: h.cos().addcmul_(h, h)))
    plain, once = exports(monkeypatch, Body(lambda h: h.cos().addcmul(h, h)))
    assert made == [False, True]
    assert once == [False]
    assert replace(graph, host=plain.host) == plain


def test_a_written_buffer_is_updated(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, made = exports(monkeypatch, Counting(F.relu))
    assert made == [False, True]
    (calls,) = graph.buffers
    assert calls.updated is not None
    assert graph.producer(calls.updated).op == "aten.add.Tensor"


def test_a_rewritten_input_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TraceError, match=r"changes input args\[0\] in place"):
        exports(monkeypatch, Rewriting(F.relu))


def test_the_collector_wakes_when_the_last_of_many_threads_leaves() -> None:
    assert gc.isenabled()

    def rest(_: int) -> None:
        for _ in range(2000):
            with collector_paused():
                assert not gc.isenabled()

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(rest, range(8)))
    finally:
        sys.setswitchinterval(interval)
    assert gc.isenabled()


def test_the_collector_rests_and_wakes() -> None:
    assert gc.isenabled()
    with collector_paused():
        assert not gc.isenabled()
        with collector_paused():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(TraceError):
        trace(Rewriting(F.relu), (X,), {})
    assert gc.isenabled()
