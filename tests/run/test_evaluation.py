"""Other modes and batches than the training plan's: never refused for how parameters are stored, and equal to one
device."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from evaluations import FOUR, ask, evaluated, inferred, module_of, stepped, tensors, with_rows
from torch import nn
from torch.nn import functional as F

import hetspmd
from hetspmd.cluster.cluster import Cluster
from hetspmd.errors import PlanError
from hetspmd.optimize.compiler import compile_plan
from hetspmd.plan.graph_check import check_graph
from hetspmd.program.program import Communicate
from hetspmd.run.module import HAP
from hetspmd.trace.graph import INPUT, PARAMETER
from nets import Net

ROWS = torch.randn(16, 12, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
X = (ROWS,)
LAYERS = ({"a.weight": "shard(0)", "b.weight": "shard(0)"}, {"a.weight": "shard(1)", "b.weight": "shard(1)"})
in_layers = pytest.mark.parametrize(
    "stored",
    [pytest.param(LAYERS[0], id="dim 0"), pytest.param(LAYERS[1], id="dim 1", marks=pytest.mark.slow)],
)
Forward = Callable[[Any, torch.Tensor], Any]


def net(train: Forward, other: Forward | None = None, **parts: nn.Module) -> nn.Module:
    """Two layers and more ``parts``, with one forward for training and one for evaluation."""
    forward = lambda n, x: (train if n.training or other is None else other)(n, x)  # noqa: E731  # one line beside its use
    layers = {"a": nn.Linear(12, 24), "b": nn.Linear(24, 12)}
    return Net(forward, **layers, **parts).double()


def through(norm: str | None = None) -> Forward:
    def forward(n: Any, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(n.a(x)) if norm is None else getattr(n, norm)(n.a(x))
        return F.mse_loss(n.b(hidden), x)

    return forward


def outputs(n: Any, x: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = n.b(torch.tanh(n.a(x)))
    return out


def through_softmax(n: Any, x: torch.Tensor) -> torch.Tensor:
    """The weight of the first layer is not cut along dim 0, that of the second not along dim 1."""
    hidden = n.n(x @ n.a.weight.softmax(0).t() + n.a.bias)
    return (hidden @ n.b.weight.softmax(1).t()).pow(2).sum()


@pytest.mark.parametrize("stored", ["n.*", "*.weight", "n.weight"])
def test_layer_norm_in_shards(stored: str) -> None:
    """The forward alone cuts no weight of a layer norm."""
    model = net(through("n"), n=nn.LayerNorm(24))
    found = ask(
        model, lambda run: [*evaluated(run, X), *stepped(run, X), *evaluated(run, with_rows(X, 5))], example=X,
        constraints={stored: "shard(0)"},
    )  # fmt: skip
    assert found.error() < 1e-9
    assert "n.weight" in found.apart[1]
    assert not found.apart[0]


@pytest.mark.parametrize("stored", LAYERS, ids=["dim 0", "dim 1"])
def test_modes_in_turn_are_compiled_once(stored: dict[str, str]) -> None:
    def body(run: Any) -> list[torch.Tensor]:
        found = []
        for _ in range(2):
            found += [
                *evaluated(run, X),
                *stepped(run, X),
                *inferred(run, X),
                *evaluated(run, with_rows(X, 5)),
            ]
        return found

    found = ask(net(through()), body, example=X, constraints=stored)
    assert found.error() < 1e-9
    assert len(found.plans) == 3, "training, evaluation, evaluation of five rows"


@in_layers
@pytest.mark.parametrize(
    ("rows", "other"), [(0, None), (0, outputs), (1, None), (1, outputs), (2, None), (3, outputs)]
)
def test_few_rows(stored: dict[str, str], rows: int, other: Forward | None) -> None:
    """Fewer than devices, and none; also in training."""
    few = with_rows(X, rows)

    def body(run: Any) -> list[torch.Tensor]:
        return [*evaluated(run, few), *stepped(run, few), *inferred(run, few)]

    assert ask(net(through(), other), body, example=X, constraints=stored).error() < 1e-9


@pytest.mark.parametrize("loss", [F.l1_loss, F.smooth_l1_loss, F.huber_loss])
def test_no_rows_of_a_loss(loss: Callable[..., torch.Tensor]) -> None:
    """A mean over nothing is NaN, and its gradients are what they are on one device."""
    model = net(lambda n, x: loss(n.b(n.a(x)), x))
    found = ask(model, lambda run: stepped(run, with_rows(X, 0)), example=X, constraints=LAYERS[0])
    assert found.error() < 1e-9


OTHERS: dict[str, Forward] = {
    "other modules": lambda n, x: n.c(x).relu(),
    "a part of the modules": lambda n, x: n.a(x),
    "no module": lambda n, x: x * 2,
    "a dict": lambda n, x: {"y": n.b(n.a(x)), "w": n.a.weight.sum(), "three": 3, "nothing": None},
    "parameters": lambda n, x: (n.a.weight, n.b.weight.t(), n.a.weight + 0, n.b(n.a(x))),
    "what cuts neither dim": lambda n, _: (
        torch.linalg.svdvals(n.a.weight), n.b.weight.softmax(0), n.b.weight.softmax(1)
    ),
    "heads": lambda n, x: n.a(x).view(-1, 3, 8).softmax(-1),
    "products of both": lambda n, x: x @ n.a.weight.t() @ n.b.weight.t() @ n.a.weight.t(),
}  # fmt: skip


@in_layers
@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.filterwarnings("ignore:ops without a rule")
def test_an_evaluation_of_another_kind(stored: dict[str, str], name: str) -> None:
    model = net(through(), OTHERS[name], c=nn.Linear(12, 5))
    found = ask(
        model, lambda run: [*evaluated(run, X), *inferred(run, with_rows(X, 3)), *stepped(run, X)], example=X,
        constraints=stored,
    )  # fmt: skip
    assert found.error() < 1e-9


@in_layers
def test_statistics_and_dropout(stored: dict[str, str]) -> None:
    """Batch norm updates its statistics in training under no_grad and inference_mode too; nothing is dropped in an
    evaluation."""
    parts = {"n": nn.BatchNorm1d(24), "d": nn.Dropout(0.5)}
    model = net(lambda n, x: F.mse_loss(n.b(n.d(n.n(n.a(x))) if n.d.training else n.n(n.a(x))), x), **parts)

    def body(run: Any) -> list[torch.Tensor]:
        module_of(run).d.eval()
        found = stepped(run, X)
        with torch.no_grad():
            found += tensors(run(ROWS[:5]))
        with torch.inference_mode():
            made = run(ROWS[:7])
        found += [made.clone(), *evaluated(run, X), *inferred(run, with_rows(X, 1))]
        module_of(run).d.eval()
        found += stepped(run, X)
        return found + [b.detach().double().clone() for b in module_of(run).buffers()]

    more = {"n.weight": "shard(0)", "n.bias": "shard(0)"}
    assert ask(model, body, example=X, constraints={**stored, **more}).error() < 1e-9


@in_layers
def test_gradients_of_an_evaluation_end_in_the_stored_shards(stored: dict[str, str]) -> None:
    """Steps in the mode of evaluation, through ops that do not cut what is stored, with an optimizer."""
    model = net(through("n"), through_softmax, n=nn.LayerNorm(24))

    def body(run: Any) -> list[torch.Tensor]:
        optimizer = torch.optim.SGD(run.parameters(), lr=0.1)
        found = []
        for evaluation in (False, True, True, False):
            run.train(not evaluation)
            loss = run(ROWS[: 7 if evaluation else 16])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.detach())
        whole = run.full_tensors() if isinstance(run, HAP) else dict(module_of(run).named_parameters())
        return found + [whole[name].detach().clone() for name, _ in module_of(run).named_parameters()]

    found = ask(model, body, example=X, constraints={**stored, "n.weight": "shard(0)", "n.bias": "shard(0)"})
    assert found.error() < 1e-9
    assert found.apart[1] & {"a.weight", "b.weight"}
    kinds = {s.kind for s in found.plans[1].program.steps if isinstance(s, Communicate)}
    assert kinds & {"all_gather", "grouped_broadcast", "ring_gather"}


@in_layers
def test_frozen_parts(stored: dict[str, str]) -> None:
    def body(run: Any) -> list[torch.Tensor]:
        module = module_of(run)
        found = stepped(run, X)
        module.a.requires_grad_(False)
        found += [*stepped(run, X), *evaluated(run, X)]
        module.requires_grad_(False)
        found += tensors(run(ROWS))
        module.b.requires_grad_(True)
        run.eval()
        return found + stepped(run, with_rows(X, 3))

    assert ask(net(through("n"), n=nn.LayerNorm(24)), body, example=X, constraints=stored).error() < 1e-9


@in_layers
def test_autocast(stored: dict[str, str]) -> None:
    batch = (ROWS.float(),)
    model = net(through("n"), n=nn.LayerNorm(24)).float()

    def body(run: Any) -> list[torch.Tensor]:
        found = stepped(run, batch)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found += [*evaluated(run, batch), *inferred(run, with_rows(batch, 3))]
        return found + evaluated(run, batch)

    found = ask(model, body, example=batch, constraints={**stored, "n.weight": "shard(0)"})
    assert found.error() < 2e-2
    assert {plan.graph.autocast for plan in found.plans} == {"", "bfloat16"}


def test_heads_of_other_units() -> None:
    """Training cuts the columns of a layer anywhere; the evaluation has heads of eight. Shards move to whole
    heads, or are gathered."""
    train = lambda n, x: F.mse_loss(n.b(n.a(x)), x)  # noqa: E731  # one line beside its use
    heads = lambda n, x: n.b(n.a(x).view(-1, 3, 8).softmax(-1).flatten(1))  # noqa: E731  # one line beside its use
    model = net(train, heads)
    found = ask(model, lambda run: [*evaluated(run, X), *stepped(run, X)], example=X, constraints=LAYERS[0])
    assert found.error() < 1e-9
    assert "a.weight" in found.apart[1]


@in_layers
@pytest.mark.parametrize("count", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_segments(stored: dict[str, str], count: int) -> None:
    product = lambda n, x: F.mse_loss(n.b(n.n(n.a(x) * n.a.weight.softmax(0).sum(1))), x)  # noqa: E731  # one line beside its use
    model = net(through("n"), product, n=nn.LayerNorm(24))
    found = ask(
        model, lambda run: [*evaluated(run, X), *stepped(run, with_rows(X, 5)), *inferred(run, with_rows(X, 2))],
        example=X, constraints={**stored, "n.weight": "shard(0)"}, segments=count,
    )  # fmt: skip
    assert found.error() < 1e-9
    assert found.plans[0].graph.segment_count == count
    assert all(found.apart[1:2])


@in_layers
def test_idle_devices(stored: dict[str, str]) -> None:
    """The first and the last device are so slow that they have nothing to do."""
    devices = [
        {"name": f"d{i}", "flops": s * 1e6, "memory_bandwidth": s * 1e6, "launch": 1e-9}
        for i, s in enumerate((1e-3, 2, 1, 1e-3))
    ]
    four = Cluster.load({"devices": devices, "network": {"bandwidth": 1e11, "latency": 1e-9}})
    model = net(through("n"), n=nn.LayerNorm(24))
    found = ask(
        model, lambda run: [*evaluated(run, X), *stepped(run, with_rows(X, 5)), *inferred(run, with_rows(X, 1))],
        cluster=four, example=X, constraints={**stored, "n.weight": "shard(0)"},
    )  # fmt: skip
    assert found.error() < 1e-9
    assert {plan.active for plan in found.plans} == {(1, 2)}
    assert "n.weight" in found.apart[1]


@in_layers
@pytest.mark.parametrize("way", ["virtual", "flat"])
@pytest.mark.parametrize("accelerators", [(2, 1), pytest.param((1, 2, 2), marks=pytest.mark.slow)])
def test_machines(stored: dict[str, str], way: str, accelerators: tuple[int, ...]) -> None:
    devices: list[dict[str, Any]] = []
    for i, count in enumerate(accelerators):
        device = {"name": f"n{i}", "flops": 1e5 * (i + 1), "memory_bandwidth": 1e6 * (i + 1), "launch": 1e-9}
        inside = {"accelerators": count, "inside": {"bandwidth": "1TB/s", "latency": "1ns"}}
        devices.append({**device, **(inside if count > 1 else {})})
    machines = Cluster.load({"devices": devices, "network": {"bandwidth": "100GB/s", "latency": "1ns"}})
    model = net(through("n"), through_softmax, n=nn.LayerNorm(24))

    def body(run: Any) -> list[torch.Tensor]:
        found = [*stepped(run, X), *evaluated(run, with_rows(X, 5))]
        run.eval()
        return found + stepped(run, with_rows(X, 7))

    found = ask(
        model, body, cluster=machines, example=X, machines=way,
        constraints={**stored, "n.weight": "shard(0)", "n.bias": "shard(0)"},
    )  # fmt: skip
    assert found.error() < 1e-9
    assert all((plan.inside is not None) == (way == "virtual") for plan in found.plans)
    assert "n.weight" in found.apart[1]
    assert found.apart[2] & {"a.weight", "b.weight"}


@in_layers
@pytest.mark.parametrize(
    "options", [{"micro_batches": 3}, {"micro_batches": 2, "zero": 3}, {"micro_batches": 3, "segments": 2}]
)
def test_steps_in_micro_batches(stored: dict[str, str], options: dict[str, Any]) -> None:
    """Also those whose graph cuts parameters otherwise than they are stored: they have copies of these."""
    model = net(through("n"), through_softmax, n=nn.LayerNorm(24))

    def body(run: Any) -> list[torch.Tensor]:
        found = [*stepped(run, X), *evaluated(run, with_rows(X, 5))]
        run.eval()
        return found + stepped(run, with_rows(X, 7))

    constraints = {} if "zero" in options else {**stored, "n.weight": "shard(0)", "n.bias": "shard(0)"}
    found = ask(model, body, example=X, constraints=constraints, **options)
    assert found.error() < 1e-9
    assert [plan.micro_batches for plan in found.plans] == [
        options["micro_batches"],
        1,
        options["micro_batches"],
    ]
    assert found.apart[2] & {"a.weight", "b.weight"}


def test_plans_that_store_apart_are_stored_and_printed() -> None:
    model = net(through("n"), n=nn.LayerNorm(24))
    first = hetspmd.compile(model, X, FOUR, constraints={"n.*": "shard(0)"})
    other = hetspmd.compile(model, X, FOUR, constraints={"n.*": "shard(0)"})
    assert first.to_json() == other.to_json()
    assert "stored" not in first.to_json()
    later = compile_plan(copy.deepcopy(model).eval(), X, {}, FOUR, training=False, like=first)
    assert later.parameter_layout() == first.parameter_layout()
    assert later.graph.stored_apart
    again = hetspmd.Plan.from_json(later.to_json())
    assert again.to_json() == later.to_json()
    assert again.parameter_layout() == first.parameter_layout()
    assert "n.weight" in str(later)
    assert later.timeline() is not None


def test_damaged_storage_is_found() -> None:
    model = net(through("n"), n=nn.LayerNorm(24))
    first = hetspmd.compile(model, X, FOUR, constraints={"n.*": "shard(0)"}, segments=1)
    graph = compile_plan(copy.deepcopy(model).eval(), X, {}, FOUR, training=False, like=first).graph
    check_graph(graph)
    instructions = list(graph.instructions)
    place = next(i.id for i in instructions if i.op == PARAMETER and i.kwargs)
    other = next(i.id for i in instructions if i.op == INPUT)
    for at, kwargs in (
        (place, (("stored", 7),)), (place, (("stored", -1),)), (place, (("stored", False),)),
        (place, (("stored", 0), ("stored", 0))), (place, (("shown", 0),)), (place, (("stored", "0"),)),
        (other, (("stored", 0),)), (place, ()),
    ):  # fmt: skip
        wrong = list(instructions)
        wrong[at] = replace(wrong[at], kwargs=kwargs)
        if at == place and not kwargs:
            wrong = [replace(i, kwargs=()) for i in wrong]
        with pytest.raises(PlanError, match="damaged"):
            check_graph(replace(graph, instructions=tuple(wrong)))


def test_an_evaluation_without_a_whole_segment() -> None:
    """What training does in the middle of the model, the evaluation does not."""
    layers = [nn.Linear(12, 12) for _ in range(6)]

    def forward(n: Any, x: torch.Tensor) -> torch.Tensor:
        for i in range(6) if n.training else (0, 1, 4, 5):
            x = torch.tanh(getattr(n, f"layer{i}")(x))
        return x.pow(2).mean()

    model = net(forward, **{f"layer{i}": layer for i, layer in enumerate(layers)})
    found = ask(
        model, lambda run: [*evaluated(run, X), *stepped(run, with_rows(X, 5))], example=X, segments=3,
        constraints={"layer*.weight": "shard(0)"},
    )  # fmt: skip
    assert found.error() < 1e-9
    assert found.plans[0].graph.segment_count == 3
