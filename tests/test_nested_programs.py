"""Random programs of machines with random programs of their accelerators inside equal the single device.

Machines of 1, 2 and 3 accelerators; the lengths across are random and may be empty. Rows of the inner program
are any that can be had at once with the outer one's: at random, mostly those that need no communication, or
data parallel.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol
from unittest.mock import patch

import pytest
import torch

from hetspmd.dist.communicator import Communicator
from hetspmd.dist.machine_levels import MachineRuntime
from hetspmd.dist.runtime import Runtime
from hetspmd.dist.simulated_world import run_ranks
from hetspmd.lower import lower_place, passes
from hetspmd.placement import PARTIAL
from hetspmd.program.layout import Region
from hetspmd.program.level_layout import LevelKey, LevelLayout, RankPlace, Rows
from hetspmd.program.levels import Nested, Together, between, within
from hetspmd.program.nesting import inner_rows
from hetspmd.program.program import Program
from hetspmd.rules.rule import LocalCall, Triple
from scheduled import nested_steps
from test_random_programs import TOLERANCE, Subject, subject
from workbench import CPU, largest_error, randomness

from program_builder import Builder, build, cheap_random_program, random_program, uneven  # isort: skip  # found by workbench

MODES = ("random", "data parallel", "cheap")


class Composing(Protocol):
    """Says whether rows go together, on each rank."""

    @property
    def places(self) -> Sequence[RankPlace]: ...

    def call(self, instruction: int, rows: Rows, at: RankPlace) -> LocalCall | None: ...


def inner_program(of: Subject, layout: Composing, outer: Program, seed: int, mode: str) -> Program:
    """A program whose rows go together with those of ``outer``."""
    theory, rows = of.theory, inner_rows(outer)
    batch = theory.batch_axes
    dice = random.Random(seed)
    builder = Builder(theory, dice)

    def pick(instruction: int, fitting: list[Triple]) -> Triple:
        axes = dict(zip(theory.rows[instruction], theory.row_axes[instruction], strict=True))
        free = [r for r in fitting if builder.ready(theory.graph.instructions[instruction], r)]
        if mode == "data parallel":
            along = [r for r in fitting if axes[r] in batch]
            partial = [r for r in free if PARTIAL in r.pre]
            return (along or partial or fitting)[0]
        divided = [r for r in free if r.name != "always"]
        if mode == "cheap" and dice.random() < 0.9:
            return dice.choice(divided or free or fitting)
        return dice.choice(fitting)

    for instruction in theory.graph.instructions:
        fitting = list(theory.rows[instruction.id])
        if instruction.is_source:
            builder.compute(instruction, fitting[0])
            continue
        fitting = [
            row
            for row in fitting
            if all(
                layout.call(instruction.id, (rows[instruction.id], row), at) is not None
                for at in layout.places
            )
        ]
        builder.compute(instruction, pick(instruction.id, fitting))
    return builder.finish()


def error_of(of: Subject, nested: Nested, layout: LevelLayout) -> float:
    """The largest relative error of any accelerator's loss, outputs, gradients and buffers."""
    graph, want = of.theory.graph, of.want
    parameters, buffers = dict(of.model.named_parameters()), dict(of.model.named_buffers())
    machine = [at.machine for at in layout.places]
    first = [rank for rank, at in enumerate(layout.places) if at.inside == 0]
    others = [rank for rank in range(layout.world) if rank not in first]
    machines = [[r for r, m in enumerate(machine) if m == v] for v in range(len(layout.accelerators))]

    def body(communicator: Communicator) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        local = lower_place(nested, layout, layout.places[communicator.rank], CPU)
        drawn = randomness(communicator.rank)
        inside = communicator.split(machines)
        across = communicator.split([part for part in (first, others) if part])
        runtime = MachineRuntime(
            communicator, drawn, inside=Runtime(inside, drawn), across=Runtime(across, drawn)
        )
        with torch.no_grad():
            shards = [
                layout.slice(parameters[p.name].detach())
                for layout, p in zip(local.parameters, graph.parameters, strict=True)
            ]
            whole = [buffers[b.name] for b in graph.buffers]
            loss, outputs, updated, saved = local.forward(runtime, *shards, *whole, *of.inputs)
            assert local.backward is not None
            gradients = local.backward(runtime, torch.ones((), dtype=loss.dtype), saved)
        got, expected = {"loss": loss}, {"loss": want.loss}
        for index, (place, value) in enumerate(zip(local.outputs, outputs, strict=True)):
            got[f"output {index}"], expected[f"output {index}"] = (
                value,
                place.slice(want.outputs[place.tensor]),
            )
        for index, value in zip(local.updated, updated, strict=True):
            name = graph.buffers[index].name
            got[name], expected[name] = value, want.buffers[name]
        for index, value in zip(local.differentiable, gradients, strict=True):
            name = graph.parameters[index].name
            got[name], expected[name] = value, local.parameters[index].slice(want.gradients[name])
        return got, expected

    peak = {"peak": max(t.abs().max() for t in want.gradients.values())}
    found = run_ranks(layout.world, body)
    return max(largest_error({**got, **peak}, {**expected, **peak}, 1e-9)[0] for got, expected in found)


BUCKETS = (0, 600, 10**9)
"""Bytes: no buckets, small ones, one of all that may run together."""


