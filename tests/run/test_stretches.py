"""HAP(..., compile=...): the same numbers, the same collectives in the same order, and fewer calls."""

from __future__ import annotations

import copy
import operator
import weakref
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from ranks import lone, loss_of, on_ranks
from small_models import Case, case
from small_plans import random_plan
from torch import fx, nn
from torch.utils._python_dispatch import TorchDispatchMode

from hetspmd.dist.random import Randomness
from hetspmd.dist.simulated_world import run_ranks
from hetspmd.errors import OptionError
from hetspmd.lower.emit import item, take_saved
from hetspmd.rules.kernels import dense, dense_rows
from hetspmd.run.compiled_regions import in_stretches
from hetspmd.run.module import HAP
from hetspmd.trace.compat.tensors import is_op

aten = torch.ops.aten
AOT = {"backend": "aot_eager"}


@pytest.fixture(autouse=True)
def forgotten() -> Any:
    yield
    torch.compiler.reset()


def stepped(c: Case, hap: HAP) -> tuple[float, list[float], dict[str, torch.Tensor]]:
    """Losses of three steps and, of a HAP, what it has learnt."""
    hap.use_randomness(Randomness(1, hap.rank, torch.device("cpu")))
    optimizer = torch.optim.SGD(hap.parameters(), lr=0.1)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = loss_of(hap(**c.batch))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    with torch.no_grad():
        last = loss_of(hap(**c.batch)).item()
    return last, losses, hap.full_tensors()


SUBJECTS = [
    ("mlp", 2), *(pytest.param(n, s, marks=pytest.mark.slow) for n, s in (("conv", 2), ("attention", 2)))
]  # fmt: skip


