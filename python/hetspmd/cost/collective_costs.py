"""Seconds of a collective, linear in the sharding ratios (HAP 3.2).

For a tensor of E bytes over n devices, largest share M, k devices with a share, exchanged part X, latency L and
link bandwidth b:

    latency L + per_shard k L + (per_byte + per_largest M + per_exchange X) E / b

with the terms of the kind's formula (:mod:`hetspmd.cluster.collective_kinds`). A collective that was measured
between n devices has its own curve in place of the formula (:mod:`hetspmd.cluster.curves`); one that was not has
the curve of the kind that stands in for it, if there is one. One device communicates in 0 seconds.

Collectives that share a bucket (:mod:`hetspmd.program.buckets`) have one latency, the first one's.

Slices along dim 0 lie in memory as they are sent. Of others the devices make copies, before a tensor is scattered
and after it was gathered, each in the seconds that the slowest device needs for E bytes
(:attr:`~hetspmd.cluster.cluster.Device.copying`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from hetspmd.cluster.cluster import Cluster
from hetspmd.cluster.collective_kinds import KINDS, CollectiveKind, Kind
from hetspmd.cluster.curves import Curve, curve_for
from hetspmd.cost.coalesce import bucket_bytes
from hetspmd.cost.rebalance import rebalance_seconds
from hetspmd.cost.signatures import Array, Index
from hetspmd.placement import Placement, sharded_dim
from hetspmd.program.buckets import Bucket, coalesces
from hetspmd.program.lengths import Lengths
from hetspmd.program.program import Communicate
from hetspmd.rules.theory import Theory


@dataclass(frozen=True, slots=True)
class MoveForm:
    """A collective's seconds: ``constant + per_shard * k + per_largest * M + per_exchange * X``.

    k counts the devices with a share, M is the largest share and X the exchanged part
    ``max_j max(s_j (1 - t_j), t_j (1 - s_j))``. ``axis`` is the axis of the shards (where source and target are
    sharded that of the source, with ``target_axis`` the target's); None if neither is. ``moved``: a rebalance,
    whose X and whose seconds where the shares agree are those of :mod:`hetspmd.cost.rebalance`. ``latency`` is the
    part of ``constant`` in which links are idle; so they are during ``per_shard * k``. ``pack`` and ``unpack`` are
    the parts of it in which the device that copies slowest puts slices in order, before it issues the collective
    and after it has waited for it.
    """

    constant: float
    per_shard: float = 0.0
    per_largest: float = 0.0
    per_exchange: float = 0.0
    axis: int | None = None
    target_axis: int | None = None
    moved: bool = False
    latency: float = 0.0
    pack: float = 0.0
    unpack: float = 0.0

    def repeated(self, times: int) -> MoveForm:
        """The form of so many of them, one after the other."""
        if times == 1:
            return self
        return replace(
            self,
            constant=times * self.constant,
            per_shard=times * self.per_shard,
            per_largest=times * self.per_largest,
            per_exchange=times * self.per_exchange,
            latency=times * self.latency,
            pack=times * self.pack,
            unpack=times * self.unpack,
        )


class Moves:
    """Costs of all collectives of a theory on a cluster, at shares of its axes.

    Attributes: ``theory``, ``cluster``, ``world`` (n), ``bucket_bytes``.
    """

    def __init__(self, theory: Theory, cluster: Cluster) -> None:
        self.theory = theory
        self.cluster = cluster
        self.world = cluster.world
        self.bucket_bytes = bucket_bytes(cluster)
        measured: dict[Kind, list[Curve]] = {}
        for curve in sorted(cluster.curves, key=lambda c: c.above):
            if curve.devices == self.world:
                measured.setdefault(curve.kind, []).append(curve)
        self._curves: dict[Kind, list[Curve]] = {}
        for name, kind in KINDS.items():
            curves = measured.get(name) or measured.get(kind.measured_as or name)
            if curves:
                self._curves[name] = curves
        self._formulas = {name: kind.formula(self.world) for name, kind in KINDS.items()}
        self._nbytes = [t.nbytes for t in theory.graph.tensors]
        self._forms: dict[tuple[int, Placement, Placement, Kind, int | None], MoveForm] = {}
        self._step_forms: dict[tuple[int, Placement, Placement, Kind], MoveForm] = {}
        self._shares: _Shares | None = None
        self._table: _Table | None = None
        self._last: tuple[Array, list[float], list[int]] | None = None

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

    def transfer_forms(self, step: Communicate | Bucket) -> tuple[MoveForm, ...]:
        """Linear forms that add up to the seconds of what runs as one, in all micro-batches: a bucket has one
        latency."""
        if isinstance(step, Communicate):
            return (self.step_form(step),)
        travels = sum(self._nbytes[m.tensor] for m in step.members)
        forms = [self.move_form(m.tensor, m.source, m.target, m.kind, travels) for m in step.members]
        forms = [forms[0], *(replace(f, constant=f.constant - f.latency, latency=0.0) for f in forms[1:])]
        return tuple(f.repeated(self.times(m)) for f, m in zip(forms, step.members, strict=True))

    def step_form(self, step: Communicate) -> MoveForm:
        """The linear form of a collective of a program, as often as a step runs it."""
        key = (step.tensor, step.source, step.target, step.kind)
        form = self._step_forms.get(key)
        if form is None:
            form = self._step_forms[key] = self.move_form(*key).repeated(self.times(step))
        return form

    def times(self, step: Communicate) -> int:
        """How often a step runs a collective on all of its bytes: once."""
        return 1

    def shared_form(self, tensor: int, source: Placement, target: Placement, kind: Kind) -> MoveForm:
        """:meth:`move_form` for a cost model that adds collectives up: one that nothing waits for and that shares
        a bucket with others has the part of a full bucket's latency that it has of its bytes."""
        nbytes = self._nbytes[tensor]
        shares = coalesces(self.theory.graph, tensor, kind, self.bucket_bytes)
        if tensor not in self.theory.deferred or not shares:
            return self.move_form(tensor, source, target, kind)
        form = self.move_form(tensor, source, target, kind, self.bucket_bytes)
        latency = form.latency * nbytes / self.bucket_bytes
        return replace(form, constant=form.constant - form.latency + latency, latency=latency)

    def move_form(
        self, tensor: int, source: Placement, target: Placement, kind: Kind, travels: int | None = None
    ) -> MoveForm:
        """A collective's seconds as a linear form, among ``travels`` bytes of its bucket (default: its own).

        Raises ValueError for a dim that no axis shards.
        """
        key = (tensor, source, target, kind, travels)
        if key not in self._forms:
            self._forms[key] = self._move_form(*key)
        return self._forms[key]

    def _move_form(
        self, tensor: int, source: Placement, target: Placement, kind: Kind, travels: int | None
    ) -> MoveForm:
        if self.world == 1 or self.cluster.network is None:
            return MoveForm(0.0, moved=KINDS[kind].keeps_dim)
        of = KINDS[kind]
        sent = self._sent_form(tensor, source, target, of, travels)
        if of.scatters and sharded_dim(target):
            copied = self._nbytes[tensor] * self.cluster.copying
            return replace(sent, constant=sent.constant + copied, pack=copied)
        if of.gathers and sharded_dim(source):
            copied = self._nbytes[tensor] * self.cluster.copying
            return replace(sent, constant=sent.constant + copied, unpack=copied)
        return sent

    def _sent_form(
        self, tensor: int, source: Placement, target: Placement, kind: CollectiveKind, travels: int | None
    ) -> MoveForm:
        """:meth:`move_form` of slices that lie in memory as they are sent."""
        assert self.cluster.network is not None
        name, nbytes, ends = kind.name, self._nbytes[tensor], kind.sharded_ends
        axis = self._axis(tensor, target if kind.scatters else source) if ends else None
        second = self._axis(tensor, target) if ends == 2 else None
        curves = self._curves.get(name)
        if curves is not None:
            curve = curve_for(curves, nbytes if travels is None else travels)
            return MoveForm(
                constant=curve.latency + curve.per_byte * nbytes,
                per_shard=curve.per_shard,
                per_largest=curve.per_largest * nbytes,
                per_exchange=curve.per_exchange * nbytes,
                axis=axis,
                target_axis=second,
                moved=kind.keeps_dim,
                latency=curve.latency,
            )
        latencies, per_shard, per_byte, per_largest, per_exchange = self._formulas[name]
        latency = self.cluster.network.latency
        whole, idle = nbytes / self.cluster.network.bandwidth, latencies * latency
        return MoveForm(
            constant=idle + per_byte * whole,
            per_shard=per_shard * latency,
            per_largest=per_largest * whole,
            per_exchange=per_exchange * whole,
            axis=axis,
            target_axis=second,
            moved=kind.keeps_dim,
            latency=idle,
        )

    def move_seconds(
        self, tensor: int, source: Placement, target: Placement, kind: Kind, lengths: Lengths
    ) -> float:
        """Seconds of a collective at integer lengths."""
        return self.move_costs(tensor, ((source, target, kind),), lengths)[0]

    def move_costs(
        self, tensor: int, moves: Iterable[tuple[Placement, Placement, Kind]], lengths: Lengths
    ) -> list[float]:
        """Seconds of several collectives ``(source, target, kind)`` of one tensor."""
        at = self._at(lengths)
        costs = []
        for source, target, kind in moves:
            form = self.move_form(tensor, source, target, kind)
            if form.moved:
                costs.append(self.form_seconds(form, at.shares))
                continue
            seconds = form.constant
            if form.axis is not None:
                seconds += form.per_shard * at.filled[form.axis]
                seconds += form.per_largest * at.largest[form.axis]
                if form.target_axis is not None:
                    seconds += form.per_exchange * at.exchanged(form.axis, form.target_axis)
            costs.append(seconds)
        return costs

    def moves_costs(
        self, moves: tuple[tuple[int, tuple[Placement, Placement, Kind]], ...], lengths: Lengths
    ) -> Array:
        """Seconds of many collectives, each with its tensor, as parts of a sum (:meth:`shared_form`). Their forms
        are kept for the next lengths."""
        table = self._of(moves)
        terms, axis, _ = table.terms
        at = self._at(lengths)
        # Beyond the last axis: no axis, which has no share and exchanges nothing.
        filled, largest = np.array([*at.filled[:-1], 0.0]), np.array([*at.largest[:-1], 0.0])
        exchange = np.array([at.exchanged(*pair) if min(pair) >= 0 else 0.0 for pair in table.pairs])
        seconds: Array = terms[:, 0] + terms[:, 1] * filled[axis] + terms[:, 2] * largest[axis]
        if len(exchange):
            seconds += terms[:, 3] * exchange[table.pair]
        for n, form in table.moved:
            seconds[n] = self.form_seconds(form, at.shares)
        return seconds

    def moves_copies(self, moves: tuple[tuple[int, tuple[Placement, Placement, Kind]], ...]) -> Array:
        """The parts of :meth:`moves_costs` in which devices copy slices."""
        return self._of(moves).copies

    def _of(self, moves: tuple[tuple[int, tuple[Placement, Placement, Kind]], ...]) -> _Table:
        if self._table is None or self._table.moves is not moves:
            forms = [self.shared_form(t, *move) for t, move in moves]
            copies = np.array([f.pack + f.unpack for f in forms])
            moved = [(n, f) for n, f in enumerate(forms) if f.moved]
            terms = _move_table(forms)
            pairs, pair = np.unique(np.stack(terms[1:], axis=1), axis=0, return_inverse=True)
            known = [(int(source), int(target)) for source, target in pairs]
            self._table = _Table(moves, terms, copies, moved, known, pair.reshape(-1))
        return self._table

    def form_seconds(self, form: MoveForm, shares: Array) -> float:
        """Seconds of a linear form at given shares."""
        if form.axis is None:
            return form.constant
        if form.moved and form.target_axis is not None:
            source, target = shares[form.axis], shares[form.target_axis]
            return rebalance_seconds(form.constant, form.per_exchange, source, target)
        largest, filled = self._by_axis(shares)
        seconds = form.constant + form.per_shard * filled[form.axis] + form.per_largest * largest[form.axis]
        if form.target_axis is not None:
            seconds += form.per_exchange * exchanged(shares[form.axis], shares[form.target_axis])
        return seconds

    def _by_axis(self, shares: Array) -> tuple[list[float], list[int]]:
        """The largest share of each axis, and how many are above 0; kept for the last shares that were given."""
        last = self._last
        if last is None or last[0] is not shares:
            filled = np.count_nonzero(shares, axis=1).tolist()
            self._last = last = shares, shares.max(axis=1).tolist(), filled
        return last[1:]

    def form_latency(self, form: MoveForm, shares: Array) -> float:
        """The part of :meth:`form_seconds` in which links are idle."""
        if form.axis is None or not form.per_shard:
            return form.latency
        return form.latency + form.per_shard * self._by_axis(shares)[1][form.axis]

    def _axis(self, tensor: int, form: Placement) -> int:
        axis = self.theory.axes.sharded(tensor, form)
        if axis is None:
            name = self.theory.graph.tensors[tensor].name
            raise ValueError(f"dim {sharded_dim(form)} of {name} has no logical axis and is never sharded")
        return axis.id


@dataclass(frozen=True)
class _Table:
    """Many collectives: their terms, with the axes of shards and of targets, what devices copy for them, and which
    are rebalances; the ``pairs`` of these axes, and which ``pair`` each has."""

    moves: object
    terms: tuple[Array, Index, Index]
    copies: Array
    moved: list[tuple[int, MoveForm]]
    pairs: list[tuple[int, int]]
    pair: Index


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
        part = self.pairs.get((source, target))
        if part is None:
            part = self.pairs[source, target] = exchanged(self.shares[source], self.shares[target])
        return part


def exchanged(source: Array, target: Array) -> float:
    """The part of a tensor that the busiest device sends or receives in an all-to-all."""
    return float(np.maximum(source * (1 - target), target * (1 - source)).max())


def _move_table(forms: Sequence[MoveForm]) -> tuple[Array, Index, Index]:
    """Terms, shape (n, 4), and the axes of shards and of targets, -1 for none."""
    terms = np.array([(f.constant, f.per_shard, f.per_largest, f.per_exchange) for f in forms], dtype=float)
    axis = np.array([-1 if f.axis is None else f.axis for f in forms], dtype=np.int64)
    target = np.array([-1 if f.target_axis is None else f.target_axis for f in forms], dtype=np.int64)
    return terms.reshape(-1, 4), axis, target
