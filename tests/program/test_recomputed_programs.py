"""Programs of graphs that compute activations again, on unlike ranks: each equals the plain step on one device.

Random programs, with any triple for a copy whatever its original has, uneven and empty shards, at once and in
micro-batches; known programs of whole models.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from program_builder import cheap_random_program, random_program, uneven
from ranks_in_turns import error_in_turns
from test_nested_checkpoints import Nested
from torch import nn

from hetspmd.errors import MicroBatchError
from hetspmd.optimize.compiler import plan_for
from hetspmd.program.checker import check
from hetspmd.program.micro_batches import micro_batches
from hetspmd.program.schedule import make_schedule
from hetspmd.program.schedule_check import check_schedule
from hetspmd.program.turn_lengths import turn_lengths
from hetspmd.rules.theory import Theory
from hetspmd.search import constraints as known
from hetspmd.verify.reference import ReferenceResult
from recomputing import Blocks, batch, inputs_of, on_one_device, theory_of
from test_random_programs import MAKERS
from workbench import cluster, simulated_error, traced

RATIOS = (0.5, 0.0, 0.3, 0.2)
CLUSTER = cluster(5, 1, 3, 2)
KINDS = {
    "data parallel": known.data_parallel,
    "sharded parameters": known.zero_like,
    "tensor parallel": known.tensor_parallel,
}
PARTS = ((0.5, 0.34, 0.16), (0.0, 1.0), (1.0,))
"""The part of the samples in each micro-batch: uneven, one of nothing, all at once."""
STACKS: dict[str, dict[str, Any]] = {
    "plain": {}, "dropout": {"dropout": 0.4}, "statistics": {"dropout": 0.3, "statistics": True},
    "nested": {"dropout": 0.4},
}  # fmt: skip


@cache
def stack(name: str) -> tuple[nn.Module, Theory, ReferenceResult]:
    """Two blocks that are computed again, and what one device computes that computes nothing again; or regions in
    two others."""
    if name == "nested":
        regions = Nested(**STACKS[name])
        want = on_one_device(theory_of(regions, batch(), "none"), regions, batch())
        return regions, theory_of(regions, batch(), "checkpoints"), want
    model = Blocks(2, **STACKS[name])
    want = on_one_device(theory_of(model, batch(), "none"), model, batch())
    theory = theory_of(model, batch(), "all")
    assert len(theory.graph.recomputed) == 2
    return model, theory, want


@pytest.mark.parametrize(
    "name", [*(n for n in STACKS if n != "nested"), pytest.param("nested", marks=pytest.mark.slow)]
)
def test_random_programs(name: str) -> None:
    model, theory, want = stack(name)
    inputs = inputs_of(theory.graph, batch())
    for seed in range(24):
        world = 1 + seed // 2 % 4
        lengths = uneven(theory, world, seed)
        program = MAKERS[("thrifty", "searched", "wild")[seed % 3]](theory, seed, lengths)
        check(theory, program)
        schedule = make_schedule(theory, program, (0, 200, 10_000)[seed % 3], prefetch_distance=1 + seed % 2)
        check_schedule(theory.graph, program, schedule)
        error = simulated_error(theory, program, lengths, model, inputs, want, schedule=schedule)
        assert error < 1e-9, f"seed {seed} on {world} devices"


@pytest.mark.parametrize("name", ["plain", "dropout", pytest.param("nested", marks=pytest.mark.slow)])
def test_random_programs_in_micro_batches(name: str) -> None:
    model, theory, want = stack(name)
    inputs = inputs_of(theory.graph, batch())
    batches = micro_batches(theory, 2)
    for seed in range(12):
        program = (random_program if seed % 2 else cheap_random_program)(theory, seed)
        parts = PARTS[seed % 3]
        turns = turn_lengths(theory, batches.loop.axes, parts)
        error = error_in_turns(
            theory,
            program,
            make_schedule(theory, program, 1000.0),
            replace(batches, count=len(parts), turns=turns),
            uneven(theory, 1 + seed % 4, seed),
            model,
            inputs,
            want,
        )
        assert error < 1e-9, seed


QUICK = {"gpt2"}
MODELS = [
    pytest.param(name, marks=() if name in QUICK else pytest.mark.slow)
    for name in ("gpt2", "bert-eager", "llama", "vit", "gemma2", "bert-moe")
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", MODELS)
def test_known_programs(name: str, kind: str) -> None:
    """At once, and in one to three micro-batches, one of nothing among them."""
    t = traced(name)
    want = on_one_device(t.theory, t.model, t.example)
    theory = theory_of(t.model, t.example, "layers.*" if name == "bert-moe" else "all", t.loss)
    inputs = inputs_of(theory.graph, t.example)
    plan = plan_for(theory, CLUSTER, KINDS[kind](theory), RATIOS)
    limit = 1e-6 if any(tensor.dtype == "float32" for tensor in theory.graph.tensors) else 1e-9
    error = simulated_error(theory, plan.program, plan.lengths, t.model, inputs, want, schedule=plan.schedule)
    assert error < limit
    try:
        batches = micro_batches(theory, 2)
    except MicroBatchError:
        assert name == "bert-moe"
        return
    for parts in PARTS:
        turns = turn_lengths(theory, batches.loop.axes, parts)
        loop = replace(batches, count=len(parts), turns=turns)
        error = error_in_turns(theory, plan.program, plan.schedule, loop, plan.lengths, t.model, inputs, want)
        assert error < limit, parts


def test_statistics_cannot_be_split_in_time() -> None:
    _, theory, _ = stack("statistics")
    with pytest.raises(MicroBatchError):
        micro_batches(theory, 2)
