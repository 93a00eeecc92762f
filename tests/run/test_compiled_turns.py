"""HAP(..., compile=...) of a step in micro-batches: the same numbers, one compilation for turns that are alike,
sums that are added to in place, and no merging of what is computed again."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from evaluations import ask
from ranks import on_ranks
from small_models import Case, case
from small_plans import cluster, segmented_in_turns
from test_micro_batches_training import Model, batch, trained
from test_stretches import stepped
from torch import fx, nn

import hetspmd
from hetspmd.lower.emit import instructions
from hetspmd.lower.turn_writer import accumulate
from hetspmd.run import compiled_regions
from hetspmd.run.module import HAP
from hetspmd.run.turn_graphs import put_sum, sum_of
from hetspmd.trace.compat.tensors import is_op

aten = torch.ops.aten
AOT = {"backend": "aot_eager"}

pytestmark = pytest.mark.filterwarnings("ignore::hetspmd.errors.DroppedOutputWarning")


@pytest.fixture(autouse=True)
def forgotten() -> Any:
    yield
    torch.compiler.reset()


def planned(name: str, *devices: float, **options: Any) -> tuple[Case, Any]:
    c = case(name)
    return c, hetspmd.compile(c.model, c.batch, cluster(*devices), **options)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("mlp", {"micro_batches": 3, "zero": 1}),
        ("mlp", {"micro_batches": 3, "zero": 3, "recompute": "all"}),
        pytest.param("attention", {"micro_batches": 2, "recompute": "all"}, marks=pytest.mark.slow),
    ],
)
def test_ranks_compute_what_they_do_without(name: str, options: dict[str, Any]) -> None:
    c, plan = planned(name, 4, 2, 1, **options)
    assert len(plan.active) > 1
    compiled = on_ranks(c, plan, lambda hap: stepped(c, hap), compile=AOT)
    plain = on_ranks(c, plan, lambda hap: stepped(c, hap))
    torch.testing.assert_close(compiled, plain, rtol=1e-10, atol=1e-12)


@pytest.mark.slow
def test_segments() -> None:
    c = case("mlp")
    plan = segmented_in_turns(c, 4)
    compiled = on_ranks(c, plan, lambda hap: stepped(c, hap), compile=AOT)
    torch.testing.assert_close(
        compiled, on_ranks(c, plan, lambda hap: stepped(c, hap)), rtol=1e-10, atol=1e-12
    )


@pytest.mark.slow
def test_a_training_loop() -> None:
    """With batches of other sizes, clipping, and an evaluation."""
    asked = ask(
        Model().double(),
        trained,
        cluster=cluster(2, 1),
        example=batch(9, 0),
        micro_batches=3,
        compile=AOT,
    )
    assert asked.error() < 1e-9
    assert max(plan.micro_batches for plan in asked.plans) == 3


@pytest.mark.slow
def test_the_default_compiler() -> None:
    """On one device, in turns of 3, 3 and 3 rows."""

    def losses(run: Any) -> list[torch.Tensor]:
        optimizer = torch.optim.AdamW(run.parameters(), lr=1e-2)
        found = []
        for step in range(3):
            optimizer.zero_grad()
            loss = run(**batch(9, step))["loss"]
            (3 * loss).backward()
            optimizer.step()
            found.append(loss.detach())
        return found

    model = Model().double()
    single = losses(copy.deepcopy(model))
    compiled = losses(HAP(model, cluster(1), example=batch(9, 0), micro_batches=3, compile=True))
    torch.testing.assert_close(compiled, single, rtol=1e-9, atol=1e-11)


class Layers(nn.Module):
    """Alike layers, of which the backward computes each again."""

    def __init__(self, count: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(count)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()


def graphs_of(hap: HAP) -> tuple[fx.GraphModule, fx.GraphModule]:
    (entry,) = hap._plans.entries
    ((plain, compiled),) = entry.runner._compiled.items()
    return plain, compiled


def turns(module: fx.GraphModule) -> list[fx.GraphModule]:
    return [getattr(module, str(n.target)) for n in module.graph.nodes if n.op == "call_module"]


def stretches(turn: fx.GraphModule) -> list[fx.Graph]:
    names = [str(n.target) for n in turn.graph.nodes if n.op == "call_module"]
    return [getattr(turn, name)._graph.graph for name in names]


def alone(model: nn.Module, rows: int, **options: Any) -> HAP:
    return HAP(model, cluster(1), example=(torch.randn(rows, 16),), compile=AOT, **options)


def test_alike_turns_are_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of four turns: the first one, those between, the last one. Turns of other rows are compiled on their own."""
    count = 0
    compile = compiled_regions.compiled_taking

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        return compile(*args, **kwargs)

    monkeypatch.setattr(compiled_regions, "compiled_taking", counted)
    for rows, want in ((8, 3), (7, 3), (9, 4)):  # of 2, 2, 2, 2; 2, 2, 2, 1; 3, 2, 2, 2 rows
        count = 0
        hap = alone(Layers(2), rows, micro_batches=4)
        for _ in range(2):
            hap(torch.randn(rows, 16)).backward()
        _, compiled = graphs_of(hap)
        assert [len(stretches(turn)) for turn in turns(compiled)] == [1] * 4
        assert 0 < count <= want, rows


