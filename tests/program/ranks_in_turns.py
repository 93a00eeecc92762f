"""A step in micro-batches on all ranks, simulated, beside one device: devices, or accelerators of machines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from hetspmd.dist.communicator import Communicator
from hetspmd.dist.machine_levels import MachineRuntime
from hetspmd.dist.runtime import Runtime
from hetspmd.dist.simulated_world import run_ranks
from hetspmd.lower.turns import LocalTurns, lower_turns
from hetspmd.placement import PARTIAL, is_sharded
from hetspmd.program.layout import Region
from hetspmd.program.lengths import Lengths
from hetspmd.program.level_layout import LevelKey, RankPlace
from hetspmd.program.machine_turn_layout import MachineTurnLayout
from hetspmd.program.micro_batches import MicroBatches
from hetspmd.program.program import Program
from hetspmd.program.schedule import Schedule
from hetspmd.program.turn_layout import TurnLayout
from hetspmd.program.turn_steps import TurnSteps, turn_steps
from hetspmd.rules.theory import Theory
from hetspmd.verify.comparison import largest_error
from hetspmd.verify.reference import ReferenceResult
from workbench import CPU, randomness

Pieces = list[tuple[tuple[Region, ...], torch.Tensor]]
"""Parts of a tensor: slices one of the other, and what lies there."""


def error_in_turns(
    theory: Theory,
    program: Program,
    schedule: Schedule,
    batches: MicroBatches,
    lengths: Lengths,
    model: nn.Module,
    inputs: Sequence[torch.Tensor],
    want: ReferenceResult,
) -> float:
    """The largest relative error of what any rank has after one step."""
    steps = turn_steps(theory, program, schedule, batches)
    layout = TurnLayout(theory, batches, lengths)

    def body(communicator: Communicator) -> tuple[dict[str, torch.Tensor], dict[str, Pieces]]:
        turns = range(batches.turns_of(lengths.world)[communicator.rank])
        local = lower_turns(steps, layout, communicator.rank, CPU, turns)
        return _step(theory, local, Runtime(communicator, randomness(communicator.rank)), model, inputs)

    return _error(steps, layout, run_ranks(lengths.world, body), want)


def error_of_machines(
    steps: TurnSteps,
    layout: MachineTurnLayout,
    model: nn.Module,
    inputs: Sequence[torch.Tensor],
    want: ReferenceResult,
) -> float:
    """The largest relative error of what any accelerator of machines has after one step."""
    theory, counts = layout.theory, layout.of_machines
    world, first = sum(counts), list(layout.first_ranks)
    others = [rank for rank in range(world) if rank not in first]
    machines = [list(range(start, start + count)) for start, count in zip(first, counts, strict=True)]

    def body(communicator: Communicator) -> tuple[dict[str, torch.Tensor], dict[str, Pieces]]:
        local = lower_turns(steps, layout, communicator.rank, CPU, range(layout.batches.count))
        drawn = randomness(communicator.rank)
        inside = communicator.split(machines)
        across = communicator.split([part for part in (first, others) if part])
        runtime = MachineRuntime(
            communicator, drawn, inside=Runtime(inside, drawn), across=Runtime(across, drawn)
        )
        return _step(theory, local, runtime, model, inputs)

    return _error(steps, layout, run_ranks(world, body), want)


def _error(steps: TurnSteps, layout: TurnLayout, ranks: list[Any], want: ReferenceResult) -> float:
    theory, graph = layout.theory, layout.graph
    whole = _expected(theory, want)
    worst, pieces = 0.0, dict[str, Pieces]()
    for name in ranks[0][0]:
        if _key_of(steps, graph, name)[2] == PARTIAL:  # each rank has a summand
            total = torch.stack([values[name] for values, _ in ranks]).sum(0)
            for values, _ in ranks:
                values[name] = total
    for rank, (values, joined) in enumerate(ranks):
        expected = {}
        for name, value in values.items():
            key = _key_of(steps, graph, name)
            expected[name] = _slice(whole[name], layout.regions(key, RankPlace(0, rank)))
            assert expected[name].shape == value.shape, name
        peak = {"peak": max(t.abs().max() for t in whole.values())}
        worst = max(worst, largest_error({**values, **peak}, {**expected, **peak}, 1e-9)[0])
        for name, parts_of in joined.items():
            pieces.setdefault(name, []).extend(parts_of)
    for name, parts_of in pieces.items():
        partial = _key_of(steps, graph, name)[2] == PARTIAL
        got = torch.full_like(whole[name], 0 if partial else torch.nan)
        for regions, value in parts_of:
            part = _slice(got, regions)
            part.copy_(part + value if partial else value)
        worst = max(worst, largest_error({name: got}, {name: whole[name]}, 1e-9)[0])
    return worst


def _slice(value: torch.Tensor, regions: Sequence[Region]) -> torch.Tensor:
    for region in regions:
        value = value.narrow(region.dim, region.start, region.extent)
    return value


def _expected(theory: Theory, want: ReferenceResult) -> dict[str, torch.Tensor]:
    whole = {f"output {i}": want.outputs[o.tensor] for i, o in enumerate(_tensors(theory))}
    if want.loss is not None:
        whole["loss"] = want.loss
    return whole | want.gradients | {f"new {n}": v for n, v in (want.buffers | want.parameters).items()}


def _tensors(theory: Theory) -> list[Any]:
    return [o for o in theory.graph.outputs if o.tensor is not None]


def _key_of(steps: Any, graph: Any, name: str) -> LevelKey:
    if name == "loss":
        return steps.loss
    if name.startswith("output "):
        return steps.outputs[int(name.removeprefix("output "))]
    if name.startswith("new "):
        names = [h.name for h in graph.holders if h.updated is not None]
        return steps.buffers[names.index(name.removeprefix("new "))]
    return steps.gradients[[p.name for p in graph.parameters if p.gradient is not None].index(name)]


def _step(
    theory: Theory, local: LocalTurns, runtime: Runtime, model: nn.Module, inputs: Sequence[torch.Tensor]
) -> tuple[dict[str, torch.Tensor], dict[str, Pieces]]:
    graph, steps, layout = theory.graph, local.steps, local.layout
    rank = runtime.communicator.rank
    parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    given = []
    whole = [parameters[p.name].detach() for p in graph.parameters]
    whole += [buffers[b.name] for b in graph.buffers] + [*inputs]
    for of, value in zip((*graph.parameters, *graph.buffers, *graph.inputs), whole, strict=True):
        key = layout.given(of.tensor, steps.stored.get(of.tensor, 0))
        given.append(_slice(value, layout.regions(key, RankPlace(0, rank))))
    if graph.tangent is not None:
        meta = graph.tensors[graph.tangent]
        given.append(torch.ones(meta.shape, dtype=getattr(torch, meta.dtype)))
    joined: dict[str, Pieces] = {}
    with torch.no_grad():
        sums: list[torch.Tensor | None] = [None] * len(local.summed)
        rows = [key for key in steps.leaving if is_sharded(key[1])]
        read, last = given, len(local.turns) - 1
        for turn, graph_of_turn in enumerate(local.turns):
            own = local.own_values(turn, read, lambda function, args: function(*args))
            left = graph_of_turn(runtime, sums, *read, *own)
            parts, results = left if turn == last else (left, None)
            if turn == 0 < last:
                parts, carried = left[: len(rows)], left[len(rows) :]
            if turn < last:
                read = carried if turn == last - 1 else carried[: len(steps.read)]
            for key, value in zip(rows, parts, strict=True):
                regions = layout.regions(key, RankPlace(turn, rank))
                for index, output in enumerate(steps.outputs):
                    if output == key:
                        joined.setdefault(f"output {index}", []).append((regions, value))
        assert results is not None
        loss, outputs, updated, gradients = results
    assert sums == [None] * len(sums)
    values: dict[str, torch.Tensor] = {} if loss is None else {"loss": loss}
    whole = [i for i, key in enumerate(steps.outputs) if not is_sharded(key[1])]
    values |= {f"output {i}": value for i, value in zip(whole, outputs, strict=True)}
    holders = [h.name for h in graph.holders if h.updated is not None]
    values |= {f"new {name}": value for name, value in zip(holders, updated, strict=True)}
    names = [p.name for p in graph.parameters if p.gradient is not None]
    return values | dict(zip(names, gradients, strict=True)), joined
