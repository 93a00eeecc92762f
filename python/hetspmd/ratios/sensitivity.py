"""Which device or link limits the step: how its seconds change with the cluster's quantities, the ratios following.

In the stage model, T = min over B of t(Q, B) is the linear program of :mod:`hetspmd.ratios.ratios`. The derivative
at fixed ratios is not that of T: where devices finish a stage together, a faster one alone gains nothing until the
ratios move. The envelope theorem holds for the Lagrangian (Milgrom and Segal, Econometrica 2002): at the optimum

    T = comm + sum over stages i, devices j of y_ij comp_ij,     y_ij >= 0,  sum_j y_ij = 1

with y the dual values of ``t_i >= comp_ij``, and the derivative of T is that of the right side with B and y held.
There comp_ij is a sum of rooflines, each as many seconds of FLOPs or of memory traffic as its binding side takes,
and of a launch; comm is a part of latencies and one of bytes. All are proportional to 1 / rate, 1 / bandwidth,
launch or latency, so that the elasticity ``d ln T / d ln q`` of a quantity q is the part of T that it makes, with
a minus for rates and bandwidths. The parts sum to 1, with that of the devices' own copies of slices
(:mod:`hetspmd.cost.collective_costs`), which no quantity has. Where T has a kink, the elasticity lies between its
one-sided ones. Devices without a share stay without.

``gain`` is no derivative and knows overlap: the part of the step of the two-stream simulation that is gained if the
quantity is 10 % better, at the best of the ratios at hand and those that are optimal then.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

import numpy as np
import numpy.typing as npt

from hetspmd.cluster.cluster import Cluster
from hetspmd.cluster.devices import Device
from hetspmd.cost.model import Array, CostModel, MoveForm
from hetspmd.cost.simulator import TwoStreams
from hetspmd.cost.step import Stages, StepModel, idle_seconds
from hetspmd.program.lengths import by_segment
from hetspmd.program.program import Communicate, Program
from hetspmd.ratios.linear import LinearProgram
from hetspmd.ratios.problem import Mask, Problem, Room
from hetspmd.ratios.ratio_thresholds import THRESHOLDS
from hetspmd.ratios.ratios import minimise, solved

Quantity = Literal["flops", "memory_bandwidth", "launch", "bandwidth", "latency"]
"""Of devices the first three, of the network the others."""

QUANTITIES: Final[Mapping[Quantity, float]] = {
    "flops": -1.0,
    "memory_bandwidth": -1.0,
    "launch": 1.0,
    "bandwidth": -1.0,
    "latency": 1.0,
}
"""The power in which seconds depend on each."""


@dataclass(frozen=True)
class Sensitivity:
    """What one quantity of equal devices, or of the network, does to the step.

    ranks       the devices, in the cluster; () for the network
    elasticity  d ln (seconds of the stage model) / d ln quantity
    gain        the part of the predicted step that ``better_quantity`` more (of launch and latency: less) would
                gain; None for a quantity that is not among the first ones
    """

    quantity: Quantity
    ranks: tuple[int, ...]
    elasticity: float
    gain: float | None = None


def changed(cluster: Cluster, quantity: Quantity, ranks: Sequence[int], factor: float) -> Cluster:
    """The cluster with a quantity of some devices (of the network: whatever ``ranks``) times ``factor``. Measured
    collectives follow: their seconds per byte are the bandwidth, their other seconds the latency."""
    if quantity in ("flops", "memory_bandwidth", "launch"):
        devices = tuple(
            _device(d, quantity, factor) if rank in ranks else d for rank, d in enumerate(cluster.devices)
        )
        return replace(cluster, devices=devices)
    if cluster.network is None:
        return cluster
    terms: tuple[str, ...] = ("latency", "per_shard")
    scale = factor
    if quantity == "latency":
        network = replace(cluster.network, latency=cluster.network.latency * factor)
    else:
        terms, scale = ("per_byte", "per_largest", "per_exchange"), 1 / factor
        network = replace(cluster.network, bandwidth=cluster.network.bandwidth * factor)
    curves = tuple(replace(c, **{t: getattr(c, t) * scale for t in terms}) for c in cluster.curves)
    return replace(cluster, network=network, curves=curves)


def _device(device: Device, quantity: Quantity, factor: float) -> Device:
    if quantity == "flops":
        return replace(device, flops={dtype: rate * factor for dtype, rate in device.flops.items()})
    if quantity == "launch":
        return replace(device, launch=device.launch * factor)
    optimizer = None if device.optimizer is None else device.optimizer * factor
    return replace(device, memory_bandwidth=device.memory_bandwidth * factor, optimizer=optimizer)


def sensitivities(
    model: CostModel,
    program: Program,
    ratios: Sequence[float] | Sequence[Sequence[float]],
    *,
    cluster: Cluster | None = None,
    active: Sequence[int] | None = None,
    most: Array | None = None,
    room: Room | None = None,
    streams: TwoStreams | None = None,
    gains: int = THRESHOLDS.gains,
) -> tuple[Sensitivity, ...]:
    """The quantities that the step depends on, those with the greatest elasticity first.

    ``model`` is of the devices ``active`` of ``cluster`` (default: all of its own), of which those with a share of
    ``ratios`` (of all segments, or by segment) have one. ``most`` and ``room`` bound the ratios, as of
    :func:`~hetspmd.ratios.ratios.optimise`.
    ``streams`` of the same model and program, if they are known. ``gains``: how many quantities are given a gain.
    """
    of = model.cluster if cluster is None else cluster
    ranks = tuple(range(of.world)) if active is None else tuple(active)
    matrix = np.asarray(by_segment(ratios, model.theory.axes.segments), float)
    return _Analysis(model, program, matrix, of, ranks, most, room).run(streams, gains)


class _Analysis:
    def __init__(
        self,
        model: CostModel,
        program: Program,
        ratios: Array,
        cluster: Cluster,
        active: tuple[int, ...],
        most: Array | None,
        room: Room | None,
    ) -> None:
        self.model, self.program, self.ratios = model, program, ratios
        self.cluster, self.active = cluster, active
        # What the ratios at hand hold fits, whatever was known of the bounds.
        bounds = np.full(model.world, np.inf) if most is None else np.maximum(most, ratios.max(axis=0))
        if room is not None:
            room = replace(room, capacity=np.maximum(room.capacity, room.held(ratios).max(axis=0)))
        self.problem = Problem(Stages(model, program), bounds, room)
        self.present: Mask = ratios > 0

    def run(self, streams: TwoStreams | None, gains: int) -> tuple[Sensitivity, ...]:
        best, at, lp = solved(self.problem, self.present, self.ratios)
        with np.errstate(over="ignore", invalid="ignore"):  # times may lie further apart than floats reach
            parts = self._parts(at, lp)
        total = sum(parts.values())
        if not 0 < total < math.inf:
            return ()
        ranking = [
            Sensitivity(quantity, tuple(self.active[j] for j in devices), QUANTITIES[quantity] * part / total)
            for (quantity, devices), part in parts.items()
            if part > THRESHOLDS.smallest_elasticity * total
        ]
        ranking.sort(key=lambda s: (-abs(s.elasticity), tuple(QUANTITIES).index(s.quantity), s.ranks))
        if gains <= 0:
            return tuple(ranking)
        if streams is None:
            streams = StepModel(self.model, self.program, idle=self._idle(self.cluster)).streams
        before = min(streams.seconds(self.model.even_shares(b)) for b in (self.ratios, best))
        with_gains = [replace(s, gain=self._gain(s, streams, best, before)) for s in ranking[:gains]]
        return (*with_gains, *ranking[gains:])

    def _parts(self, at: Array, lp: LinearProgram) -> dict[tuple[Quantity, tuple[int, ...]], float]:
        """Seconds of T that each quantity makes, by equal devices."""
        problem = self.problem
        parts: dict[tuple[Quantity, tuple[int, ...]], float] = {}
        duals, bound_duals = lp.multipliers()
        seconds = np.zeros((self.model.world, 3))
        for (_, supported, stage, place), dual in zip(lp.cuts, duals, strict=True):
            where = np.flatnonzero(dual)
            if len(where):
                device = lp.first[place[where]]
                sides = self._sides(supported, at, np.ones_like(problem.sharded))
                np.add.at(seconds, device, sides[stage[where], device] * dual[where, None])
        if bound_duals.any():
            nothing = np.zeros_like(at)
            device = problem.computation(nothing).argmax(axis=1)
            sides = self._sides(nothing, nothing, ~problem.sharded)
            np.add.at(seconds, device, sides[np.arange(len(device)), device] * bound_duals[:, None])
        for kind in problem.kinds:
            flops, memory, launch = map(float, seconds[list(kind)].sum(axis=0))
            parts["flops", kind] = flops
            parts["memory_bandwidth", kind] = memory
            parts["launch", kind] = launch
        base = problem.communication(at) + self._idle(self.cluster)
        parts["bandwidth", ()] = self._communication("bandwidth", 0.5, at) - base
        parts["latency", ()] = self._communication("latency", 2.0, at) - base
        return parts

    def _sides(self, supported: Array, at: Array, counted: npt.NDArray[np.bool_]) -> Array:
        """Seconds of FLOPs, of memory traffic and of launches, shape (stages, devices, 3), at the ratios ``at`` on
        the lines that support the stages' seconds at other ratios; of the signatures ``counted``. A device launches
        nothing of a segment of which it has no share."""
        problem = self.problem
        fast, cut, whole, launch = self.model.terms(problem.signatures)
        there, here = problem.by_signature(supported), problem.by_signature(at)
        present = ~problem.sharded[:, None] | self.present[problem.segment]
        bound = fast * there >= cut * there + whole
        sides = present * np.stack(
            [np.where(bound, fast * here, 0.0), np.where(bound, 0.0, cut * here + whole), launch]
        )
        stage_sides: Array = np.moveaxis(problem.counts @ (sides * counted[:, None]), 0, -1)
        return stage_sides

    def _communication(self, quantity: Quantity, factor: float, at: Array) -> float:
        """Seconds of all that is sent, with a quantity of the network times ``factor``."""
        model, moves, cluster = self._with(quantity, (), factor)
        return self.problem.priced(model, moves).communication(at) + self._idle(cluster)

    def _with(
        self, quantity: Quantity, ranks: tuple[int, ...], factor: float
    ) -> tuple[CostModel, list[MoveForm], Cluster]:
        """Model of the active devices, collectives and cluster with a quantity times ``factor``."""
        cluster = changed(self.cluster, quantity, ranks, factor)
        part = cluster.part(self.active)
        if quantity in ("bandwidth", "latency"):
            model = CostModel(self.model.theory, part, self.model.batches)
        else:
            model = self.model.scaled(part, quantity, [self.active.index(r) for r in ranks], factor)
        moves = [model.step_form(s) for s in self.program.steps if isinstance(s, Communicate)]
        return model, moves, cluster

    def _idle(self, cluster: Cluster) -> float:
        return idle_seconds(self.model.theory.graph, self.program, cluster, self.active)

    def _gain(self, of: Sensitivity, streams: TwoStreams, best: Array, before: float) -> float:
        better = THRESHOLDS.better_quantity
        factor = 1 + better if QUANTITIES[of.quantity] < 0 else 1 - better
        model, moves, cluster = self._with(of.quantity, of.ranks, factor)
        moved = minimise(self.problem.priced(model, moves), self.present, best)
        other = streams.on(model, idle=self._idle(cluster))
        after = min(other.seconds(model.even_shares(b)) for b in (self.ratios, best, moved))
        return 1 - after / before if before > 0 else 0.0
