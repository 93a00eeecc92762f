"""One list of passes for every plan, the text of local graphs, and its files."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from inspect import getmodule
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from machine_plans import machine_plan
from small_models import Case, case
from test_idle import idle_plan
from torch import fx

import hetspmd
from hetspmd.dist.communicator import Communicator
from hetspmd.dist.random import Randomness
from hetspmd.dist.simulated_world import run_ranks
from hetspmd.errors import OutputError
from hetspmd.lower import LocalProgram, active_ranks, idle, local, lower_plan, passes
from hetspmd.lower.dump import dump_passes
from hetspmd.lower.graph_text import graphs_text
from hetspmd.lower.instrument import instrumented
from hetspmd.lower.local_program import LocalGraphs, numbered
from hetspmd.lower.passes import PASSES, OfAStep, Rewrite
from hetspmd.lower.turn_writer import TurnGraph
from hetspmd.lower.types import value_types
from hetspmd.plan.plan import Plan
from hetspmd.run.starting import runtime_of
from hetspmd.trace.values import dtype_name

CPU = torch.device("cpu")
NAMES = [
    "emit", "unread", "aliases", "convolutions", "scatter", "batch-norms", "noise", "saves", "in-place", "spare",
    "check",
]  # fmt: skip
ARCHITECTURE = Path(__file__).parents[2] / "docs" / "architecture.md"


@cache
def plans() -> dict[str, tuple[Case, Plan]]:
    """Of each kind of plan one, with its model and batch."""
    conv, mlp, attention = case("conv"), case("mlp"), case("attention", dropout=0.0)
    return {
        "flat": (conv, idle_plan(conv, (0, 1, 2))),
        "flat, one idle": (mlp, idle_plan(mlp, (0, 2))),
        "machines": (mlp, machine_plan(mlp, (2, 1, 3), 1)),
        "machines, alike": (attention, machine_plan(attention, (3, 1), 2)),
        "machines, one idle": (mlp, machine_plan(mlp, (2, 3, 1), 4, (0, 2))),
    }


KINDS = ("flat", "flat, one idle", "machines", "machines, alike", "machines, one idle")


def texts(plan: Plan, rank: int) -> dict[str, str]:
    """The text of a rank's graphs after each pass."""
    found: dict[str, str] = {}
    lower_plan(plan, rank, CPU, lambda _, each, graphs: found.update({each.name: graphs_text(graphs)}))
    return found


def after_all(plan: Plan, rank: int) -> tuple[LocalProgram, LocalGraphs]:
    seen: list[LocalGraphs] = []
    program = lower_plan(plan, rank, CPU, lambda *now: seen.append(now[2]))
    return program, seen[-1]


# the list -------------------------------------------------------------------------------------------------------


def test_names_and_order() -> None:
    assert [each.name for each in PASSES] == NAMES
    assert all(each.what and "\n" not in each.what for each in PASSES)
    assert all(re.fullmatch(r"[a-z-]+", each.name) for each in PASSES), "they are names of files"


@pytest.mark.parametrize("kind", KINDS)
def test_every_rank_of_every_plan_goes_through_the_whole_list(kind: str) -> None:
    _, plan = plans()[kind]
    for rank in range(plan.cluster.ranks):
        seen: list[tuple[int, str]] = []
        lower_plan(plan, rank, CPU, lambda place, each, _, seen=seen: seen.append((place, each.name)))
        assert seen == list(enumerate(NAMES))


def test_rewrites_find_nothing_to_do_on_an_idle_rank() -> None:
    for kind in ("flat, one idle", "machines, one idle"):
        _, plan = plans()[kind]
        left = set(range(plan.cluster.ranks)) - set(active_ranks(plan))
        assert left
        for rank in sorted(left):
            assert len(set(texts(plan, rank).values())) == 1


def test_each_pass_changes_the_text_of_a_graph_that_has_work_for_it() -> None:
    """A residual network on one device has convolutions, batch norms and a masked cross entropy; shards have
    collectives."""
    found = texts(idle_plan(case("residual"), (2,)), 2)
    changed = {b for a, b in pairwise(NAMES) if found[a] != found[b]}
    assert changed >= {"aliases", "convolutions", "scatter", "batch-norms", "in-place"}
    sharded = texts(plans()["flat"][1], 0)
    assert sharded["in-place"] != sharded["spare"]
    assert sharded["spare"] == sharded["check"]
    pooled = torch.nn.Sequential(torch.nn.MaxPool2d(2), torch.nn.Flatten(), torch.nn.Linear(4, 1, bias=False))
    found = texts(hetspmd.compile(pooled, (torch.randn(3, 1, 4, 4),), LONE, loss=summed), 0)
    dropped = set(found["emit"].splitlines()) - set(found["unread"].splitlines())
    assert ["item(%max_pool2d" in line for line in dropped] == [True], "nobody reads where the maxima are"


