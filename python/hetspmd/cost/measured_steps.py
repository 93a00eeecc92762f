"""What measured steps of a model (:mod:`hetspmd.cluster.step_curves`) say of its seconds and bytes.

**Which model.** :func:`identity` is a digest of the parameters, of the inputs without their number of rows, and of
which ops a step calls how often, and on which dtypes. So it is the same for every size of the
batch, and another one for another width, another number of layers or of tokens, or other dtypes.

**Rows.** A device that is given ``r`` rows at a time takes ``T(r)`` seconds for the whole step of the single
device: linear between the measured points, that of the first below it, and in proportion to the rows above the
last.

**Seconds.** The model of single ops says ``S(r)`` for the same step. What lies between the two is the device's
*pace* ``T(r) / S(r)``, by which all seconds of its ops are multiplied. It is taken at the rows at which the
measured steps of all devices would take equally long, so that the seconds stay linear in the shares, and bounds
stay bounds.

**Bytes.** ``M`` takes counted bytes to measured ones: it is linear between the measured steps, adds below the first
what that one holds more than was counted (or takes off its part), and goes on above the last as where measured
bytes were most beside counted ones. A device holds ``M(c)`` where ``c`` bytes are counted. Its capacity, in
counted bytes, is the most of which ``M`` fits its memory, and less than the step that did not fit. A program that
stores parameters in shards counts less, and may have more rows than the single device.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from hetspmd.cluster.cluster import Cluster
from hetspmd.cluster.devices import Device
from hetspmd.cluster.step_curves import ModelSteps, RowDim, StepCurve
from hetspmd.cost.signatures import Array, Triples
from hetspmd.rules.theory import Theory
from hetspmd.trace.graph import REBALANCE, Graph, Instruction

_SAME_MEMORY: Final = 1e-6
"""By which part a device may have more memory than its steps were given, and their limit still holds: rounding."""
_HALVINGS: Final = 60
"""Bisections for the seconds that devices have in common: more than a float has digits."""
_GRID: Final = 64
"""Points of the seconds of a device without a curve, over the rows of a turn."""


def rows_of(graph: Graph, rows: Sequence[RowDim]) -> int | None:
    """How many rows the inputs have; None where the graph does not have these inputs with rows alike."""
    by_path = {i.path: graph.tensors[i.tensor].shape for i in graph.inputs}
    counts = set()
    for path, dim, each in rows:
        shape = by_path.get(path, ())
        if dim >= len(shape) or shape[dim] % each:
            return None
        counts.add(shape[dim] // each)
    return counts.pop() if len(counts) == 1 else None


def row_axes(theory: Theory, rows: Sequence[RowDim]) -> frozenset[int]:
    """The logical axes of the rows, in whatever segment."""
    by_path = {i.path: i.tensor for i in theory.graph.inputs}
    axes = (theory.axes.axis(by_path[path], dim) for path, dim, _ in rows)
    groups = {axis.group for axis in axes if axis is not None}
    return frozenset(axis.id for axis in theory.axes.axes if axis.group in groups)


def identity(graph: Graph, rows: Sequence[RowDim]) -> str | None:
    """The digest of a model's step, whatever the number of its rows (kept with the graph); None where
    :func:`rows_of` are none."""
    cached: dict[tuple[RowDim, ...], str | None] = graph.__dict__.setdefault("_step_identities", {})
    key = tuple(rows)
    if key not in cached:
        cached[key] = None if rows_of(graph, rows) is None else _digest(graph, key)
    return cached[key]


def _digest(graph: Graph, rows: tuple[RowDim, ...]) -> str:
    each_of = {(path, dim): each for path, dim, each in rows}
    dtypes = [(tensor.dtype, len(tensor.shape)) for tensor in graph.tensors]
    calls = Counter(
        (i.op, i.phase, tuple(dtypes[t] for t in i.inputs), tuple(dtypes[t] for t in i.outputs if t >= 0))
        for i in _training(graph)
        if i.op != REBALANCE
    )
    inputs = []
    for each in graph.inputs:
        shape = graph.tensors[each.tensor].shape
        dims = [
            ("rows", each_of[each.path, d]) if (each.path, d) in each_of else n for d, n in enumerate(shape)
        ]
        inputs.append((each.path, dtypes[each.tensor], dims))
    parameters = sorted(
        (p.names, p.requires_grad, dtypes[p.tensor], graph.tensors[p.tensor].shape) for p in graph.parameters
    )
    statics = sorted((s.path, repr(s.value)) for s in graph.statics)
    text = repr(
        (parameters, sorted(inputs, key=repr), statics, sorted((repr(c), n) for c, n in calls.items()))
    )
    return hashlib.sha256(text.encode()).hexdigest()


def _training(graph: Graph) -> Iterator[Instruction]:
    """The calls that loss, gradients and updates need: outputs may be left out of a step."""
    needed = {graph.loss, *graph.updates, *(p.gradient for p in graph.parameters)}
    for instruction in reversed(graph.instructions):
        if not needed.isdisjoint(instruction.outputs):
            needed.update(instruction.inputs)
            yield instruction


def steps_for(theory: Theory, cluster: Cluster) -> ModelSteps | None:
    """The measured steps of this model, if the cluster has any."""
    return next((m for m in cluster.steps if identity(theory.graph, m.rows) == m.identity), None)


@dataclass(frozen=True)
class StepFigures:
    """What the measured steps of its model say of each device of a cluster.

    steps     the measured steps
    rows      of the whole batch, and those that each device would take at a time (``turn``)
    pace      by which the seconds of a device's ops are multiplied; 1 without a curve
    capacity  counted bytes that each device has room for, infinite without a limit
    """

    steps: ModelSteps
    rows: int
    turn: tuple[float, ...]
    pace: tuple[float, ...]
    capacity: tuple[float, ...]

    def bytes(self, counted: Sequence[int]) -> tuple[int, ...]:
        """What the devices hold where so many bytes are counted."""
        curves = self.steps.by_rank(len(counted))
        return tuple(n if c is None else measured_bytes(c, n) for c, n in zip(curves, counted, strict=True))


def figures(
    theory: Theory, cluster: Cluster, triples: Triples, terms: Sequence[Array], turns: Sequence[int]
) -> StepFigures | None:
    """The figures of a model on a cluster; None where its steps were not measured there.

    ``terms``: the four numbers of each signature on each device (:func:`hetspmd.cost.roofline.terms_of`), in one
    turn. ``turns``: how many each device takes for its rows.
    """
    steps = steps_for(theory, cluster)
    rows = None if steps is None else rows_of(theory.graph, steps.rows)
    if steps is None or rows is None:
        return None
    curves = steps.by_rank(cluster.world)
    modelled = _Modelled(theory, row_axes(theory, steps.rows), triples, terms, rows)
    turn = _equally_long(curves, modelled, rows, turns)
    paces = []
    for device, (curve, own) in enumerate(zip(curves, turn, strict=True)):
        if curve is None or not curve.points:
            paces.append(1.0)
            continue
        at = max(own, float(curve.points[0].rows))
        expected = modelled.seconds(device, at)
        paces.append(step_seconds(curve, at) / expected if expected > 0 else 1.0)
    capacity = tuple(capacity_of(c, d) for c, d in zip(curves, cluster.devices, strict=True))
    return StepFigures(steps, rows, turn, tuple(paces), capacity)


def step_seconds(curve: StepCurve, rows: float) -> float:
    """Measured seconds of a step of so many rows, never falling with the rows."""
    points = curve.points
    seconds = np.maximum.accumulate([p.seconds for p in points])
    if rows > points[-1].rows:
        return float(seconds[-1] * rows / points[-1].rows)
    return float(np.interp(rows, [p.rows for p in points], seconds))


def measured_bytes(curve: StepCurve, counted: float) -> int:
    """What a step is expected to hold of which so many bytes are counted; 0 of 0."""
    if counted <= 0 or not curve.points:
        return int(counted)
    counts, peaks = _bytes(curve)
    if counted < counts[0]:
        more = peaks[0] - counts[0]
        return math.ceil(float(counted + more if more > 0 else counted * peaks[0] / counts[0]))
    if counted > counts[-1]:
        return math.ceil(float(peaks[-1] + (counted - counts[-1]) * (peaks / counts).max()))
    return math.ceil(float(np.interp(counted, counts, peaks)))


def _bytes(curve: StepCurve) -> tuple[Array, Array]:
    """Counted and measured bytes of the points, both rising: of equal counts the largest peak."""
    pairs: dict[float, float] = {}
    for count, peak in sorted((p.counted, p.peak) for p in curve.points):
        pairs[float(count)] = float(peak)
    return np.array(list(pairs)), np.maximum.accumulate(list(pairs.values()))


def capacity_of(curve: StepCurve | None, device: Device) -> float:
    """Counted bytes that a device has room for."""
    if curve is None:
        return device.memory
    room = _counted(curve, device.memory)
    limited = math.isinf(device.memory) or device.memory <= curve.memory * (1 + _SAME_MEMORY)
    if curve.over is None or not limited or not curve.points:
        return room
    return min(room, float(max(curve.over[1] - 1, curve.points[-1].counted)))


def _counted(curve: StepCurve, memory: float) -> float:
    """The most counted bytes of which :func:`measured_bytes` are at most ``memory``."""
    if math.isinf(memory) or not curve.points:
        return memory
    low, high = 0.0, memory
    while measured_bytes(curve, high) <= memory:
        low, high = high, 2 * high
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if measured_bytes(curve, middle) <= memory:
            low = middle
        else:
            high = middle
    return low


class _Modelled:
    """S(r): seconds of the single device's step of some of its rows, by the model of single ops. Each call is run
    by its triple along the rows, or whole where it has none."""

    def __init__(
        self,
        theory: Theory,
        axes: frozenset[int],
        triples: Triples,
        terms: Sequence[Array],
        rows: int,
    ) -> None:
        signatures, offset = triples.places
        chosen, sharded = [], []
        for instruction, of_rows in enumerate(theory.row_axes):
            row = next((n for n, axis in enumerate(of_rows) if axis in axes), None)
            chosen.append(signatures[offset[instruction] + (row or 0)])
            sharded.append(row is not None)
        self._terms = [part[np.array(chosen, dtype=np.int64)] for part in terms]
        self._sharded = np.array(sharded, dtype=bool)
        self._rows = rows

    def seconds(self, device: int, rows: float) -> float:
        """Seconds of a device for so many rows."""
        share = np.where(self._sharded, rows / self._rows, 1.0)
        fast, cut, whole, start = (part[:, device] for part in self._terms)
        return float((np.maximum(fast * share, cut * share + whole) + start).sum())


def _equally_long(
    curves: Sequence[StepCurve | None], modelled: _Modelled, rows: int, turns: Sequence[int]
) -> tuple[float, ...]:
    """The rows in a turn of each device with which the turns of all take equally long, of so many rows of all
    together."""
    grids: list[tuple[Array, Array]] = []
    for device, (curve, count) in enumerate(zip(curves, turns, strict=True)):
        most = rows / count
        if curve is None or not curve.points:
            at = np.linspace(most / _GRID, most, _GRID)
            seconds = np.maximum.accumulate([modelled.seconds(device, r) for r in at])
        else:
            measured = [float(p.rows) for p in curve.points if p.rows < most]
            at = np.array([*measured, most])
            seconds = np.array([step_seconds(curve, r) for r in at])
        grids.append((at * count, seconds * count))

    def taken(limit: float) -> list[float]:
        return [0.0 if limit < s[0] else float(np.interp(limit, s, at)) for at, s in grids]

    low, high = 0.0, max(float(seconds[-1]) for _, seconds in grids)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(taken(middle)) < rows else (low, middle)
    return tuple(own / count for own, count in zip(taken(high), turns, strict=True))