@pytest.mark.parametrize(("name", "seed"), SUBJECTS)
def test_ranks_compute_what_they_do_without(name: str, seed: int) -> None:
    c = case(name)
    plan = random_plan(c, 2, seed)
    compiled = on_ranks(c, plan, lambda hap: stepped(c, hap), compile=AOT)
    plain = on_ranks(c, plan, lambda hap: stepped(c, hap))
    torch.testing.assert_close(compiled, plain, rtol=1e-10, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mlp", "conv", "attention"])
def test_the_default_compiler(name: str) -> None:
    c = case(name)
    compiled, plain = stepped(c, lone(c, compile=True)), stepped(c, lone(c))
    torch.testing.assert_close(compiled, plain, rtol=1e-9, atol=1e-11)


def others(module: fx.GraphModule) -> list[Any]:
    """The calls that no stretch takes, in their order, but for copies of what kernels read."""
    calls = [n.target for n in module.graph.nodes if n.op == "call_function" and not is_op(n.target)]
    return [t for t in calls if t not in (take_saved, item, operator.getitem, dense, dense_rows)]


def test_what_is_between_the_stretches_keeps_its_order() -> None:
    c = case("attention")

    def body(hap: HAP) -> tuple[int, int]:
        (entry,) = hap._plans.entries
        calls = compiled = 0
        for graph, made in entry.runner._compiled.items():
            assert others(made) == others(graph)
            calls += sum(n.op == "call_function" for n in graph.graph.nodes)
            compiled += sum(n.op == "call_module" or is_op(n.target) for n in made.graph.nodes)
        return calls, compiled

    for calls, compiled in on_ranks(c, random_plan(c, 3, 2), body, compile=AOT):
        assert 0 < compiled < calls / 3


def test_others_are_told_once_of_each_stretch() -> None:
    told: list[str] = []

    @contextmanager
    def busy() -> Any:
        told.append("begins")
        yield
        told.append("ends")

    graph = fx.Graph()
    x = graph.placeholder("x")
    once = graph.call_function(aten.relu.default, (graph.call_function(aten.sin.default, (x,)),))
    drawn = graph.call_function(aten.bernoulli.p, (once, 1.0))  # random numbers are no compiler's
    alone = graph.call_function(aten.neg.default, (drawn,))
    graph.output([alone, once])
    made = in_stretches(fx.GraphModule({}, graph), AOT, busy)
    assert [n.target for n in made.graph.nodes if n.op == "call_module"] == ["stretch_0"]
    assert [n.target for n in made.graph.nodes if is_op(n.target)] == [aten.bernoulli.p, aten.neg.default]
    for _ in range(2):
        ones, same = made(torch.tensor([0.5, -0.5]))
        torch.testing.assert_close(same, torch.tensor([0.5, -0.5]).sin().relu())
        assert ones.tolist() == [-1.0, -1.0]
    assert told == ["begins", "ends"]


def test_attention_without_dropout_is_compiled_with_what_is_around_it() -> None:
    attention = aten._scaled_dot_product_flash_attention_for_cpu.default

    @contextmanager
    def busy() -> Any:
        yield

    graph = fx.Graph()
    x = graph.placeholder("x")
    doubled = graph.call_function(aten.mul.Tensor, (x, 2.0))
    attended = graph.call_function(attention, (doubled, x, x, 0.0, True))
    out = graph.call_function(aten.relu.default, (graph.call_function(item, (attended, 0)),))
    graph.output(out)
    made = in_stretches(fx.GraphModule({}, graph), AOT, busy)
    assert [n.target for n in made.graph.nodes if n.op == "call_module"] == ["stretch_0"]
    assert not any(is_op(n.target) for n in made.graph.nodes)
    value = torch.randn(2, 2, 5, 8)
    want = torch.nn.functional.scaled_dot_product_attention(2 * value, value, value, is_causal=True).relu()
    torch.testing.assert_close(made(value), want)


def test_a_compiler_that_does_not_exist_is_named() -> None:
    c = case("mlp")
    with pytest.raises(OptionError, match="compile is True, False or a dict"):
        lone(c, compile="inductor")
    with pytest.raises(OptionError, match=r"'modus'.*torch.compile has no such argument; it has .*mode"):
        lone(c, compile={"modus": "default"})


ONE = {
    "devices": [{"flops": "1 GFLOP/s", "memory": "1GiB", "memory_bandwidth": "1GB/s"}],
    "network": {"bandwidth": "1Gbit/s", "latency": "1us"},
}


def squares(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(batch).square().sum()
    return loss


@contextmanager
def nobody_waits() -> Any:
    yield


def test_norms_and_attention_are_compiled_with_what_is_around_them() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True).double()
    model = nn.Sequential(layer, nn.GroupNorm(1, 5)).double()
    batch = torch.randn(3, 5, 8, dtype=torch.float64)

    def body(communicator: Any) -> list[tuple[int, list[Any]]]:
        hap = HAP(model, ONE, example=batch, loss=squares, process_group=communicator, compile=AOT)
        (entry,) = hap._plans.entries
        made = entry.runner._compiled.values()
        return [(sum(n.op == "call_module" for n in m.graph.nodes), others(m)) for m in made]

    (found,) = run_ranks(1, body)
    assert found == [(1, []), (1, [])]


class Living(TorchDispatchMode):
    """How many of some tensors live when each product is computed."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        super().__init__()
        self.tensors, self.counts = [weakref.ref(t) for t in tensors], []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if op is aten.mm.default:
            self.counts.append(sum(tensor() is not None for tensor in self.tensors))
        return op(*args, **(kwargs or {}))


@pytest.mark.parametrize("elsewhere", [False, True])
def test_saved_tensors_go_within_a_stretch(elsewhere: bool) -> None:
    graph = fx.Graph()
    x, saved = graph.placeholder("x"), graph.placeholder("saved")
    value, taken = x, []
    for place in range(4):
        taken.append(graph.call_function(take_saved, (saved, place)))
        value = graph.call_function(aten.mm.default, (value, taken[-1]))
    if elsewhere:  # the first is read after the stretch as well, and lives until then
        drawn = graph.call_function(aten.bernoulli.p, (value, 0.5))
        value = graph.call_function(aten.mul.Tensor, (drawn, taken[0]))
    graph.output(value)
    module = fx.GraphModule({}, graph)
    made = in_stretches(module, AOT, nobody_waits)
    given = [torch.rand(3, 3) for _ in range(4)]
    with torch.no_grad():
        torch.manual_seed(1)
        want = module(given[0], list(given))
        made(given[0], list(given))
        box = [tensor.clone() for tensor in given]
        with Living(box) as living:
            torch.manual_seed(1)
            torch.testing.assert_close(made(given[0], box), want)
    assert box == [None] * 4
    assert living.counts == ([4, 4, 3, 2] if elsewhere else [4, 3, 2, 1])


@pytest.mark.slow
def test_inputs_that_lie_otherwise_are_compiled_for() -> None:
    graph = fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    total = graph.call_function(aten.sub.Tensor, (x, graph.call_function(aten.exp.default, (y,))))
    graph.output(graph.call_function(aten.relu.default, (total,)))
    module = fx.GraphModule({}, graph)
    made = in_stretches(module, {}, nobody_waits)
    square, other = torch.randn(4, 4), torch.randn(4, 4)
    for one, two in ((square, other), (square.t(), other), (square, other.t()), (square.double(), other)):
        torch.testing.assert_close(made(one, two), module(one, two))


@pytest.mark.slow
def test_norms_of_tensors_that_a_compiler_lays_out_as_it_likes() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.GELU(), nn.GroupNorm(2, 8), nn.Conv2d(8, 4, 1), nn.Flatten())
    model = model.to(memory_format=torch.channels_last)
    batch = torch.randn(4, 3, 6, 6).to(memory_format=torch.channels_last)
    want = [p.grad for p in _trained(copy.deepcopy(model), batch)]

    def body(communicator: Any) -> Any:
        hap = HAP(model, ONE, example=batch, loss=squares, process_group=communicator, compile=True)
        hap.run_lowered()
        hap(batch).backward()
        return [p.grad for p in model.parameters()]

    (got,) = run_ranks(1, body)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def _trained(model: nn.Module, batch: torch.Tensor) -> list[nn.Parameter]:
    squares(model, batch).backward()
    return list(model.parameters())
