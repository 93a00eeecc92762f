"""Seconds and bytes of a training step: HAP 3.2's stage model.

    t(Q, B) = sum over stages (comm + max_j comp_j)

All devices meet at a collective, so each collective begins a stage; the first stage has none. Memory per
device is the peak of what is held over the program's order (:mod:`hetspmd.cost.memory`).

A program may run on some of a cluster's devices only. The others are idle: after forward they get the loss,
and each output that is returned whole, by one broadcast of ``latency + bytes / bandwidth`` seconds each.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from hetspmd.cluster.cluster import Cluster
from hetspmd.cost.lasting_bytes import lasting_bytes
from hetspmd.cost.memory import Holdings, MemoryProfile, each_its_own
from hetspmd.cost.model import Array, CostModel, Index, MoveForm
from hetspmd.cost.simulated_run import SimulatedRun
from hetspmd.cost.simulator import TwoStreams
from hetspmd.placement import shard
from hetspmd.program.buckets import coalesces
from hetspmd.program.dataflow import Values
from hetspmd.program.lengths import Lengths
from hetspmd.program.levels import FlatKey
from hetspmd.program.loop_steps import loop_steps
from hetspmd.program.program import Communicate, Compute, Program
from hetspmd.program.schedule import Schedule, make_schedule
from hetspmd.trace.graph import Graph


@dataclass(frozen=True)
class StepCost:
    """The prediction for one training step.

    Attributes:
        step_seconds: Seconds of the simulated step, in which communication overlaps computation as the
            runtime overlaps them.
        stage_seconds: Seconds without overlap: ``compute_seconds + communication_seconds``.
        compute_seconds: Those of the slowest device in each stage, summed over stages.
        communication_seconds: Those of all collectives, and of what idle devices are sent.
        memory_bytes: Peak bytes of each device of the cluster, 0 for an idle one.
        stages: The number of stages.
        per_device_compute: Seconds that each device of the cluster computes, 0 for an idle one.
    """

    step_seconds: float
    stage_seconds: float
    compute_seconds: float
    communication_seconds: float
    memory_bytes: tuple[int, ...]
    stages: int
    per_device_compute: tuple[float, ...]


class Stages:
    """A program cut into stages: ``signatures[k]`` (of the model's triples) in stage ``stage[k]``, in program
    order, and ``moves[i]``, the collective that begins stage i + 1. They are of ``instructions[k]`` and of the
    tensors ``moved[i]``."""

    def __init__(self, model: CostModel, program: Program) -> None:
        self.more_turns = 0 if model.batches is None else model.batches.count - 1
        graph, batches = model.theory.graph, model.batches
        in_loop = () if batches is None else loop_steps(graph, batches, program).places
        signatures: list[int] = []
        stage: list[int] = []
        moves: list[MoveForm] = []
        self.instructions: list[int] = []
        self.moved: list[int] = []
        self._shared: list[float] = []
        self._again: list[int] = []
        self._latency = 0.0
        for place, step in enumerate(program.steps):
            if isinstance(step, Compute):
                signatures.append(model.facts(step).signature)
                if place in in_loop and batches is not None and batches.loop.phases[step.instruction] != "in":
                    self._again.append(signatures[-1])
                stage.append(len(moves))
                self.instructions.append(step.instruction)
            else:
                self.moved.append(step.tensor)
                moves.append(model.step_form(step))
                self._latency += moves[-1].latency if place in in_loop and model.times(step) == 1 else 0.0
                shares = coalesces(graph, step.tensor, step.kind, model.bucket_bytes)
                self._shared.append(moves[-1].latency if shares else 0.0)
        self.model = model
        self.signatures: Index = np.array(signatures, dtype=np.int64)
        self.stage: Index = np.array(stage, dtype=np.int64)
        self.moves: tuple[MoveForm, ...] = tuple(moves)
        self.count = len(moves) + 1

    def computation(self, shares: Array) -> Array:
        """Seconds of each stage on each device, shape (stages, n)."""
        unique, inverse = np.unique(self.signatures, return_inverse=True)
        stage_seconds = np.zeros((self.count, self.model.world))
        present, starts = np.unique(self.stage, return_index=True)
        if len(present):
            seconds = self.model.seconds(unique, shares)[inverse]
            stage_seconds[present] = np.add.reduceat(seconds, starts, axis=0)
        return stage_seconds

    def communication(self, shares: Array) -> Array:
        """Seconds of each collective."""
        return np.array([self.model.form_seconds(m, shares) for m in self.moves], dtype=float)

    def loop_seconds(self, shares: Array) -> float:
        """Seconds that the turns of a loop after the first add beside those of its own instructions: collectives in
        parts have a latency in each, and what could stand before the loop is computed in each."""
        if not self.more_turns:
            return 0.0
        again = self.model.seconds(np.array(self._again, dtype=np.int64), shares).sum(axis=0)
        return self.more_turns * (float(again.max(initial=0.0)) + self._latency)

    @cached_property
    def saved(self) -> float:
        """The most seconds of latency that buckets save, in which several of the collectives share one."""
        return sum(self._shared)

    def seconds(self, shares: Array) -> float:
        """t(Q, B)."""
        return float(self.computation(shares).max(axis=1).sum() + self.communication(shares).sum())


class StepModel:
    """A program to be judged at several lengths. ``idle``: seconds in which idle devices get the results of
    forward (:func:`idle_seconds`). ``schedule``: that of a plan; where there is none it is made here, with buckets
    as the model says and gathers ``prefetch_distance`` groups ahead.

    Raises ValueError for a step that is no triple of the theory.
    """

    def __init__(
        self,
        model: CostModel,
        program: Program,
        *,
        idle: float = 0.0,
        schedule: Schedule | None = None,
        prefetch_distance: int = 1,
    ) -> None:
        self.model = model
        self.program = program
        self.idle = idle
        self._plan_schedule = schedule
        self._distance = prefetch_distance
        self.stages = Stages(model, program)

    @cached_property
    def streams(self) -> TwoStreams:
        """The two-stream simulation."""
        return TwoStreams(self.model, self.program, self.schedule, idle=self.idle, values=self._values)

    @cached_property
    def turn_by_turn(self) -> TwoStreams:
        """The simulation with every turn of a loop over micro-batches."""
        if self.model.batches is None:
            return self.streams
        return TwoStreams(
            self.model, self.program, self.schedule, idle=self.idle, values=self._values, each_turn=True
        )

    @cached_property
    def schedule(self) -> Schedule:
        """When its steps run."""
        if self._plan_schedule is not None:
            return self._plan_schedule
        theory, size = self.model.theory, self.model.bucket_bytes
        return make_schedule(
            theory, self.program, size, prefetch_distance=self._distance, values=self._values
        )

    @cached_property
    def _values(self) -> Values:
        return self.model.values(self.program)

    def prefetching(self, distance: int) -> StepModel:
        """The same program with gathers so many groups ahead."""
        other = copy.copy(self)
        other._plan_schedule, other._distance = None, distance
        other.__dict__.update(_values=self._values)
        for what in ("streams", "turn_by_turn", "schedule", "holdings", "executed"):
            other.__dict__.pop(what, None)
        return other

    @cached_property
    def holdings(self) -> Holdings:
        """What the program holds from when to when, in its own order: that of the search."""
        return Holdings(self.model.theory, self.program, self.schedule, batches=self.model.batches)

    @cached_property
    def executed(self) -> Holdings:
        """The same in the order in which it is executed."""
        return Holdings(
            self.model.theory, self.program, self.schedule, executed=True, batches=self.model.batches
        )

    def may_fit(self, lengths: Lengths) -> bool:
        """Whether what is held at least leaves the devices' memory room. This is known before any simulation: the
        parameters, the optimizer's state and the gradients, and all that is held but for buffers of collectives."""
        capacity, theory, batches = self.model.capacity, self.model.theory, self.model.batches
        if (lasting_bytes(theory, self.program, lengths, batches) > capacity).any():
            return False
        return not self.executed.at(lengths, buffers=False).lacking(capacity).any()

    def held(self, lengths: Lengths) -> MemoryProfile:
        """What is held at integer lengths in the executed order, buffers of collectives as long as the simulation
        says."""
        return self._held(lengths, self.streams.run(self.model.shares(lengths)))

    def _held(self, lengths: Lengths, run: SimulatedRun) -> MemoryProfile:
        """In turns of their own devices reach a step at times that are far apart: each counts for itself."""
        batches = self.model.batches
        if batches is None or not batches.own_turns:
            return self.executed.at(lengths, self.streams.completed(run))
        seen = [self.streams.completed(run, device) for device in range(self.model.world)]
        return each_its_own([self.executed.at(lengths, completed) for completed in seen])

    def awaited(self, lengths: Lengths, device: int) -> dict[FlatKey, tuple[FlatKey, ...]]:
        """By what a collective makes, what those make that a device waits for before it starts that collective, so
        that it holds no more than :meth:`held` says however slow the links are. Nothing where the device has the
        memory for collectives that are on their way until they are read: it need not wait."""
        if (
            self.model.world == 1
            or self.executed.at(lengths, {}).peaks[device] <= self.model.capacity[device]
        ):
            return {}
        run = self.streams.run(self.model.shares(lengths))
        own = self.model.batches is not None and bool(self.model.batches.own_turns)
        return self.executed.awaited(lengths, self.streams.completed(run, device if own else None))

    def arrivals(self, lengths: Lengths) -> dict[Communicate, int]:
        """The instruction that runs first after each collective has ended, of those that have ended, at integer
        lengths, before any device waits for them."""
        steps = self.program.steps
        ended = self.streams.completed(self.streams.run(self.model.shares(lengths)))
        arrivals: dict[Communicate, int] = {}
        for start, until in ended.items():
            collective, step = steps[start], steps[until]
            if isinstance(collective, Communicate) and isinstance(step, Compute):
                arrivals[collective] = step.instruction
        return arrivals

    def seconds(self, lengths: Lengths) -> float:
        """Seconds of the simulated step at integer lengths."""
        shares = self.model.shares(lengths)
        return self.streams.seconds(shares)

    def computed(self, lengths: Lengths) -> StageSeconds:
        """Seconds of the stage model's parts at integer lengths."""
        shares = self.model.shares(lengths)
        computation, more = self.stages.computation(shares), self.stages.loop_seconds(shares)
        communication = float(self.stages.communication(shares).sum()) + self.idle
        return StageSeconds(
            float(computation.max(axis=1).sum()) + more,
            communication,
            tuple(map(float, computation.sum(axis=0))),
            self.stages.saved,
        )

    def cost(self, lengths: Lengths) -> StepCost:
        """The prediction at integer lengths."""
        parts = self.computed(lengths)
        run = self.streams.run(self.model.shares(lengths))
        memory = self._held(lengths, run)
        return StepCost(
            float(run.final.max()),
            parts.seconds,
            parts.compute,
            parts.communication,
            memory.peaks,
            self.stages.count,
            parts.per_device,
        )


@dataclass(frozen=True)
class StageSeconds:
    """Seconds of the stage model: of the slowest device in each stage, of collectives (and of what idle devices
    are sent), and that each device computes; ``saved``: at most so many of communication are saved by buckets."""

    compute: float
    communication: float
    per_device: tuple[float, ...]
    saved: float = 0.0

    @property
    def seconds(self) -> float:
        """Of a step in the stage model."""
        return self.compute + self.communication

    @property
    def lower_bound(self) -> float:
        """Of a step in any order of the same work: a device computes and the stream carries one thing at a time."""
        return max(*self.per_device, self.communication - self.saved)


def idle_seconds(graph: Graph, program: Program, cluster: Cluster, active: Sequence[int]) -> float:
    """Seconds in which the idle devices get the loss and the outputs that come back whole (0 if none is idle)."""
    if len(active) == cluster.world or cluster.network is None:
        return 0.0
    sent = {r.tensor for r in program.outputs if r.form != shard(0)}
    if program.loss is not None:
        sent.add(program.loss.tensor)
    network = cluster.network
    return sum(network.latency + graph.tensors[t].nbytes / network.bandwidth for t in sorted(sent))


def on_cluster(cost: StepCost, cluster: Cluster, active: Sequence[int]) -> StepCost:
    """A prediction for the devices ``active`` as one for their cluster."""
    if len(active) == cluster.world:
        return cost
    memory, compute = [0] * cluster.world, [0.0] * cluster.world
    for rank, held, seconds in zip(active, cost.memory_bytes, cost.per_device_compute, strict=True):
        memory[rank], compute[rank] = held, seconds
    return replace(cost, memory_bytes=tuple(memory), per_device_compute=tuple(compute))
