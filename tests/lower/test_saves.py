"""What a compiled step saves: a minimum cut, and the same gradients from it."""

from __future__ import annotations

import copy
from functools import partial
from itertools import combinations
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pooled import POOLS, Pooled
from ranks import CLOSE, on_ranks
from small_models import case
from small_plans import random_plan
from torch import fx, nn

import hetspmd
from hetspmd.dist.random import Randomness
from hetspmd.dist.simulated_world import run_ranks
from hetspmd.lower import lower_plan
from hetspmd.lower.emit import DTYPE, SHAPE, take_saved
from hetspmd.lower.local_program import LocalGraphs, LocalProgram
from hetspmd.lower.saves import _Cut, is_fused, save_least
from hetspmd.run import setting
from hetspmd.run.module import HAP

aten = torch.ops.aten
CPU = torch.device("cpu")
ONE = {
    "devices": [{"flops": "1 GFLOP/s", "memory": "1GiB", "memory_bandwidth": "1GB/s"}],
    "network": {"bandwidth": "1Gbit/s", "latency": "1us"},
}
TWO = {
    "devices": [{"flops": f"{n} MFLOP/s", "memory": "1GiB", "memory_bandwidth": "1GB/s"} for n in (3, 1)],
    "network": {"bandwidth": "100Gbit/s", "latency": "1us"},
}


@pytest.fixture
def as_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks lower their programs as for a compiler, and run them as they are."""
    monkeypatch.setattr(setting, "lower_plan", partial(lower_plan, compiled=True))


def losses(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = model(batch)
    return (out * torch.linspace(0.5, 2.0, out.numel(), dtype=out.dtype).reshape(out.shape)).sum()


def on_one(model: nn.Module, batch: torch.Tensor) -> list[torch.Tensor]:
    """The gradients of a model as it is."""
    losses(model, batch).backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


def on(cluster: dict[str, Any], model: nn.Module, batch: torch.Tensor) -> list[list[torch.Tensor]]:
    """The gradients of a HAP's ranks, whole."""
    ranks = len(cluster["devices"])
    models = [copy.deepcopy(model) for _ in range(ranks)]

    def body(communicator: Any) -> list[torch.Tensor]:
        hap = HAP(models[communicator.rank], cluster, example=batch, loss=losses, process_group=communicator)
        hap.run_lowered()
        hap(batch).backward()
        return [g for g in hap.full_gradients().values() if g is not None]

    return run_ranks(ranks, body)


