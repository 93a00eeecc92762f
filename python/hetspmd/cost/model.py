"""Seconds of a Hoare triple, linear in the sharding ratios (HAP 3.2); those of collectives are in
:mod:`hetspmd.cost.collective_costs`.

Device j, which holds the share s_j of the axis that a row shards (s_j = 1 where the row shards none), runs the row
in

    max(F s_j / rate_j, (C s_j + W) / bandwidth_j) + launch_j      seconds,

F the op's FLOPs, C the bytes of the tensors that the row cuts, W those of the tensors that stay whole
(replicated and partial), rate_j in the op's dtype. A device with s_j = 0 skips the op. Views and sources
cost nothing, but for trained parameters: the row in which one is stored carries the optimizer's step, which takes

    (C s_j + W) / update_j + launch_j                              seconds,

with the parameter's own bytes and the bytes of parameters that device j updates in a second (by default its memory
bandwidth divided by :data:`~hetspmd.cluster.devices.PASSES`). Where the op's seconds were measured on device j, as
``constant + slope s_j`` (:mod:`hetspmd.cluster.op_times`), they stand in place of the roofline. Where only the
same call run whole was measured, the roofline is scaled to meet it at s_j = 1, so that the rows of an op compare.

Where whole steps of the model were measured, all of them are multiplied by the device's pace
(:mod:`hetspmd.cost.measured_steps`).

In micro-batches F, C and W are those of all of the device's turns: what the row in time does not cut is read in
each of them, and each has its launches (:mod:`hetspmd.cost.signatures`).

Each is convex and piecewise linear in s_j, of the form ``max(fast s, cut s + whole) + start`` with four numbers per
signature and device (:meth:`CostModel.terms`). The roofline is that of Williams et al., CACM 2009.
:meth:`CostModel.supports` gives the lines that support the seconds at given ratios, i.e. the side of the max that
binds there.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hetspmd.cluster.cluster import Cluster
from hetspmd.cost.collective_costs import MoveForm, Moves
from hetspmd.cost.measured_steps import StepFigures, figures
from hetspmd.cost.roofline import terms_of
from hetspmd.cost.signatures import Array, Index, Triples, triples_of
from hetspmd.program.dataflow import Key, Values, compute_keys
from hetspmd.program.lengths import Lengths
from hetspmd.program.loop_steps import times_run
from hetspmd.program.micro_batches import MicroBatches
from hetspmd.program.program import Communicate, Compute, Program
from hetspmd.rules.rule import Triple
from hetspmd.rules.theory import Theory

__all__ = ["Array", "CostModel", "Index", "MoveForm", "Triples"]


class ComputeFacts(NamedTuple):
    """A computation, what it reads and writes, and its signature (an index into :attr:`CostModel.triples`)."""

    step: Compute
    reads: tuple[Key, ...]
    writes: tuple[Key, ...]
    signature: int


class CostModel(Moves):
    """Costs of all triples and moves of a theory on a cluster.

    Attributes: ``theory``, ``cluster``, ``world`` (n), ``triples``; ``kinds``: per device a number that equal
    devices have in common; ``batches``: of a step in micro-batches, its loop.
    """

    def __init__(self, theory: Theory, cluster: Cluster, batches: MicroBatches | None = None) -> None:
        super().__init__(theory, cluster)
        self.batches = batches
        self.triples = triples_of(theory, keyed=bool(cluster.ops), batches=batches)
        self._told: dict[int, ComputeFacts] = vars(self.triples).setdefault("_told", {})
        turns = (1,) * self.world if batches is None else batches.turns_of(self.world)
        self._fast, self._cut, self._whole_part, self._start, self.kinds = terms_of(
            self.triples, theory, cluster, turns
        )
        self.measured: StepFigures | None = None
        self.capacity: Array = np.array([d.memory for d in cluster.devices], dtype=float)
        if cluster.steps:
            self._take_measured(turns)

    def _take_measured(self, turns: tuple[int, ...]) -> None:
        """Let measured steps of the model set the pace and the room of each device."""
        terms = (self._fast, self._cut, self._whole_part, self._start)
        once = terms_of(self.triples, self.theory, self.cluster)[:4] if max(turns) > 1 else terms
        measured = self.measured = figures(self.theory, self.cluster, self.triples, once, turns)
        if measured is None:
            return
        pace = np.array(measured.pace)
        self._fast, self._cut, self._whole_part, self._start = (part * pace for part in terms)
        self.capacity = np.array(measured.capacity)
        alike = list(zip(self.kinds.tolist(), pace.tolist(), strict=True))
        self.kinds = np.array([alike.index(device) for device in alike], dtype=np.int64)

    def dominant_dtype(self) -> str:
        """The dtype in which the graph computes most FLOPs (float32 if it computes none)."""
        total = np.zeros(len(self.triples.dtypes))
        first = self.triples.signature[self.triples.offset[:-1]]
        np.add.at(total, self.triples.dtype[first], self.triples.flops[first])
        return self.triples.dtypes[int(total.argmax())] if total.any() else "float32"

    def scaled(self, cluster: Cluster, quantity: str, devices: Sequence[int], factor: float) -> CostModel:
        """The model with ``flops``, ``memory_bandwidth`` or ``launch`` of some devices times ``factor``; what was
        measured of ops follows. ``cluster`` is the one with those quantities."""
        other = copy.copy(self)
        other.cluster, other._forms, other._step_forms = cluster, {}, {}
        other._fast, other._cut = self._fast.copy(), self._cut.copy()
        other._whole_part, other._start = self._whole_part.copy(), self._start.copy()
        places = list(devices)
        if quantity == "flops":
            other._fast[:, places] /= factor
        elif quantity == "memory_bandwidth":
            other._cut[:, places] /= factor
            other._whole_part[:, places] /= factor
        else:
            other._start[:, places] *= factor
        return other

    def repeating(self, batches: MicroBatches) -> CostModel:
        """The model of a step in the same micro-batches with other collectives in its loop. What does not depend on
        them is shared."""
        other = copy.copy(self)
        other.batches, other._step_forms = batches, {}
        return other

    def times(self, step: Communicate) -> int:
        """How often a step runs a collective on all of its bytes: once, or once for each micro-batch."""
        return times_run(self.batches, step)

    # computation -------------------------------------------------------------------------------------------

    def signature(self, instruction: int, row: int) -> int:
        """Index into ``triples`` of a row of an instruction."""
        signatures, offset = self.triples.places
        return signatures[offset[instruction] + row]

    def facts(self, step: Compute) -> ComputeFacts:
        """What a computation reads and writes, and its signature. It is told once for each object of a step, and
        kept with the triples.

        Raises ValueError for a step that is no triple of the theory.
        """
        told = self._told.get(id(step))
        if told is None or told.step is not step:
            keys = compute_keys(self.theory.graph)(step)
            signature = self.signature(step.instruction, self.row_index(step.instruction, step.row))
            told = self._told[id(step)] = ComputeFacts(*keys, signature)
        return told

    def values(self, program: Program) -> Values:
        """What the steps of a program read and write."""
        return Values.of(self.theory.graph, program)

    def row_index(self, instruction: int, row: Triple) -> int:
        """The index of ``row`` among the rows of the instruction. Raises ValueError if it is none of them."""
        rows = self.theory.rows[instruction]
        for index, own in enumerate(
            rows
        ):  # mostly the theory's own object, which is found without comparisons
            if own is row:
                return index
        try:
            return rows.index(row)
        except ValueError:
            name = self.theory.graph.instructions[instruction].name
            raise ValueError(f"{row} is no triple of instruction {instruction} ({name})") from None

    def terms(self, signatures: Index) -> tuple[Array, Array, Array, Array]:
        """``(fast, cut, whole, start)``, each (len(signatures), n) in seconds: a busy device with the share s takes
        ``max(fast s, cut s + whole) + start``."""
        return (
            self._fast[signatures],
            self._cut[signatures],
            self._whole_part[signatures],
            self._start[signatures],
        )

    def seconds(self, signatures: Index, shares: Array) -> Array:
        """Seconds of rows given by signature at the given shares, shape (len(signatures), n)."""
        fast, cut, whole, start = self.terms(signatures)
        s = shares[self.triples.axis[signatures]]
        return np.where(s == 0, 0.0, np.maximum(fast * s, cut * s + whole) + start)

    def supports(self, signatures: Index, shares: Array) -> tuple[Array, Array]:
        """Slopes and constants, each (len(signatures), n), of the lines that support the rows' seconds at the
        given shares of the axes; the seconds of a share above 0 lie nowhere below them."""
        fast, cut, whole, start = self.terms(signatures)
        axis = self.triples.axis[signatures]
        sharded = (axis < len(self.theory.axes.axes))[:, None]
        s = shares[axis]
        bound = fast * s >= cut * s + whole
        slope = np.where(bound, fast, cut)
        constant = np.where(bound, 0.0, whole) + start
        constant = np.where(sharded, constant, constant + slope)
        return np.where(sharded, slope, 0.0), constant

    def free(self, signatures: Index) -> npt.NDArray[np.bool_]:
        """Which rows given by signature take no device any time."""
        taken = np.stack(self.terms(signatures)).any(axis=(0, 2))
        return np.logical_not(taken)

    def row_seconds(self, instruction: int, row: int, lengths: Lengths) -> tuple[float, ...]:
        """Seconds of a row on each device at integer lengths."""
        signatures = np.array([self.signature(instruction, row)])
        return tuple(map(float, self.seconds(signatures, self.shares(lengths))[0]))

    def row_costs(self, lengths: Lengths) -> list[Array]:
        """Per instruction, the seconds of each of its rows on the device that takes longest."""
        every = np.arange(len(self.triples.flops))
        slowest = self.seconds(every, self.shares(lengths)).max(axis=1, initial=0.0)
        return np.split(slowest[self.triples.signature], self.triples.offset[1:-1])

    def speeds(self) -> Array:
        """FLOP/s of each device in the dominant dtype."""
        dtype = self.dominant_dtype()
        return np.array([d.rate(dtype) for d in self.cluster.devices])

    def alone(self) -> Array:
        """Seconds of the whole single-device step on each device."""
        seconds: Array = self.whole().sum(axis=0)
        return seconds

    def lower_bound(self) -> float:
        """Seconds that no program on these devices undercuts, whatever its shares and its collectives.

        With weights ``w_j`` in proportion to the devices' speeds ``1 / alone_j``, the slowest device of each
        stage takes at least the weighted mean. An instruction that takes ``a_j`` seconds whole on device j
        takes at least ``s_j a_j`` with the share ``s_j``, and its shares sum to 1 or more, so that it adds at
        least ``min_j w_j a_j`` to the step. As rows may be measured apart, ``a_j`` is that of the cheapest.
        """
        alone = self.alone()
        if not alone.min() > 0:
            return 0.0
        weights = (1 / alone) / (1 / alone).sum()
        every = self.seconds(np.arange(len(self.triples.flops)), self.even_shares(np.ones(self.world)))
        least = np.minimum.reduceat(every[self.triples.signature], self.triples.offset[:-1], axis=0)
        return float((weights * least).min(axis=1, initial=np.inf).sum())

    def whole(self) -> Array:
        """Seconds of each instruction run whole, shape (instructions, n)."""
        first = self.triples.signature[self.triples.offset[:-1]]
        return self.seconds(first, self.even_shares(np.ones(self.world)))
