"""The passes of a step in micro-batches, and the text of the graphs of its turns."""

from __future__ import annotations

import re
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch
from small_models import Case, case
from small_plans import cluster
from test_passes import CPU, NAMES, Compared

import hetspmd
from hetspmd.dist.communicator import Communicator
from hetspmd.dist.random import Randomness
from hetspmd.dist.simulated_world import run_ranks
from hetspmd.lower import LocalProgram, lower_plan
from hetspmd.lower.instrument import instrumented
from hetspmd.lower.turn_text import local_text
from hetspmd.lower.turns import TurnGraphs
from hetspmd.plan.plan import Plan
from hetspmd.run.starting import runtime_of

pytestmark = pytest.mark.filterwarnings("ignore::hetspmd.errors.DroppedOutputWarning")
KINDS = {
    "ZeRO-1": {"zero": 1},
    "ZeRO-3, computed again": {"zero": 3, "recompute": "all"},
}


@cache
def planned(kind: str) -> tuple[Case, Plan]:
    c = case("mlp")
    plan = hetspmd.compile(c.model, c.batch, cluster(4, 2, 1), micro_batches=3, **KINDS[kind])
    assert len(plan.active) == 3
    return c, plan


def texts(plan: Plan, rank: int) -> dict[str, str]:
    found: dict[str, str] = {}
    lower_plan(plan, rank, CPU, lambda _, each, graphs: found.update({each.name: local_text(graphs)}))
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_every_rank_goes_through_the_whole_list(kind: str) -> None:
    _, plan = planned(kind)
    changed: set[str] = set()
    for rank in range(3):
        found = texts(plan, rank)
        assert list(found) == NAMES
        changed |= {b for a, b in pairwise(NAMES) if found[a] != found[b]}
        assert found == texts(plan, rank)
    assert "spare" in changed
    assert len(changed) > 1, "passes rewrite the graphs of turns, too"


@pytest.mark.parametrize("kind", KINDS)
def test_dtypes_and_shapes_are_those_of_a_run(kind: str) -> None:
    c, plan = planned(kind)
    parameters, buffers = dict(c.model.named_parameters()), dict(c.model.named_buffers())

    def body(communicator: Communicator) -> int:
        seen: list[Any] = []
        program: LocalProgram = lower_plan(plan, communicator.rank, CPU, lambda *now: seen.append(now[2]))
        graphs = seen[-1]
        assert isinstance(graphs, TurnGraphs)
        randomness = Randomness(5, communicator.rank, CPU, reference=True)
        randomness.begin_step()
        compared = [Compared(turn) for turn in graphs.turns]
        for each, turn in zip(compared, graphs.turns, strict=True):
            name = f"turn{turn.number}"
            module = instrumented(getattr(program.forward, name), each, name, each.behind)
            setattr(program.forward, name, module)
        with torch.no_grad():
            shards = [
                held.slice(parameters[p.name].detach())
                for held, p in zip(program.parameters, plan.graph.parameters, strict=True)
            ]
            whole = [buffers[b.name].clone() for b in plan.graph.buffers]
            inputs = [c.batch[i.path] for i in plan.graph.inputs]
            program.forward(runtime_of(communicator, plan, randomness), *shards, *whole, *inputs)
        return min(each.count for each in compared)

    assert all(count > 20 for count in run_ranks(3, body))


def test_what_a_turn_is_given_and_returns() -> None:
    _, plan = planned("ZeRO-1")
    first, middle, last = texts(plan, 0)["check"].split("\n\n")
    assert first.startswith(
        "micro-batch 0, with what is before the loop\n  %runtime = runtime\n  %sums = sums\n"
    )
    assert middle.startswith("micro-batch 1\n")
    assert last.startswith("micro-batch 2, with what is after the loop\n")
    names = [p.name for p in plan.graph.parameters]
    given = [
        re.findall(r"^  %value\d+_\S+ [^=]* = (.*)$", text, re.MULTILINE) for text in (first, middle, last)
    ]
    assert [name for name in given[0] if name.startswith("parameter ")] == [f"parameter {n}" for n in names]
    assert f"input {plan.graph.inputs[0].path}" in given[0]
    assert all(name.endswith(", from the first turn") for name in given[1] + given[2])
    returned = [re.findall(r"^  return (.*) = %", text, re.MULTILINE) for text in (first, middle, last)]
    handed = [name.removesuffix(", for later turns") + ", from the first turn" for name in returned[0]]
    assert handed[: len(given[1])] == given[1]
    assert handed == given[2]
    assert returned[1] == []
    assert "loss" in returned[2]
    learned = [f"gradient of {p.name}" for p in plan.graph.parameters if p.gradient is not None]
    assert [name for name in returned[2] if name.startswith("gradient of ")] == learned
    assert "accumulate(%sums, 0, " in middle