# the same gradients -----------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("as_compiled")
@pytest.mark.parametrize("world", [1, 2, 3, 5])
@pytest.mark.parametrize("name", ["mlp", "conv", "residual", "attention"])
def test_programs_compute_what_they_did(name: str, world: int, monkeypatch: pytest.MonkeyPatch) -> None:
    c = case(name)
    plan = random_plan(c, world, 10 * world + 3)

    def body(hap: HAP) -> Any:
        hap.use_randomness(Randomness(1, hap.rank, CPU))
        optimizer = torch.optim.SGD(hap.parameters(), lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            out = hap(**c.batch)
            (out["loss"] if isinstance(out, dict) else out[0] if isinstance(out, tuple) else out).backward()
            optimizer.step()
        return hap.full_tensors()

    least = on_ranks(c, plan, body)
    monkeypatch.setattr(setting, "lower_plan", lower_plan)
    torch.testing.assert_close(least, on_ranks(c, plan, body), **CLOSE)


class Tanh(nn.Module):
    """GELU as GPT-2 writes it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 0.5 * x * (1.0 + torch.tanh(0.8 * (x + 0.044715 * torch.pow(x, 3.0))))


class Residual(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


def blocks(count: int = 2) -> nn.Module:
    def inner() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 12), Tanh(), nn.Linear(12, 6))

    torch.manual_seed(0)
    return nn.Sequential(*(Residual(inner()) for _ in range(count)), nn.Linear(6, 3)).double()


@pytest.mark.usefixtures("as_compiled")
@pytest.mark.parametrize("cluster", [ONE, TWO], ids=["one", "two"])
def test_gradients_are_those_of_one_device(cluster: dict[str, Any]) -> None:
    batch = torch.randn(7, 6, dtype=torch.float64)
    want = on_one(blocks(), batch)
    for got in on(cluster, blocks(), batch):
        torch.testing.assert_close(got, want, **CLOSE)


@pytest.mark.usefixtures("as_compiled")
@pytest.mark.parametrize("name", POOLS)
def test_where_maxima_lie_is_saved_in_bytes(name: str) -> None:
    torch.manual_seed(0)
    model, batch = Pooled(**POOLS[name]).double(), torch.randn(5, 2, 13, 11, dtype=torch.float64)
    batch[1, 0, :4, :4] = -torch.inf
    batch[2, 1, 3, 3] = torch.nan
    want = on_one(copy.deepcopy(model), batch)
    assert want[0].isfinite().sum() >= 0.9 * want[0].numel()  # where a maximum is not NaN
    (got,) = on(ONE, model, batch)
    torch.testing.assert_close(got, want, equal_nan=True, **CLOSE)
    plan = hetspmd.compile(model, (batch,), ONE, loss=losses)
    kinds = [saved_dtypes(lower_plan(plan, 0, CPU, compiled=short)) for short in (False, True)]
    assert "int64" in kinds[0]
    assert ("int64" in kinds[1]) == (name == "large")
    assert ("int8" in kinds[1]) == (name != "large")


def saved_of(forward: fx.Graph) -> list[fx.Node]:
    """The values that a forward saves."""
    results: Any = forward.output_node().args[0]
    found: list[fx.Node] = results[3]
    return found


def saved_dtypes(program: LocalProgram) -> set[str]:
    return {node.meta[DTYPE] for node in saved_of(program.forward.graph) if DTYPE in node.meta}


def test_a_rectifier_saves_a_mask() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(2, 3, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(27, 2)
    ).double()
    batch = torch.randn(4, 2, 8, 8, dtype=torch.float64)
    plan = hetspmd.compile(model, (batch,), ONE, loss=losses)
    program = lower_plan(plan, 0, CPU, compiled=True)
    saved = saved_of(program.forward.graph)
    assert not any(node.target is aten.relu.default for node in saved)
    assert any(node.target is aten.le.Scalar for node in saved)


# what is saved ----------------------------------------------------------------------------------------------------


def saved_numbers(program: LocalProgram) -> int:
    """Numbers saved that no parameter holds."""
    saved = saved_of(program.forward.graph)
    return sum(
        torch.Size(node.meta[SHAPE]).numel()
        for node in saved
        if node.op != "placeholder" and SHAPE in node.meta
    )


def test_what_elementwise_ops_compute_is_not_saved() -> None:
    batch = torch.randn(7, 6, dtype=torch.float64)
    plan = hetspmd.compile(blocks(1), (batch,), ONE, loss=losses)
    before, least = (saved_numbers(lower_plan(plan, 0, CPU, compiled=c)) for c in (False, True))
    # What the products read (6, 12 and 6 numbers a row), what Tanh is given (12), and a root.
    assert least <= 7 * (6 + 12 + 6 + 12 + 2) < before


def test_residual_sums_are_not_computed_again() -> None:
    """However many blocks there are, the backward computes none of the sums behind them: they are saved."""
    batch = torch.randn(7, 6, dtype=torch.float64)
    adds = (aten.add.Tensor, aten.add_.Tensor)
    for count in (2, 5):
        plan = hetspmd.compile(blocks(count), (batch,), ONE, loss=losses)
        program = lower_plan(plan, 0, CPU, compiled=True)
        assert program.backward is not None
        sums = [n for n in program.forward.graph.nodes if n.target in adds and n.meta[SHAPE] == (7, 6)]
        saved = [n for n in sums if any(user.op == "output" for user in n.users)]
        assert len(saved) >= count - 1
        again = {n.name for n in program.backward.graph.nodes if n.target in adds}
        assert not {n.name for n in sums} & again


def random_graphs(random: Random) -> LocalGraphs:
    """A forward of elementwise ops and products, of values of several sizes, and a backward that reads some."""
    forward, backward = fx.Graph(), fx.Graph()
    made = [forward.placeholder("a"), forward.placeholder("b")]
    for _ in range(random.randint(3, 8)):
        one, other = random.choices(made, k=2)
        op = random.choice(
            [aten.add.Tensor, aten.mul.Tensor, aten.mm.default, aten.neg.default, aten.t.default]
        )
        args = (one,) if op in (aten.neg.default, aten.t.default) else (one, other)
        made.append(forward.call_function(op, args))
    for node in made:
        node.meta.update({SHAPE: (random.randint(1, 6),), DTYPE: "float32"})
    saved = random.sample(made, random.randint(1, 4))
    forward.output((made[-1], [], [], saved))
    backward.placeholder("tangent")
    given = backward.placeholder("saved")
    read = [backward.call_function(take_saved, (given, place)) for place in range(len(saved))]
    for node in list(read):
        op = random.choice([aten.neg.default, aten.mm.default])
        read.append(backward.call_function(op, (node,) if op is aten.neg.default else (node, node)))
    backward.output(read[len(saved) :])
    reference: Any = SimpleNamespace(parameters=(), buffers=(), tensors=())
    given_graphs: Any = SimpleNamespace(
        forward=forward, backward=backward, reference=reference, local_shape=lambda _: (), device=CPU
    )
    return given_graphs


@pytest.mark.parametrize("seed", range(60))
def test_no_values_from_which_all_can_be_computed_are_less(seed: int) -> None:
    graphs = random_graphs(Random(seed))
    backward = graphs.backward
    assert backward is not None
    saved = saved_of(graphs.forward)
    cut = _Cut(graphs, backward, saved, saved)
    nodes = [node for node in graphs.forward.nodes if node.op != "output"]

    def computable(node: fx.Node, chosen: set[fx.Node]) -> bool:
        if node in chosen:
            return True
        free = is_fused(node) and node not in cut._written
        return free and all(computable(operand, chosen) for operand in node.all_input_nodes)

    def weight(chosen: Any) -> int:
        return sum(map(cut._capacity, chosen))

    least = cut.least()
    assert all(computable(node, set(least)) for node in saved)
    everything = (set(c) for n in range(len(nodes) + 1) for c in combinations(nodes, n))
    best = min(weight(chosen) for chosen in everything if all(computable(n, chosen) for n in saved))
    assert weight(least) == best


@pytest.mark.parametrize("seed", range(60))
def test_random_graphs_give_the_backward_what_it_read(seed: int) -> None:
    plain, least = random_graphs(Random(seed)), random_graphs(Random(seed))
    for graphs in (plain, least):
        for graph in (graphs.forward, graphs.backward):
            assert graph is not None
            for node in graph.nodes:
                if node.target is aten.mm.default:
                    node.target = _product
    save_least(least)
    given = (torch.randn(3, 3, dtype=torch.float64), torch.randn(3, 3, dtype=torch.float64))
    results = []
    for graphs in (plain, least):
        assert graphs.backward is not None
        graphs.forward.lint()
        graphs.backward.lint()
        loss, _, _, saved = fx.GraphModule({}, graphs.forward)(*given)
        box = list(saved)
        results.append((loss, fx.GraphModule({}, graphs.backward)(None, box)))
        assert box == [None] * len(box), "all that is saved is taken"
    torch.testing.assert_close(results[0], results[1])


def _product(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return one @ other


@pytest.mark.slow
def test_poolings_that_a_compiler_computes() -> None:
    """Each kind under inductor, on planes with infinities and NaN."""
    torch.manual_seed(0)
    batch = torch.randn(5, 2, 13, 11)
    batch[1, 0, :4, :4] = -torch.inf
    batch[2, 1, 3, 3] = torch.nan
    model = Pools()
    want = on_one(copy.deepcopy(model), batch)

    def body(communicator: Any) -> list[torch.Tensor]:
        hap = HAP(model, ONE, example=batch, loss=losses, process_group=communicator, compile=True)
        hap.run_lowered()
        hap(batch).backward()
        return [g for g in hap.full_gradients().values() if g is not None]

    (got,) = run_ranks(1, body)
    torch.compiler.reset()
    torch.testing.assert_close(got, want, equal_nan=True, rtol=1e-4, atol=1e-4)


class Pools(nn.Module):
    """All poolings side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.pools = nn.ModuleList(Pooled(**options) for options in POOLS.values())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([pool(x).flatten(1) for pool in self.pools], 1)