def test_alike_layers_between_collectives_are_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    texts: list[str] = []
    text = compiled_regions._text
    monkeypatch.setattr(compiled_regions, "_text", lambda graph: texts.append(text(graph)) or texts[-1])
    x = torch.randn(12, 16)
    plan = hetspmd.compile(Layers(6), (x,), cluster(2, 1), micro_batches=2, zero=3)

    def body(hap: HAP) -> None:
        hap(x).backward()

    on_ranks(Case(Layers(6), {}, plan.theory), plan, body, compile=AOT)
    assert len(set(texts)) < len(texts) / 2


def test_sums_are_added_to_in_place_within_the_stretches() -> None:
    hap = alone(Layers(2), 9, micro_batches=3)
    plain, compiled = graphs_of(hap)
    names = [p for p, _ in hap.module.named_parameters()]
    targets = [[n.target for n in turn.graph.nodes] for turn in turns(compiled)]
    within = [[n.target for g in stretches(turn) for n in g.nodes] for turn in turns(compiled)]
    assert all(accumulate in [n.target for n in turn.graph.nodes] for turn in turns(plain))
    assert not any(accumulate in each for each in targets)
    summands = len(names) + 1
    assert [each.count(put_sum) for each in targets] == [summands, 0, 0]
    assert [each.count(sum_of) for each in targets] == [0, summands, 0]
    assert [each.count(aten.add_.Tensor) for each in within] >= [0, summands, summands]


def test_what_is_computed_again_is_in_another_stretch() -> None:
    hap = alone(Layers(3), 8, micro_batches=2, recompute="all")
    graph = hap.plan.graph
    again = {graph.producers[copy]: graph.producers[of] for b in graph.recomputed for of, copy in b.tensors}
    assert again
    for turn in turns(graphs_of(hap)[1]):
        place = {
            i: number
            for number, stretch in enumerate(stretches(turn))
            for node in stretch.nodes
            for i in instructions(node)
        }
        pairs = [(place[copy], place[of]) for copy, of in again.items() if copy in place and of in place]
        assert pairs
        assert all(copy > of for copy, of in pairs)
        assert all(is_op(n.target) for s in stretches(turn) for n in s.nodes if n.op == "call_function")


def test_an_error_in_a_turn_names_the_module() -> None:
    def failing(hap: HAP) -> str:
        wrong = batch(9, 0)
        wrong["ids"][3, 2] = 20
        with pytest.raises(IndexError) as caught:
            hap(**wrong)
        return "\n".join(getattr(caught.value, "__notes__", []))

    hap = HAP(Model().double(), cluster(1), example=batch(9, 0), micro_batches=3)
    assert "of module embed" in failing(hap)
