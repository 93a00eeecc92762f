"""Seconds and bytes of a training step: HAP 3.2's stage model.

    t(Q, B) = sum over stages (comm + max_j comp_j)

All devices meet at a collective, so each collective begins a stage; the first stage has none. Memory per
device is the peak over the program's order of what is then held: parameters, buffers and inputs during the
whole step, gradients from where they are produced to the end, any other tensor from its step to the last that
reads it (a view holds what it looks at), and the optimizer's state.

A program may run on some of a cluster's devices only. The others are idle: after forward they get the loss,
and each output that is returned whole, by one broadcast of ``latency + bytes / bandwidth`` seconds each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from hetspmd.balance.lengths import Lengths
from hetspmd.cost.cluster import Cluster
from hetspmd.cost.model import Array, CostModel, Index, MoveForm
from hetspmd.forms import IDENTITY, Form, all_gather, is_sharded, sharded_dim
from hetspmd.rules.theory import Theory
from hetspmd.synth.program import Communicate, Compute, Program
from hetspmd.trace.graph import Graph

__all__ = [
    "OPTIMIZER_BYTES", "Stages", "StepCost", "idle_seconds", "memory_bytes", "on_cluster", "step_cost",
]  # fmt: skip

OPTIMIZER_BYTES = 8
"""Bytes of optimizer state per parameter element: two float32 moments of Adam."""


@dataclass(frozen=True)
class StepCost:
    """The prediction for one training step.

    step_seconds           compute_seconds + communication_seconds
    compute_seconds        the slowest device's, summed over stages
    communication_seconds  of all collectives, and of what idle devices are sent
    memory_bytes           peak per device of the cluster, 0 for an idle one
    stages                 their number
    per_device_compute     seconds that each device of the cluster computes, 0 for an idle one
    """

    step_seconds: float
    compute_seconds: float
    communication_seconds: float
    memory_bytes: tuple[int, ...]
    stages: int
    per_device_compute: tuple[float, ...]


class Stages:
    """A program cut into stages: ``signatures[k]`` (of the model's triples) in stage ``stage[k]``, in program
    order, and ``moves[i]``, the collective that begins stage i + 1."""

    def __init__(self, model: CostModel, program: Program) -> None:
        signatures: list[int] = []
        stage: list[int] = []
        moves: list[MoveForm] = []
        for step in program.steps:
            if isinstance(step, Compute):
                row = model.row_index(step.instruction, step.row)
                signatures.append(model.signature(step.instruction, row))
                stage.append(len(moves))
            else:
                moves.append(model.move_form(step.tensor, step.source, step.target, step.kind))
        self.model = model
        self.signatures: Index = np.array(signatures, dtype=np.int64)
        self.stage: Index = np.array(stage, dtype=np.int64)
        self.moves: tuple[MoveForm, ...] = tuple(moves)
        self.count = len(moves) + 1

    def computation(self, shares: Array) -> Array:
        """Seconds of each stage on each device, shape (stages, n)."""
        unique, inverse = np.unique(self.signatures, return_inverse=True)
        found = np.zeros((self.count, self.model.world))
        present, starts = np.unique(self.stage, return_index=True)
        if len(present):
            seconds = self.model.seconds(unique, shares)[inverse]
            found[present] = np.add.reduceat(seconds, starts, axis=0)
        return found

    def communication(self, shares: Array) -> Array:
        """Seconds of each collective."""
        return np.array([self.model.form_seconds(m, shares) for m in self.moves], dtype=float)

    def seconds(self, shares: Array) -> float:
        """t(Q, B)."""
        return float(self.computation(shares).max(axis=1).sum() + self.communication(shares).sum())


def step_cost(theory: Theory, model: CostModel, program: Program, lengths: Lengths) -> StepCost:
    """The stage model's prediction for ``program`` at integer lengths.

    Raises ValueError for a step that is no triple of the theory.
    """
    stages = Stages(model, program)
    shares = model.shares(lengths)
    computation = stages.computation(shares)
    compute = float(computation.max(axis=1).sum())
    communication = float(stages.communication(shares).sum())
    return StepCost(
        compute + communication,
        compute,
        communication,
        memory_bytes(theory, program, lengths),
        stages.count,
        tuple(map(float, computation.sum(axis=0))),
    )


def idle_seconds(graph: Graph, program: Program, cluster: Cluster, active: Sequence[int]) -> float:
    """Seconds in which the idle devices get the loss and the outputs that come back whole (0 if none is idle)."""
    if len(active) == cluster.world or cluster.network is None:
        return 0.0
    sent = {r.tensor for r in program.outputs if r.form != all_gather(0)}
    if program.loss is not None:
        sent.add(program.loss.tensor)
    network = cluster.network
    return sum(network.latency + graph.tensors[t].nbytes / network.bandwidth for t in sorted(sent))


def on_cluster(cost: StepCost, cluster: Cluster, active: Sequence[int], idle: float) -> StepCost:
    """A prediction for the devices ``active`` as one for their cluster; ``idle`` as of :func:`idle_seconds`."""
    if len(active) == cluster.world:
        return cost
    memory, compute = [0] * cluster.world, [0.0] * cluster.world
    for rank, held, seconds in zip(active, cost.memory_bytes, cost.per_device_compute, strict=True):
        memory[rank], compute[rank] = held, seconds
    return replace(
        cost, step_seconds=cost.step_seconds + idle, communication_seconds=cost.communication_seconds + idle,
        memory_bytes=tuple(memory), per_device_compute=tuple(compute),
    )  # fmt: skip


def memory_bytes(
    theory: Theory, program: Program, lengths: Lengths, *, optimizer_bytes: int = OPTIMIZER_BYTES
) -> tuple[int, ...]:
    """Peak bytes per device; ``optimizer_bytes`` per local element of each parameter that has a gradient.

    Buffers that a collective needs for its own use are not counted.
    """
    graph, world = theory.graph, lengths.world
    steps = len(program.steps)
    held: dict[tuple[int, Form], int] = {}  # (tensor, form) -> value
    sizes: list[tuple[int, Form]] = []  # of the value's own storage
    storage: list[int] = []  # value -> the value whose storage it shares
    born: list[int] = []
    last: list[int] = []

    units = np.array(lengths.units, dtype=np.int64).reshape(-1, world)

    def size(tensor: int, form: Form, per_element: int = 0) -> Index:
        t = graph.tensors[tensor]
        whole = t.numel * per_element if per_element else t.nbytes
        if not is_sharded(form):
            return np.full(world, whole, dtype=np.int64)
        axis = theory.axes.axis(tensor, sharded_dim(form))
        if axis is None:
            raise ValueError(f"dim {sharded_dim(form)} of {t.name} has no logical axis and is never sharded")
        local: Index = units[axis.id] * (whole // axis.units)
        return local

    def read(tensor: int, form: Form, at: int) -> int | None:
        value = held.get((tensor, form), held.get((tensor, IDENTITY)))
        if value is not None:
            last[storage[value]] = max(last[storage[value]], at)
        return value

    def add(tensor: int, form: Form, at: int, until: int, base: int | None = None) -> None:
        if (tensor, form) in held:
            return
        held[tensor, form] = len(sizes)
        storage.append(len(sizes) if base is None else storage[base])
        sizes.append((tensor, form))
        born.append(at)
        last.append(until)

    optimizer = np.zeros(world, dtype=np.int64)
    trained = {p.tensor for p in graph.parameters if p.gradient is not None}
    for at, step in enumerate(program.steps):
        if isinstance(step, Communicate):
            read(step.tensor, step.source, at)
            add(step.tensor, step.target, at, at)
            continue
        instruction = graph.instructions[step.instruction]
        bases = [read(t, f, at) for t, f in zip(instruction.inputs, step.row.pre, strict=True)]
        rule = theory.rules.get(instruction.id)
        base = bases[0] if rule is not None and rule.alias and bases else None
        for tensor, form in zip(instruction.outputs, step.row.post, strict=True):
            if tensor < 0:
                continue
            if instruction.is_source:
                add(tensor, form, 0, steps)
                if tensor in trained:
                    optimizer += size(tensor, form, optimizer_bytes)
            else:
                add(tensor, form, at, at, base)
    results = (*program.gradients, *program.outputs, *program.buffers)
    for result in results if program.loss is None else (program.loss, *results):
        read(result.tensor, result.form, steps)
    change = np.zeros((steps + 2, world), dtype=np.int64)
    for value, (tensor, form) in enumerate(sizes):
        if storage[value] == value:
            amount = size(tensor, form)
            change[born[value]] += amount
            change[last[value] + 1] -= amount
    peak = change.cumsum(axis=0).max(axis=0) + optimizer
    return tuple(int(b) for b in peak)
