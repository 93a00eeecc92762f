"""What the accelerators of machines add to a step across machines: seconds and bytes.

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

Bytes are counted by the same liveness as those of a program of one level (:mod:`hetspmd.cost.liveness`), over the
order of execution on the first accelerator of each machine, which has the largest part of what is divided. A
collective holds what its kind holds between devices, be it between machines or inside one. For one between machines
the first accelerator also holds what it collects while it starts, and a result of which it hands out slices.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from math import prod

import numpy as np

from hetspmd.cluster.cluster import Cluster
from hetspmd.cluster.collective_buffers import Carried, over_time
from hetspmd.cluster.collective_kinds import KINDS
from hetspmd.cluster.devices import Machine
from hetspmd.cluster.machines import accelerator
from hetspmd.cost.liveness import Liveness, Move, Transit
from hetspmd.cost.memory import OPTIMIZER_BYTES, TEMPORARIES
from hetspmd.cost.model import CostModel
from hetspmd.placement import PARTIAL, REPLICATE, Placement, is_sharded, sharded_dim
from hetspmd.program.lengths import Lengths
from hetspmd.program.level_layout import LevelKey, LevelLayout, RankPlace
from hetspmd.program.levels import (
    Across,
    Both,
    InsideCollective,
    Key,
    Nested,
    NestedStep,
    Together,
    between,
    within,
)
from hetspmd.program.program import Communicate
from hetspmd.trace.graph import ITEM_SIZES

__all__ = ["inside_bytes", "inside_seconds"]


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
        return _bytes(layout, (tensor, outer, REPLICATE), machine) / bandwidth

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


def _bytes(layout: LevelLayout, key: Key, machine: int) -> int:
    """Of a value on the first accelerator of a machine."""
    meta = layout.graph.tensors[key[0]]
    return prod(layout.shape(key, RankPlace(machine, 0))) * ITEM_SIZES[meta.dtype]


def inside_bytes(
    layout: LevelLayout,
    nested: Nested,
    arrivals: Mapping[Communicate, int] | None = None,
    *,
    optimizer_bytes: int = OPTIMIZER_BYTES,
) -> tuple[int, ...]:
    """Peak bytes of the first accelerator of each machine of ``layout``.

    ``arrivals``: the instruction that runs first after a collective between machines has ended; one that is not
    there ends where its result is first read.
    """
    theory, graph = layout.theory, layout.graph
    machines = range(len(layout.accelerators))
    order: tuple[NestedStep, ...] = (*nested.forward, *nested.backward)
    steps, boundary = len(order), len(nested.forward)
    live = Liveness(theory, {key for key, copied in nested.saved if copied})
    lasting = [(tensor, form) for tensor, form in nested.stored.items()]
    lasting += [(constant.tensor, REPLICATE) for constant in graph.constants]
    lasting += [] if graph.tangent is None else [(graph.tangent, REPLICATE)]
    for tensor, form in lasting:
        live.hold((tensor, form, REPLICATE), steps)
    for at, step in enumerate(order):
        if isinstance(step, Both):
            live.compute(step, at, steps, late=at >= boundary)
        else:
            live.communicate(step, at, late=at >= boundary, nothing=layout.is_nothing(step))
    results = (*((nested.loss,) if nested.loss else ()), *nested.outputs, *nested.buffers)
    live.leave(results, nested.gradients, steps)
    spare = live.give_memory()

    def local(key: LevelKey) -> list[int]:
        tensor, outer, inner = key
        return [_bytes(layout, (tensor, outer, inner), machine) for machine in machines]

    held = [
        (live.born[v], live.last[v] + 1, local(key))
        for v, key in enumerate(live.sizes)
        if live.storage[v] == v
    ]
    running = {step.instruction: at for at, step in enumerate(order) if isinstance(step, Both)}
    for transit in live.transits:
        until = min(transit.wait, _arrival(transit.step, arrivals or {}, running, steps))
        for_machines = [
            dict(_transit(layout, transit, until, machine, spare=id(transit.step) in spare))
            for machine in machines
        ]
        held += [
            (*window, [each.get(window, 0) for each in for_machines])
            for window in dict.fromkeys(window for each in for_machines for window in each)
        ]
    change = np.zeros((steps + 2, len(machines)), dtype=np.int64)
    for first, end, nbytes in held:
        change[first] += nbytes
        change[min(end, steps + 1)] -= nbytes
    over = change.cumsum(axis=0)
    trained = [(t, np.array(local(key))) for key in live.optimized for t in key[:1]]
    sizes = {t: ITEM_SIZES[graph.tensors[t].dtype] for t, _ in trained}
    state = sum((nbytes // sizes[t] * optimizer_bytes for t, nbytes in trained), np.zeros_like(over[0]))
    updating = [nbytes * TEMPORARIES for _, nbytes in trained] if optimizer_bytes else []
    most = np.maximum(over.max(axis=0), over[steps] + np.max([np.zeros_like(over[0]), *updating], axis=0))
    return tuple(int(b) for b in most + state)


def _arrival(step: Move, arrivals: Mapping[Communicate, int], running: Mapping[int, int], steps: int) -> int:
    """The place in the order at which a collective has ended; behind the last of the ``steps`` if it is not known.
    ``running``: where each instruction runs."""
    if not isinstance(step, Across):
        return steps
    instruction = arrivals.get(Communicate(step.tensor, step.kind, step.source, step.target))
    return steps if instruction is None else running.get(instruction, steps)


def _transit(
    layout: LevelLayout, transit: Transit, until: int, machine: int, *, spare: bool
) -> Counter[tuple[int, int]]:
    """What the first accelerator of a machine holds for a collective, besides its operand and its result: bytes by
    the first step and the step behind the last. It has completed before step ``until``."""
    step, start, wait = transit.step, transit.start, transit.wait
    nbytes, sharded, target, several = _carried(layout, step, machine)
    held_bytes = Counter[tuple[int, int]]()
    if not nbytes:
        return held_bytes
    kind = KINDS[step.kind]
    if kind.buffers is not None:
        form = step.source if is_sharded(step.source) else step.target
        carried = Carried(
            world=len(layout.accelerators) if isinstance(step, Across) else layout.accelerators[machine],
            nbytes=nbytes,
            largest=_largest(layout, step, machine),
            several=several,
            moved=is_sharded(form) and sharded_dim(form) != 0,
            bucket=transit.shared,
            spare=spare,
        )
        for first, end, held in over_time(kind.buffers(carried), start, wait, until):
            held_bytes[first, end] += held.whole + (held.sharded * sharded + held.target * target) // nbytes
    if isinstance(step, Across) and layout.accelerators[machine] > 1:
        if step.collected != REPLICATE:
            copies = 2 if is_sharded(step.collected) and sharded_dim(step.collected) else 1
            collected = _bytes(layout, (step.tensor, step.source, REPLICATE), machine)
            held_bytes[start, start + 1] += copies * collected
        if is_sharded(step.handed_out):
            result = _bytes(layout, (step.tensor, step.target, REPLICATE), machine)
            held_bytes[start, wait + 1] += result
            held_bytes[wait, wait + 1] += result if sharded_dim(step.handed_out) else 0
    return held_bytes


def _carried(layout: LevelLayout, step: Move, machine: int) -> tuple[int, int, int, bool]:
    """Of a collective: bytes of the whole that it is of, of the part along its sharded end and of the one along its
    target that the first accelerator of a machine has, and whether several have one."""
    form = step.source if is_sharded(step.source) else step.target
    if isinstance(step, Across):
        parts = [_bytes(layout, (step.tensor, form, REPLICATE), m) for m in range(len(layout.accelerators))]
        target = _bytes(layout, (step.tensor, step.target, REPLICATE), machine)
        return layout.graph.tensors[step.tensor].nbytes, parts[machine], target, sum(map(bool, parts)) > 1
    assert isinstance(step, InsideCollective)
    if layout.accelerators[machine] == 1:
        return 0, 0, 0, False
    whole, part, target = (
        _bytes(layout, (step.tensor, step.outer, each), machine) for each in (REPLICATE, form, step.target)
    )
    return whole, part, target, part < whole


def _largest(layout: LevelLayout, step: Move, machine: int) -> int:
    """Bytes of the largest part of what a collective is of."""
    form = step.source if is_sharded(step.source) else step.target
    if isinstance(step, Across):
        return max(_bytes(layout, (step.tensor, form, REPLICATE), m) for m in range(len(layout.accelerators)))
    assert isinstance(step, InsideCollective)
    return _bytes(layout, (step.tensor, step.outer, form), machine)