def nested_case(of: Subject, seed: int) -> tuple[Nested, LevelLayout]:
    dice = random.Random(seed)
    accelerators = [dice.choice((1, 2, 3)) for _ in range(dice.choice((1, 2, 3)))]
    if max(accelerators) == 1:
        accelerators[0] = 2
    outer = (random_program if seed % 2 else cheap_random_program)(of.theory, seed)
    layout = LevelLayout(of.theory, uneven(of.theory, len(accelerators), seed), accelerators)
    inner = inner_program(of, layout, outer, seed, MODES[seed % 3])
    return nested_steps(
        of.theory, outer, inner, BUCKETS[seed // 3 % 3], BUCKETS[(seed // 3 + seed) % 3]
    ), layout


@pytest.mark.parametrize(
    ("name", "count"),
    [
        *(("mlp", 12), ("conv", 4), ("residual", 4), ("attention", 2), ("vocabulary", 6), ("experts", 4)),
        *(pytest.param(name, 30, marks=pytest.mark.slow)
          for name in ("mlp", "conv", "residual", "attention", "vocabulary", "experts")),
    ],
)  # fmt: skip
def test_random_nested_programs(name: str, count: int) -> None:
    of = subject(name)
    seen: Counter[str] = Counter()
    first = 0 if count < 100 else 1000
    for seed in range(first, first + count):
        nested, layout = nested_case(of, seed)
        error = error_of(of, nested, layout)
        assert error <= TOLERANCE, f"seed {seed}: {error}"
        for step in (*nested.forward, *nested.backward):
            for inside in within(step):
                seen[f"inside {inside.kind}"] += 1
            for move in between(step):
                seen[f"across {move.kind}"] += 1
                seen[f"from {min(move.collected, 2)}"] += 1
                seen[f"to {min(move.handed_out, 2)}"] += 1
            if isinstance(step, Together):
                seen[f"{'bucket inside' if within(step) else 'bucket'} {step.kind}"] += 1
                seen["a bucket from parts and sums"] += len({m.collected for m in between(step)}) > 1
                seen["a bucket to parts and wholes"] += len({m.handed_out for m in between(step)}) > 1
    if name == "mlp":
        kinds = (
            "all_reduce",
            "reduce_scatter",
            "all_gather",
            "all_to_all",
            "grouped_broadcast",
            "grouped_reduce",
        )
        wanted = {f"{where} {kind}" for where in ("inside", "across") for kind in kinds}
        wanted |= {
            "from 0",
            "from 1",
            "from 2",
            "to 0",
            "to 2",
            "bucket all_reduce",
            "bucket inside all_reduce",
        }
        assert set(seen) >= wanted, sorted(wanted - set(seen))


def passed(seen: Counter[str]) -> tuple[passes.Pass, ...]:
    """The passes of lowering, which count in ``seen`` whether they have changed a graph."""

    def counted(each: passes.Pass) -> passes.Pass:
        def run(state: passes.Lowering) -> passes.Lowering:
            before = [str(g) for g in state.graphs.graphs] if state.written else []
            state = each.run(state)
            seen[each.name] += before != [str(g) for g in state.graphs.graphs]
            return state

        return replace(each, run=run)

    return tuple(counted(each) for each in passes.PASSES)


@pytest.mark.parametrize("kind", ["random", "whole"])
def test_passes_of_lowering_leave_every_value_as_it_is(kind: str) -> None:
    """Each one finds something to do for accelerators, whose results stay equal to the single device's and, where
    they are dropped, to those without it. ``whole``: nothing is divided on either level, so that all is fused."""
    of, seen = subject("residual"), Counter[str]()
    kept = tuple(p for p in passes.PASSES if p.name in ("emit", "unread", "check"))
    for seed in range(6 if kind == "random" else 1):
        if kind == "random":
            nested, layout = nested_case(of, seed)
        else:
            program = build(of.theory, lambda _, rows: rows[0])
            layout = LevelLayout(of.theory, uneven(of.theory, 2, seed), (2, 3))
            nested = nested_steps(of.theory, program, program)
        with patch.object(passes, "PASSES", passed(seen)):
            assert error_of(of, nested, layout) <= TOLERANCE
        with patch.object(passes, "PASSES", kept):
            assert error_of(of, nested, layout) <= TOLERANCE
    assert seen["check"] == 0
    wanted = {"aliases", "in-place"} | (
        {"spare"} if kind == "random" else {"convolutions", "scatter", "batch-norms"}
    )
    assert {name for name, count in seen.items() if count} >= wanted


@pytest.mark.parametrize("seed", [1, 3])
def test_a_wrong_part_is_noticed(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison sees accelerators that take the next one's part of what is whole inside."""
    of = subject("mlp")
    nested, layout = nested_case(of, seed)
    assert error_of(of, nested, layout) <= TOLERANCE
    right = LevelLayout.region

    def wrong(self: LevelLayout, key: LevelKey, level: int, at: RankPlace) -> Region | None:
        region = right(self, key, level, at)
        if region is None or level == 0 or at.inside != 1:
            return region
        first = right(self, key, level, RankPlace(at.machine))
        alike = first is not None and first.extent == region.extent
        return replace(region, start=0) if alike else region

    monkeypatch.setattr(LevelLayout, "region", wrong)
    assert error_of(of, nested, layout) > TOLERANCE
