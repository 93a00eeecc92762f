"""What the accelerators of machines add to a step across machines: seconds.

The cost model of virtual devices (:mod:`hetspmd.cluster.machines`) has a machine compute as fast as its k
accelerators together, and counts the sums of gradients inside. What it leaves out is added here, for the slowest
machine of each step and as if nothing overlapped it. For a machine's part of E bytes, inside latency L and
bandwidth b:

    all-reduce inside                   2 L + 2 (k - 1) / k E / b
    reduce-scatter, all-gather inside   L + (k - 1) / k E / b          to and from the first, in slices
    all-to-all inside                   L + E / k / b
    to and from the first, whole        L + E / b                      a reduce, a broadcast

of gradients only the latencies; a bucket inside has one latency, as has what is whole of one between machines.
Where the inner row divides nothing, the seconds in which one accelerator runs what the machine was supposed to
run, less those, are added too.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np

from hetspmd.cluster.cluster import Cluster
from hetspmd.cluster.collective_kinds import KINDS
from hetspmd.cluster.devices import Machine
from hetspmd.cluster.machines import accelerator
from hetspmd.cost.model import CostModel
from hetspmd.placement import PARTIAL, REPLICATE, Placement, is_sharded
from hetspmd.program.lengths import Lengths
from hetspmd.program.level_layout import LevelKey, LevelLayout, RankPlace
from hetspmd.program.levels import (
    Across,
    Both,
    InsideCollective,
    Nested,
    Together,
    between,
    rows_of,
    value_of,
    within,
)
from hetspmd.program.machine_turn_layout import MachineTurnLayout
from hetspmd.program.turn_steps import TurnSteps
from hetspmd.trace.graph import ITEM_SIZES


def inside_seconds(costs: CostModel, lengths: Lengths, nested: Nested, layout: LevelLayout) -> float:
    """Seconds that the accelerators add to a step that ``costs`` predicts. ``costs.cluster`` has the active
    machines."""
    places = [RankPlace(machine) for machine in range(lengths.world)]
    seconds, alone = 0.0, _alone(costs)
    for step in (*nested.forward, *nested.backward):
        if isinstance(step, Both):
            seconds += _more_computed(costs, alone, lengths, step)
        else:
            seconds += _communicated(costs, layout, step, places)
    return seconds


def inside_seconds_in_turns(
    costs: CostModel, lengths: Lengths, steps: TurnSteps, layout: MachineTurnLayout
) -> float:
    """The same of a step in micro-batches. What is in the loop is communicated in each of them, also a gradient
    that the machines' seconds count once."""
    seconds, alone = 0.0, _alone(costs)
    outside = [RankPlace(0, rank) for rank in layout.first_ranks]
    for phase, step in steps.together(("before", "in", "after")):
        if isinstance(step, Both):
            seconds += _more_computed(costs, alone, lengths, step)
            seconds += _in_whole_units(costs, lengths, step, layout)
        elif phase != "in":
            seconds += _communicated(costs, layout, step, outside)
        else:
            counted = 1 - 1 / layout.batches.count
            for turn, times in layout.alike_turns.items():
                places = [RankPlace(turn, rank) for rank in layout.first_ranks]
                seconds += times * _communicated(costs, layout, step, places, counted)
    return seconds


def _alone(costs: CostModel) -> CostModel:
    """The costs where one accelerator of each machine does all that the machine does."""
    each = Cluster(tuple(map(accelerator, costs.cluster.devices)), costs.cluster.network)
    return CostModel(costs.theory, each, costs.batches)


def _more_computed(costs: CostModel, alone: CostModel, lengths: Lengths, step: Both) -> float:
    """Seconds more than the machines' where the inner row divides nothing."""
    if step.inner.factor is not None:
        return 0.0
    row = costs.row_index(step.instruction, step.outer)
    whole = np.array(alone.row_seconds(step.instruction, row, lengths))
    part = np.array(costs.row_seconds(step.instruction, row, lengths))
    return float(max(whole.max() - part.max(), 0.0))


def _in_whole_units(costs: CostModel, lengths: Lengths, step: Both, layout: MachineTurnLayout) -> float:
    """Seconds more than the machines' since a turn has few samples, which are divided in whole units: those of the
    accelerators that have most, in each turn."""
    theory, rows = costs.theory, rows_of(step)
    if step.inner.factor is None:
        return 0.0
    pairs = zip(theory.rows[step.instruction], theory.row_axes[step.instruction], strict=True)
    axis = next((axis for row, axis in pairs if row == step.inner and axis is not None), None)
    if axis is None:
        return 0.0
    row = costs.row_index(step.instruction, step.outer)
    part = np.array(costs.row_seconds(step.instruction, row, lengths))
    launches = layout.batches.count if layout.batches.loop.phases[step.instruction] == "in" else 1
    more = part.copy()
    for machine, device in enumerate(costs.cluster.devices):
        most = total = 0
        for turn, times in layout.alike_turns.items():
            _, units = layout.shares(axis, rows, turn, machine)
            most, total = most + times * max(units) * len(units), total + times * sum(units)
        work = max(part[machine] - launches * device.launch, 0.0)
        more[machine] += work * (most / total - 1) if total else 0.0
    return float(max(more.max() - part.max(), 0.0))


def _communicated(
    costs: CostModel,
    layout: LevelLayout,
    step: InsideCollective | Across | Together,
    places: Sequence[RankPlace],
    of_gradients: float = 0.0,
) -> float:
    """Seconds of a collective inside the slowest machine, of which ``places`` has the first accelerators.
    ``of_gradients``: the part that counts of the bytes of gradients."""
    if layout.is_nothing(step):
        return 0.0
    machines = [device.machine for device in costs.cluster.devices]
    pairs = zip(places, machines, strict=True)
    return max(0.0 if of is None else _seconds(layout, step, at, of, of_gradients) for at, of in pairs)


def _seconds(
    layout: LevelLayout,
    step: InsideCollective | Across | Together,
    at: RankPlace,
    of: Machine,
    of_gradients: float,
) -> float:
    latency, bandwidth, k = of.inside.latency, of.inside.bandwidth, of.accelerators

    def moved(member: InsideCollective | Across, form: Placement) -> float:
        part = of_gradients if member.tensor in layout.theory.deferred else 1.0
        return part * local_bytes(layout, (*value_of(member), form, REPLICATE), at) / bandwidth

    if inside := within(step):
        # Shards are even: M is 1 / k, and an exchange sends no more than one.
        terms = KINDS[step.kind].formula(k)
        whole = sum(moved(m, m.outer) for m in inside)
        latencies = terms.latency + terms.per_shard * k
        return (
            latencies * latency
            + (terms.per_byte + terms.per_largest / k) * whole
            + terms.per_exchange * whole / k
        )
    members = between(step)
    cut = sum(is_sharded(m.collected) for m in members) + sum(is_sharded(m.handed_out) for m in members)
    whole_parts = (
        any(m.collected == PARTIAL for m in members),
        any(m.handed_out == REPLICATE for m in members),
    )
    seconds = (cut + sum(whole_parts)) * latency
    for m in members:
        if m.collected != REPLICATE:
            seconds += moved(m, m.source) * (1 if m.collected == PARTIAL else (k - 1) / k)
        seconds += moved(m, m.target) * ((k - 1) / k if is_sharded(m.handed_out) else 1)
    return seconds


def local_bytes(layout: LevelLayout, key: LevelKey, at: RankPlace) -> int:
    """Of a value at a place."""
    meta = layout.graph.tensors[key[0]]
    return prod(layout.shape(key, at)) * ITEM_SIZES[meta.dtype]
