"""Seconds of a Hoare triple and of a collective, linear in the sharding ratios (HAP 3.2, design 6).

**Computation.** Device j, which holds the share s_j of the axis that a row shards (s_j = 1 where the row
shards none), runs the row in

    max(F s_j / rate_j, (C s_j + W) / bandwidth_j) + launch_j      seconds,

F the op's FLOPs, C the bytes of the tensors that the row cuts, W those of the tensors that stay whole
(Identity and All-Reduce), rate_j in the op's dtype. A device with s_j = 0 skips the op. Views and sources
cost nothing, but for trained parameters: the row in which one is stored carries the optimizer's step, which takes

    (C s_j + W) / update_j + launch_j                              seconds,

with the parameter's own bytes and the bytes of parameters that device j updates in a second (by default its memory
bandwidth divided by :data:`~hetspmd.cost.cluster.PASSES`). Where the op's seconds were measured on device j, as
``constant + slope s_j`` (:mod:`hetspmd.cost.op_times`), they stand in place of the roofline. Where only the
same call run whole was measured, the roofline is scaled to meet it at s_j = 1, so that the rows of an op compare.

Each is convex and piecewise linear in s_j, of the form ``max(fast s, cut s + whole) + start`` with four numbers per
signature and device (:meth:`CostModel.terms`). The roofline is that of Williams et al., CACM 2009.
:meth:`CostModel.row_linear` gives the line that supports the seconds at given ratios, i.e. the side of the max that
binds there.

**Communication** of a tensor of E bytes over n devices, largest share M, k devices with a share, latency L
and link bandwidth b:

    all_gather, reduce_scatter          L + (n - 1) M E / b             ring, padded to the largest shard
    grouped_broadcast, grouped_reduce   k L + E / b                     one pipelined operation per shard
    all_reduce                          2 L + 2 (n - 1) / n E / b       ring: reduce-scatter, all-gather
    all_to_all                          L + E max_j max(s_j (1 - t_j), t_j (1 - s_j)) / b
    rebalance                           an all_to_all along one dim: :mod:`hetspmd.cost.rebalance`

with s and t the shares of the source's and the target's axis: device j sends its slice but for the part that
it keeps, and receives its new slice but for that part. Ring formulas as in Thakur, Rabenseifner and Gropp,
IJHPCA 2005; padding and grouping as in HAP 2.5.1. One device communicates in 0 seconds. A collective that was
measured between n devices has its own curve in place of these formulas (:mod:`hetspmd.cost.measured`).
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from hetspmd.balance.lengths import Lengths
from hetspmd.cost.cluster import Cluster
from hetspmd.cost.measured import Curve, curve_for
from hetspmd.cost.rebalance import rebalance_seconds
from hetspmd.cost.terms import terms_of
from hetspmd.cost.triples import Array, Index, Triples, triples_of
from hetspmd.forms import Form, is_sharded, sharded_dim
from hetspmd.rules.rule import Row
from hetspmd.rules.theory import Theory
from hetspmd.synth.program import Kind

__all__ = ["Array", "CostModel", "Index", "MoveForm", "Triples"]


@dataclass(frozen=True, slots=True)
class MoveForm:
    """A collective's seconds: ``constant + per_shard * k + per_largest * M + per_exchange * X``.

    k counts the devices with a share, M is the largest share and X the exchanged part
    ``max_j max(s_j (1 - t_j), t_j (1 - s_j))``. ``axis`` is the axis of the shards (for all_to_all of the
    source, with ``target_axis`` the target's); None for all_reduce. ``moved``: a rebalance, whose X and whose
    seconds where the shares agree are those of :mod:`hetspmd.cost.rebalance`. ``latency`` is the part of
    ``constant`` in which links are idle; so they are during ``per_shard * k``.
    """

    constant: float
    per_shard: float = 0.0
    per_largest: float = 0.0
    per_exchange: float = 0.0
    axis: int | None = None
    target_axis: int | None = None
    moved: bool = False
    latency: float = 0.0


class CostModel:
    """Costs of all triples and moves of a theory on a cluster.

    Attributes: ``theory``, ``cluster``, ``world`` (n), ``triples``; ``kinds``: per device a number that equal
    devices have in common.
    """

    def __init__(self, theory: Theory, cluster: Cluster) -> None:
        self.theory = theory
        self.cluster = cluster
        self.world = cluster.world
        self.triples = triples_of(theory, keyed=bool(cluster.ops))
        self._fast, self._cut, self._whole_part, self._start, self.kinds = terms_of(
            self.triples, theory, cluster
        )
        self._measured: dict[Kind, list[Curve]] = {}
        for curve in sorted(cluster.curves, key=lambda c: c.above):
            if curve.devices == self.world:
                self._measured.setdefault(curve.kind, []).append(curve)
        self._nbytes = [t.nbytes for t in theory.graph.tensors]
        self._shares: _Shares | None = None
        self._table: tuple[object, tuple[Array, Index, Index], list[tuple[int, MoveForm]]] | None = None

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
        other.cluster = cluster
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

    # shares ------------------------------------------------------------------------------------------------

    def shares(self, lengths: Lengths) -> Array:
        """Fraction of each axis on each device, shape (axes + 1, n); the last row is 1: nothing is sharded.

        Raises ValueError if the lengths belong to another cluster or graph.
        """
        return self._at(lengths).shares

    def even_shares(self, ratios: Sequence[float] | Sequence[Sequence[float]] | Array) -> Array:
        """As :meth:`shares`, for fractional ratios B: of all axes, or by segment, shape (segments, n)."""
        axes = self.theory.axes
        matrix = np.broadcast_to(np.asarray(ratios, float), (axes.segments, self.world))
        rows = matrix[[axis.segment for axis in axes.axes]] if axes.axes else matrix[:0]
        return np.concatenate([rows, np.ones((1, self.world))])

    def _at(self, lengths: Lengths) -> _Shares:
        if self._shares is None or self._shares.lengths is not lengths:
            axes = self.theory.axes.axes
            if lengths.world != self.world or len(lengths.units) != len(axes):
                raise ValueError(
                    f"lengths of {len(lengths.units)} axes on {lengths.world} devices for a theory with "
                    f"{len(axes)} axes and a cluster of {self.world}"
                )
            units = np.array(lengths.units, dtype=float).reshape(len(axes), self.world)
            whole = np.array([max(a.units, 1) for a in axes], dtype=float).reshape(-1, 1)
            shares = np.concatenate([units / whole, np.ones((1, self.world))])
            filled = np.count_nonzero(shares, axis=1)
            self._shares = _Shares(lengths, shares, shares.max(axis=1).tolist(), filled.tolist(), {})
        return self._shares

    # computation -------------------------------------------------------------------------------------------

    def signature(self, instruction: int, row: int) -> int:
        """Index into ``triples`` of a row of an instruction."""
        return int(self.triples.signature[self.triples.offset[instruction] + row])

    def row_index(self, instruction: int, row: Row) -> int:
        """The index of ``row`` among the rows of the instruction. Raises ValueError if it is none of them."""
        try:
            return self.theory.rows[instruction].index(row)
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
        idle = (s == 0) | self.triples.free[signatures, None]
        return np.where(idle, 0.0, np.maximum(fast * s, cut * s + whole) + start)

    def supports(self, signatures: Index, shares: Array) -> tuple[Array, Array]:
        """Slopes and constants, each (len(signatures), n), of the lines that support the rows' seconds at the
        given shares of the axes; the seconds of a share above 0 lie nowhere below them."""
        fast, cut, whole, start = self.terms(signatures)
        axis = self.triples.axis[signatures]
        sharded = (axis < len(self.theory.axes.axes))[:, None]
        busy = ~self.triples.free[signatures, None]
        s = shares[axis]
        bound = fast * s >= cut * s + whole
        slope = np.where(bound, fast, cut)
        constant = np.where(bound, 0.0, whole) + start
        constant = np.where(sharded, constant, constant + slope)
        return np.where(sharded & busy, slope, 0.0), np.where(busy, constant, 0.0)

    def row_linear(
        self, instruction: int, row: int, ratios: Sequence[float] | None = None
    ) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """``(slope, constant)`` per device: seconds are ``constant + slope * share``, exact near ``ratios``
        (default: proportional to speed) and nowhere above the seconds of a share above 0."""
        at = np.asarray(self.speeds() / self.speeds().sum() if ratios is None else ratios, float)
        signatures = np.array([self.signature(instruction, row)])
        slope, constant = self.supports(signatures, self.even_shares(at))
        return tuple(map(float, slope[0])), tuple(map(float, constant[0]))

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
        found: Array = self.whole().sum(axis=0)
        return found

    def floor(self) -> float:
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

    # communication -----------------------------------------------------------------------------------------

    def move_form(self, tensor: int, source: Form, target: Form, kind: Kind) -> MoveForm:
        """A collective's seconds as a linear form. Raises ValueError for a dim that no axis shards."""
        if self.world == 1 or self.cluster.network is None:
            return MoveForm(0.0, moved=kind == "rebalance")
        if kind == "rebalance":
            return replace(self.move_form(tensor, source, target, "all_to_all"), moved=True)
        if kind in self._measured:
            return self._measured_form(tensor, source, target, kind)
        n, latency = self.world, self.cluster.network.latency
        whole = self._nbytes[tensor] / self.cluster.network.bandwidth
        if kind == "all_reduce":
            return MoveForm(2 * latency + 2 * (n - 1) / n * whole)
        axis = self._axis(tensor, source if is_sharded(source) else target)
        if kind == "all_to_all":
            return MoveForm(latency, per_exchange=whole, axis=axis, target_axis=self._axis(tensor, target))
        if kind in ("all_gather", "reduce_scatter"):
            return MoveForm(latency, per_largest=(n - 1) * whole, axis=axis)
        return MoveForm(whole, per_shard=latency, axis=axis)

    def _measured_form(self, tensor: int, source: Form, target: Form, kind: Kind) -> MoveForm:
        """:meth:`move_form` from the measured curve of ``kind``."""
        nbytes = self._nbytes[tensor]
        curve = curve_for(self._measured[kind], nbytes)
        return MoveForm(
            curve.latency + curve.per_byte * nbytes,
            curve.per_shard,
            curve.per_largest * nbytes,
            curve.per_exchange * nbytes,
            None if kind == "all_reduce" else self._axis(tensor, source if is_sharded(source) else target),
            self._axis(tensor, target) if kind == "all_to_all" else None,
            latency=curve.latency,
        )

    def move_seconds(self, tensor: int, source: Form, target: Form, kind: Kind, lengths: Lengths) -> float:
        """Seconds of a collective at integer lengths."""
        return self.move_costs(tensor, ((source, target, kind),), lengths)[0]

    def move_costs(
        self, tensor: int, moves: Iterable[tuple[Form, Form, Kind]], lengths: Lengths
    ) -> list[float]:
        """Seconds of several collectives ``(source, target, kind)`` of one tensor."""
        at = self._at(lengths)
        found = []
        for source, target, kind in moves:
            form = self.move_form(tensor, source, target, kind)
            if form.moved:
                found.append(self.form_seconds(form, at.shares))
                continue
            seconds = form.constant
            if form.axis is not None:
                seconds += form.per_shard * at.filled[form.axis]
                seconds += form.per_largest * at.largest[form.axis]
                if form.target_axis is not None:
                    seconds += form.per_exchange * at.exchanged(form.axis, form.target_axis)
            found.append(seconds)
        return found

    def moves_costs(self, moves: tuple[tuple[int, tuple[Form, Form, Kind]], ...], lengths: Lengths) -> Array:
        """Seconds of many collectives, each with its tensor. Their forms are kept for the next lengths."""
        if self._table is None or self._table[0] is not moves:
            forms = [self.move_form(t, *move) for t, move in moves]
            self._table = (moves, _move_table(forms), [(n, f) for n, f in enumerate(forms) if f.moved])
        terms, axis, target = self._table[1]
        at = self._at(lengths)
        # Beyond the last axis: no axis, which has no share and exchanges nothing.
        filled, largest = np.array([*at.filled[:-1], 0.0]), np.array([*at.largest[:-1], 0.0])
        s, t = at.shares[axis], at.shares[target]
        both = (axis >= 0) & (target >= 0)
        exchange = np.where(both, np.maximum(s * (1 - t), t * (1 - s)).max(axis=1, initial=0.0), 0.0)
        found: Array = (
            terms[:, 0] + terms[:, 1] * filled[axis] + terms[:, 2] * largest[axis] + terms[:, 3] * exchange
        )
        for n, form in self._table[2]:
            found[n] = self.form_seconds(form, at.shares)
        return found

    def form_seconds(self, form: MoveForm, shares: Array) -> float:
        """Seconds of a linear form at given shares."""
        if form.axis is None:
            return form.constant
        s = shares[form.axis]
        if form.moved and form.target_axis is not None:
            return rebalance_seconds(form.constant, form.per_exchange, s, shares[form.target_axis])
        seconds = form.constant + form.per_shard * np.count_nonzero(s) + form.per_largest * float(s.max())
        if form.target_axis is not None:
            seconds += form.per_exchange * exchanged(s, shares[form.target_axis])
        return float(seconds)

    def form_latency(self, form: MoveForm, shares: Array) -> float:
        """The part of :meth:`form_seconds` in which links are idle."""
        if form.axis is None or not form.per_shard:
            return form.latency
        return form.latency + form.per_shard * float(np.count_nonzero(shares[form.axis]))

    def _axis(self, tensor: int, form: Form) -> int:
        axis = self.theory.axes.sharded(tensor, form)
        if axis is None:
            name = self.theory.graph.tensors[tensor].name
            raise ValueError(f"dim {sharded_dim(form)} of {name} has no logical axis and is never sharded")
        return axis.id


@dataclass(frozen=True)
class _Shares:
    """Shares at integer lengths, with the largest and the number of those above 0 of each axis."""

    lengths: Lengths
    shares: Array
    largest: list[float]
    filled: list[int]
    pairs: dict[tuple[int, int], float]

    def exchanged(self, source: int, target: int) -> float:
        """:func:`exchanged` of two axes, remembered."""
        found = self.pairs.get((source, target))
        if found is None:
            found = self.pairs[source, target] = exchanged(self.shares[source], self.shares[target])
        return found


def exchanged(source: Array, target: Array) -> float:
    """The part of a tensor that the busiest device sends or receives in an all-to-all."""
    return float(np.maximum(source * (1 - target), target * (1 - source)).max())


def _move_table(forms: Sequence[MoveForm]) -> tuple[Array, Index, Index]:
    """Terms, shape (n, 4), and the axes of shards and of targets, -1 for none."""
    terms = np.array([(f.constant, f.per_shard, f.per_largest, f.per_exchange) for f in forms], dtype=float)
    axis = np.array([-1 if f.axis is None else f.axis for f in forms], dtype=np.int64)
    target = np.array([-1 if f.target_axis is None else f.target_axis for f in forms], dtype=np.int64)
    return terms.reshape(-1, 4), axis, target