def test_a_graph_that_a_pass_has_broken_is_noticed() -> None:
    def breaks(graph: fx.Graph) -> None:
        first = next(n for n in graph.nodes if n.op == "call_function")
        graph.output_node().append(first)

    broken = passes.Pass("breaks", "moves a call behind what reads it", Rewrite(breaks))
    with patch.object(passes, "PASSES", (*PASSES[:-1], broken, PASSES[-1])), pytest.raises(RuntimeError):
        lower_plan(plans()["flat"][1], 0, CPU)


def test_the_architecture_page_has_the_list() -> None:
    page = ARCHITECTURE.read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([a-z-]+)` \| (.+?) \| (.+?) \|$", page, re.M)
    assert [(name, what) for name, what, _ in rows] == [(each.name, each.what) for each in PASSES]
    for each, (_, _, named) in zip(PASSES, rows, strict=True):
        makers = [each.run.rewrite] if isinstance(each.run, (Rewrite, OfAStep)) else [*EMITTERS]
        for maker in makers:
            module = getmodule(maker)
            assert module is not None
            assert f"`{module.__name__.removeprefix('hetspmd.').replace('.', '/')}.py`" in named


EMITTERS: tuple[Any, ...] = (local.ActiveEmitter, idle.IdleEmitter)


# the text -------------------------------------------------------------------------------------------------------


class Compared:
    """Is told of every call of a graph that runs, and compares what it gives with the types in the text."""

    def __init__(self, graphs: LocalGraphs | TurnGraph) -> None:
        self.nodes: list[fx.Node] = []
        self.types, self.count = value_types(graphs), 0

    def behind(self, made: fx.Graph, watcher: fx.Node, node: fx.Node, copied: Any) -> None:
        made.call_method("compare", (watcher, len(self.nodes), copied(node)))
        self.nodes.append(node)

    def compare(self, index: int, value: Any) -> None:
        node = self.nodes[index]
        if isinstance(value, torch.Tensor):
            known = self.types[node]  # the text has a type for every tensor
            assert (known.dtype, known.shape) == (dtype_name(value.dtype), tuple(value.shape)), node
            self.count += 1
        else:
            assert node not in self.types, node


@pytest.mark.parametrize("kind", KINDS)
def test_dtypes_and_shapes_are_those_of_a_run(kind: str) -> None:
    c, plan = plans()[kind]
    graph = plan.graph
    parameters, buffers = dict(c.model.named_parameters()), dict(c.model.named_buffers())

    def body(communicator: Communicator) -> int:
        program, graphs = after_all(plan, communicator.rank)
        randomness = Randomness(5, communicator.rank, CPU, reference=True)
        randomness.begin_step()
        runtime = runtime_of(communicator, plan, randomness)
        if program.rank is None:
            return 0
        compared = Compared(graphs)
        assert program.backward is not None
        forward = instrumented(program.forward, compared, "Forward", compared.behind)
        backward = instrumented(program.backward, compared, "Backward", compared.behind)
        with torch.no_grad():
            shards = [
                held.slice(parameters[p.name].detach())
                for held, p in zip(program.parameters, graph.parameters, strict=True)
            ]
            whole = [buffers[b.name].clone() for b in graph.buffers]
            inputs = [c.batch[i.path] for i in graph.inputs]
            loss, *_, saved = forward(runtime, *shards, *whole, *inputs)
            backward(runtime, torch.ones_like(loss), saved)
        return compared.count

    counts = run_ranks(plan.cluster.ranks, body)
    assert all(count > 20 for rank, count in enumerate(counts) if rank in active_ranks(plan))


def test_a_graph_in_full() -> None:
    """A lone device has no collectives, and works in place."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 3, bias=False), torch.nn.ReLU())
    plan = hetspmd.compile(model, (torch.randn(4, 2),), LONE, loss=summed)
    assert texts(plan, 0)["check"] == FULL


LONE = {"devices": [{"flops": 1e9}]}


def summed(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    """A loss."""
    loss: torch.Tensor = model(x).sum()
    return loss


FULL = """\
forward
  %runtime = runtime
  %parameter_v0_weight: float32[3, 2] | replicated = parameter 0.weight
  %batch_args_0: float32[4, 2] | replicated = input args[0]
  %t: float32[2, 3] | replicated = aten.t.default(%parameter_v0_weight: float32[3, 2])
  %mm: float32[4, 3] | replicated = aten.mm.default(%batch_args_0: float32[4, 2], %t: float32[2, 3])
  %relu: float32[4, 3] | replicated = aten.relu_.default(%mm: float32[4, 3])  # writes to %mm
  %sum_1: float32[] | replicated = aten.sum.default(%relu: float32[4, 3])
  return loss = %sum_1: float32[]
  return output[0] = %sum_1: float32[]
  return saved[0] = %relu: float32[4, 3]
  return saved[1] = %batch_args_0: float32[4, 2]

backward
  %runtime = runtime
  %tangent: float32[] = the gradient of the loss sum_1
  %saved = what forward has saved
  %expand: float32[4, 3] | replicated = aten.expand.default(%tangent: float32[], [4, 3])
  %relu: float32[4, 3] | replicated = take_saved(%saved, 0)
  %threshold_backward: float32[4, 3] | replicated = \
aten.threshold_backward.default(%expand: float32[4, 3], %relu: float32[4, 3], 0)
  %t_1: float32[3, 4] | replicated = aten.t.default(%threshold_backward: float32[4, 3])
  %args_0: float32[4, 2] | replicated = take_saved(%saved, 1)
  %mm_1: float32[3, 2] | replicated = aten.mm.default(%t_1: float32[3, 4], %args_0: float32[4, 2])
  return gradient of 0.weight = %mm_1: float32[3, 2]
"""


def test_collectives_say_kind_group_and_bytes() -> None:
    """One of each by hand: its operand's bytes and its result's, as their dtypes and shapes have them."""
    _, plan = plans()["flat, one idle"]
    text = texts(plan, 2)["check"]
    starts = re.findall(r"%(\w+) = start (\w+)\((.*)\)  # among (.*?); gives (\d+) B, gets (\d+) B", text)
    assert starts
    assert len(starts) == text.count(" = start ")
    assert {group for *_, group, _, _ in starts} == {"ranks 0, 2"}
    for name, kind, operands, _, gives, gets in starts:
        assert int(gives) == sum(map(eights, re.findall(r"(?:float|int)64\[(.*?)\]", operands)))
        made = re.findall(rf": (?:float|int)64\[(.*?)\] \| .* = (?:wait|take)\(%{name}\b", text)
        assert int(gets) == sum(map(eights, made))
        assert kind != "all_reduce" or gives == gets
    _, plan = plans()["machines, one idle"]
    text = texts(plan, 0)["check"]
    assert set(re.findall(r" = start .*?  # among (.*?);", text)) == {"ranks 0-1", "machines 0, 2"}


def eights(shape: str) -> int:
    """Bytes of a shape's elements, of eight bytes each."""
    return 8 * prod(int(extent) for extent in shape.split(", ") if extent)


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_graphs_have_the_same_text(kind: str) -> None:
    _, plan = plans()[kind]
    again = replace(plan)  # derives its theory anew
    for rank in range(plan.cluster.ranks):
        found = texts(plan, rank)
        assert found == texts(again, rank)
        assert "0x" not in "".join(found.values()), "an address"


def test_numbers_in_words() -> None:
    assert numbered("rank", [3]) == "rank 3"
    assert numbered("rank", [0, 1, 2, 5, 7, 8]) == "ranks 0-2, 5, 7-8"


# the files ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_per_pass_and_rank(kind: str, tmp_path: Path) -> None:
    _, plan = plans()[kind]
    folder = tmp_path / "dump"
    ranks = dump_passes(plan, folder)
    assert ranks == active_ranks(plan)
    assert sorted(p.name for p in folder.iterdir()) == sorted(f"rank{rank}" for rank in ranks)
    for rank in ranks:
        files = sorted((folder / f"rank{rank}").iterdir())
        assert [p.name for p in files] == [f"{i:02d}-{name}.txt" for i, name in enumerate(NAMES)]
        want = texts(plan, rank)
        for path, name in zip(files, NAMES, strict=True):
            first, rest = path.read_text(encoding="utf-8").split("\n", 1)
            assert first == f"# rank {rank} of a program on {numbered('rank', ranks)}"
            assert rest == want[name]


def test_what_else_lies_in_the_folder_stays(tmp_path: Path) -> None:
    _, plan = plans()["flat, one idle"]
    other = tmp_path / "rank0" / "notes.txt"
    other.parent.mkdir()
    other.write_text("kept")
    (tmp_path / "rank0" / "00-emit.txt").write_text("of a run before")
    dump_passes(plan, tmp_path)
    assert other.read_text() == "kept"
    assert "forward" in (tmp_path / "rank0" / "00-emit.txt").read_text()
    assert not list(tmp_path.rglob("*.tmp"))


def test_folders_that_cannot_be_made(tmp_path: Path) -> None:
    _, plan = plans()["flat, one idle"]
    (tmp_path / "rank2").write_text("a file")
    with pytest.raises(OutputError, match=r"rank2 cannot be made: .*; name another folder"):
        dump_passes(plan, tmp_path)
