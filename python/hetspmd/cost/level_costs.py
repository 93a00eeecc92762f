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

from math import prod

import numpy as np

from hetspmd.cluster.cluster import Cluster
from hetspmd.cluster.collective_kinds import KINDS
from hetspmd.cluster.devices import Machine
from hetspmd.cluster.machines import accelerator
from hetspmd.cost.model import CostModel
from hetspmd.placement import PARTIAL, REPLICATE, Placement, is_sharded
from hetspmd.program.lengths import Lengths
from hetspmd.program.level_layout import LevelLayout, RankPlace
from hetspmd.program.levels import (
    Across,
    Both,
    InsideCollective,
    Key,
    Nested,
    Together,
    between,
    within,
)
from hetspmd.trace.graph import ITEM_SIZES


def inside_seconds(costs: CostModel, lengths: Lengths, nested: Nested, layout: LevelLayout) -> float:
    """Seconds that the accelerators add to a step that ``costs`` predicts. ``costs.cluster`` has the active
    machines."""
    devices = costs.cluster.devices
    each = Cluster(tuple(map(accelerator, devices)), costs.cluster.network)
    alone = CostModel(costs.theory, each)
    seconds = 0.0
    for step in (*nested.forward, *nested.backward):
        if layout.is_nothing(step):
            continue
        if not isinstance(step, Both):
            times = [
                0.0 if device.machine is None else _seconds(layout, step, machine, device.machine)
                for machine, device in enumerate(devices)
            ]
            seconds += max(times)
        elif step.inner.factor is None:
            row = costs.row_index(step.instruction, step.outer)
            whole = np.array(alone.row_seconds(step.instruction, row, lengths))
            part = np.array(costs.row_seconds(step.instruction, row, lengths))
            seconds += float(max(whole.max() - part.max(), 0.0))
    return seconds


def _seconds(
    layout: LevelLayout, step: InsideCollective | Across | Together, machine: int, of: Machine
) -> float:
    latency, bandwidth, k = of.inside.latency, of.inside.bandwidth, of.accelerators

    def moved(tensor: int, outer: Placement) -> float:
        if tensor in layout.theory.deferred:
            return 0.0
        return local_bytes(layout, (tensor, outer, REPLICATE), machine) / bandwidth

    if inside := within(step):
        # Shards are even: M is 1 / k, and an exchange sends no more than one.
        terms = KINDS[step.kind].formula(k)
        whole = sum(moved(m.tensor, m.outer) for m in inside)
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
            seconds += moved(m.tensor, m.source) * (1 if m.collected == PARTIAL else (k - 1) / k)
        seconds += moved(m.tensor, m.target) * ((k - 1) / k if is_sharded(m.handed_out) else 1)
    return seconds


def local_bytes(layout: LevelLayout, key: Key, machine: int) -> int:
    """Of a value on the first accelerator of a machine."""
    meta = layout.graph.tensors[key[0]]
    return prod(layout.shape(key, RankPlace(machine, 0))) * ITEM_SIZES[meta.dtype]
