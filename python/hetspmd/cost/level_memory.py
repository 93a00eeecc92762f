"""Peak bytes of the accelerators of machines, in a step across machines.

Bytes are counted by the same liveness as those of a program of one level (:mod:`hetspmd.cost.liveness`), over the
order of execution on the first accelerator of each machine, which has the largest part of what is divided. A
collective holds what its kind holds between devices, be it between machines or inside one. For one between machines
the first accelerator also holds what it collects while it starts, and a result of which it hands out slices.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import numpy as np

from hetspmd.cluster.collective_buffers import Carried, HeldBytes, over_time
from hetspmd.cluster.collective_kinds import KINDS
from hetspmd.cost.level_costs import local_bytes
from hetspmd.cost.liveness import Liveness, Move, Transit
from hetspmd.cost.memory import OPTIMIZER_BYTES, TEMPORARIES
from hetspmd.placement import REPLICATE, is_sharded, sharded_dim
from hetspmd.program.level_layout import LevelKey, LevelLayout, RankPlace
from hetspmd.program.levels import (
    Across,
    Both,
    InsideCollective,
    Nested,
    NestedStep,
)
from hetspmd.program.program import Communicate
from hetspmd.trace.graph import ITEM_SIZES


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
    graph, machines = layout.graph, range(len(layout.accelerators))
    order: tuple[NestedStep, ...] = (*nested.forward, *nested.backward)
    steps, live = len(order), _liveness(layout, nested)
    spare = live.give_memory()

    sizes = MachineBytes(layout)

    def local(key: LevelKey) -> list[int]:
        return [sizes.of(key, machine) for machine in machines]

    held = [
        (live.born[v], live.last[v] + 1, local(key))
        for v, key in enumerate(live.sizes)
        if live.storage[v] == v
    ]
    running = {step.instruction: at for at, step in enumerate(order) if isinstance(step, Both)}
    for transit in live.transits:
        until = min(transit.wait, _arrival(transit.step, arrivals or {}, running, steps))
        for_machines = [
            dict(in_transit(sizes, transit, until, machine, spare=id(transit.step) in spare))
            for machine in machines
        ]
        held += [
            (*window, [each.get(window, 0) for each in for_machines])
            for window in dict.fromkeys(window for each in for_machines for window in each)
        ]
    over = np.zeros((steps + 2, len(machines)), dtype=np.int64)
    for first, end, nbytes in held:
        over[first] += nbytes
        over[min(end, steps + 1)] -= nbytes
    over = over.cumsum(axis=0)
    most = over.max(axis=0)
    if not optimizer_bytes:
        return tuple(int(b) for b in most)
    place = {p.tensor: at for at, p in enumerate(graph.parameters)}
    updates = sorted(live.optimized, key=lambda key: place[key[0]])
    trained = [(np.array(local(key)), ITEM_SIZES[graph.tensors[key[0]].dtype]) for key in updates]
    before = [np.zeros_like(most), *(nbytes for nbytes, _ in trained)]
    updating = [
        over[steps] + nbytes * TEMPORARIES + b for (nbytes, _), b in zip(trained, before, strict=False)
    ]
    state = sum((nbytes // size * optimizer_bytes for nbytes, size in trained), np.zeros_like(most))
    return tuple(int(b) for b in np.max([most, *updating], axis=0) + state)


class MachineBytes:
    """The bytes of values, ``(tensor, form on machines, form inside)``, on the first accelerator of each machine,
    of which there are so many ``accelerators``."""

    def __init__(self, layout: LevelLayout) -> None:
        self.layout, self.graph = layout, layout.graph
        self.accelerators = layout.accelerators

    def of(self, key: LevelKey, machine: int) -> int:
        """Those of a value."""
        return local_bytes(self.layout, key, RankPlace(machine))

    def whole(self, tensor: int) -> int:
        """Those of all of a tensor, as a collective carries it."""
        return self.graph.tensors[tensor].nbytes


def _liveness(layout: LevelLayout, nested: Nested) -> Liveness:
    """What the steps hold: parameters, buffers, inputs and constants from the beginning to the end."""
    theory, graph = layout.theory, layout.graph
    boundary, steps = len(nested.forward), len(nested.forward) + len(nested.backward)
    live = Liveness(theory, {key for key, copied in nested.saved if copied})
    lasting = list(nested.stored.items())
    lasting += [] if graph.tangent is None else [(graph.tangent, REPLICATE)]
    for tensor, form in lasting:
        live.hold((tensor, form, REPLICATE), steps)
    live.follow(
        (
            (step, at >= boundary, not isinstance(step, Both) and layout.is_nothing(step))
            for at, step in enumerate((*nested.forward, *nested.backward))
        ),
        steps,
    )
    loss = (nested.loss,) if nested.loss else ()
    live.leave((*loss, *nested.outputs, *nested.buffers), nested.gradients, steps)
    return live


def _arrival(step: Move, arrivals: Mapping[Communicate, int], running: Mapping[int, int], steps: int) -> int:
    """The place in the order at which a collective has ended; behind the last of the ``steps`` if it is not known.
    ``running``: where each instruction runs."""
    if not isinstance(step, Across):
        return steps
    instruction = arrivals.get(Communicate(step.tensor, step.kind, step.source, step.target))
    return steps if instruction is None else running.get(instruction, steps)


def in_transit(
    sizes: MachineBytes, transit: Transit, until: int, machine: int, *, spare: bool
) -> Counter[tuple[int, int]]:
    """What the first accelerator of a machine holds for a collective, besides its operand and its result: bytes by
    the first step and the step behind the last. It has completed before step ``until``."""
    step, start, wait = transit.step, transit.start, transit.wait
    nbytes, sharded, target, several = _carried(sizes, step, machine)
    held_bytes = Counter[tuple[int, int]]()
    if not nbytes:
        return held_bytes
    kind, ending = KINDS[step.kind], 0
    if kind.buffers is not None:
        form = step.source if is_sharded(step.source) else step.target
        carried = Carried(
            world=len(sizes.accelerators) if isinstance(step, Across) else sizes.accelerators[machine],
            nbytes=nbytes,
            largest=_largest(sizes, step, machine),
            several=several,
            moved=is_sharded(form) and sharded_dim(form) != 0,
            bucket=transit.shared,
            spare=spare,
        )
        buffers = kind.buffers(carried)
        for first, end, held in over_time(buffers, start, wait, until):
            held_bytes[first, end] += _bytes_of(held, nbytes, sharded, target)
        if max(start, (until if buffers.early else wait) - 1) == start:
            ending = _bytes_of(buffers.end, nbytes, sharded, target)
    if isinstance(step, Across) and sizes.accelerators[machine] > 1:
        if step.collected != REPLICATE:
            copies = 2 if is_sharded(step.collected) and sharded_dim(step.collected) else 1
            collected = sizes.of((step.tensor, step.source, REPLICATE), machine)
            # It is let go of before a result is made, at whichever of the two more is held.
            held_bytes[start, start + 1] += max(copies * collected - ending, 0)
        if is_sharded(step.handed_out):
            result = sizes.of((step.tensor, step.target, REPLICATE), machine)
            held_bytes[start, wait + 1] += result
            held_bytes[wait, wait + 1] += result if sharded_dim(step.handed_out) else 0
    return held_bytes


def _bytes_of(held: HeldBytes, nbytes: int, sharded: int, target: int) -> int:
    """What the first accelerator of a machine holds of it: of a tensor of so many bytes it has these of the sharded
    end and of the target."""
    return held.whole + (held.sharded * sharded + held.target * target) // nbytes


def _carried(sizes: MachineBytes, step: Move, machine: int) -> tuple[int, int, int, bool]:
    """Of a collective: bytes of the whole that it is of, of the part along its sharded end and of the one along its
    target that the first accelerator of a machine has, and whether several have one."""
    form = step.source if is_sharded(step.source) else step.target
    if isinstance(step, Across):
        parts = [sizes.of((step.tensor, form, REPLICATE), m) for m in range(len(sizes.accelerators))]
        target = sizes.of((step.tensor, step.target, REPLICATE), machine)
        return sizes.whole(step.tensor), parts[machine], target, sum(map(bool, parts)) > 1
    assert isinstance(step, InsideCollective)
    if sizes.accelerators[machine] == 1:
        return 0, 0, 0, False
    whole, part, target = (
        sizes.of((step.tensor, step.outer, each), machine) for each in (REPLICATE, form, step.target)
    )
    return whole, part, target, part < whole


def _largest(sizes: MachineBytes, step: Move, machine: int) -> int:
    """Bytes of the largest part of what a collective is of."""
    form = step.source if is_sharded(step.source) else step.target
    if isinstance(step, Across):
        return max(sizes.of((step.tensor, form, REPLICATE), m) for m in range(len(sizes.accelerators)))
    assert isinstance(step, InsideCollective)
    return sizes.of((step.tensor, step.outer, form), machine)
