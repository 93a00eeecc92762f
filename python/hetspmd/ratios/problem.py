"""A fixed program as a function of its sharding ratios B, in which each of k segments has its own (HAP 5.2).

    t(Q, B) = sum over stages i (comm_i(B) + max_j comp_ij(B_1j, ..., B_kj))

Merged stages over merged signatures, and sums of the collectives' terms: what the linear program of
:mod:`hetspmd.ratios.linear` bounds and :mod:`hetspmd.ratios.ratios` minimises.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hetspmd.cost.memory import MemoryProfile
from hetspmd.cost.model import Array, CostModel, Index, MoveForm
from hetspmd.cost.rebalance import rebalance_seconds
from hetspmd.cost.step import Stages
from hetspmd.ratios.ratio_thresholds import THRESHOLDS

Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Lines:
    """Lines ``sum over s of slope_s B_s + constant_s`` below the seconds of stages; ``slope`` and ``constant`` have
    the shape (segments, stages, devices). What is not sharded is in the ``whole``, shape (stages, devices)."""

    slope: Array
    constant: Array
    whole: Array


@dataclass(frozen=True)
class Room:
    """What a program holds at each step: ``whole``, shape (steps), on every device, and ``cut``, shape (steps,
    segments), over all devices; ``in_turn``: the same of a micro-batch, of which a device has so many ``times``,
    shape (n), its share in each of its turns; and the bytes that each device has, ``capacity``."""

    whole: Array
    cut: Array
    in_turn: Array
    times: Array
    capacity: Array

    @classmethod
    def of(cls, profile: MemoryProfile, capacity: Array) -> Room:
        """The room for a program, but for steps that hold no more than another one of it, whatever the ratios."""
        parts = [profile.whole, profile.cut, profile.in_turn]
        table = _largest(np.unique(np.column_stack(parts).astype(float), axis=0))
        segments = profile.cut.shape[1]
        cut, in_turn = table[:, 1 : segments + 1], table[:, segments + 1 :]
        return cls(table[:, 0], cut, in_turn, profile.times, capacity)

    def held(self, ratios: Array) -> Array:
        """Bytes at each step on each device, shape (steps, n), at B, shape (segments, n)."""
        nbytes: Array = self.whole[:, None] + self.cut @ ratios + self.in_turn @ (ratios * self.times)
        return nbytes

    def fits(self, ratios: Array) -> bool:
        """Whether every device holds no more than it has."""
        return bool((self.held(ratios) <= self.capacity * (1 + THRESHOLDS.bound_part)).all())


def _largest(rows: Array) -> Array:
    """The rows of which no other one has at least as much in every column."""
    kept = []
    rest = rows[np.argsort(-rows.sum(axis=1), kind="stable")]
    while len(rest):
        kept.append(rest[0])
        rest = rest[(rest > rest[0]).any(axis=1)]
    return np.array(kept)


@dataclass(frozen=True)
class Placement:
    """Segments of a program's computations and of the ends of its collectives, where its axes do not tell them:
    of a program without cuts that is asked what segments would gain."""

    count: int
    computations: Index
    moves: tuple[int, ...]


class Problem:
    """A program's stages as functions of B, shape (segments, n).

    ``most`` are upper bounds of the ratios of every segment, ``room`` of what they hold together.
    """

    def __init__(
        self,
        stages: Stages,
        most: Array | None = None,
        room: Room | None = None,
        placement: Placement | None = None,
    ) -> None:
        model = self.model = stages.model
        self.most = np.full(model.world, np.inf) if most is None else most
        self.room = room
        axes = model.theory.axes
        self.segments = axes.segments if placement is None else placement.count
        t, count = model.triples, len(axes.axes)
        sharded = t.axis[stages.signatures] < count
        if placement is None:
            by_axis = np.array([*(a.segment for a in axes.axes), 0], dtype=np.int64)
            segment = by_axis[t.axis[stages.signatures]]
        else:
            segment = np.where(sharded, placement.computations, 0)
        used, which = np.unique(np.stack([stages.signatures, segment], axis=1), axis=0, return_inverse=True)
        s = used[:, 0]
        columns = np.concatenate([t.columns(count)[s], used[:, 1:]], axis=1)
        _, position, kind_of = np.unique(columns, axis=0, return_index=True, return_inverse=True)
        self.signatures: Index = used[position, 0]
        self.segment: Index = used[position, 1]
        self.sharded: Mask = t.axis[self.signatures] < count
        merged = kind_of.reshape(-1)[which.reshape(-1)]
        counts = np.zeros((stages.count, len(self.signatures)))
        np.add.at(counts, (stages.stage, merged), 1.0)
        counts[:, model.free(self.signatures)] = 0.0
        unique, weight = np.unique(counts, axis=0, return_counts=True)
        self.counts: Array = unique
        self.weight: Array = weight.astype(float)
        self._ends = None if placement is None else placement.moves
        self._add_up(stages.moves)
        kinds: dict[tuple[int, float, float, float], list[int]] = {}
        for j in range(model.world):
            room_of, times = (0.0, 1.0) if room is None else (float(room.capacity[j]), float(room.times[j]))
            kinds.setdefault((int(model.kinds[j]), float(self.most[j]), room_of, times), []).append(j)
        self.kinds: tuple[tuple[int, ...], ...] = tuple(map(tuple, kinds.values()))
        self._kind = np.empty(model.world)
        for kind, members in enumerate(self.kinds):
            self._kind[list(members)] = kind
        self.unsharded: Array = self.computation(np.zeros((self.segments, model.world))).max(axis=1)

    def _add_up(self, moves: Sequence[MoveForm]) -> None:
        """Terms of the collectives: their constant, and by segment; of rebalances by pair of segments, their
        seconds where lengths differ and per part that is moved."""
        axes = self.model.theory.axes.axes
        self.constant = 0.0
        self.per_shard, self.per_largest, self.per_exchange = np.zeros((3, self.segments))
        self.pairs: dict[tuple[int, int], tuple[float, float]] = {}
        for n, m in enumerate(moves):
            s = 0 if m.axis is None else axes[m.axis].segment if self._ends is None else self._ends[n]
            if m.moved:
                t = s if m.target_axis is None else axes[m.target_axis].segment
                if s != t:
                    pair = min(s, t), max(s, t)
                    fixed, moved = self.pairs.get(pair, (0.0, 0.0))
                    self.pairs[pair] = fixed + m.constant, moved + m.per_exchange
                continue
            self.constant += m.constant
            self.per_shard[s] += m.per_shard
            self.per_largest[s] += m.per_largest
            self.per_exchange[s] += m.per_exchange
        self.pairs = {pair: self.pairs[pair] for pair in sorted(self.pairs)}

    def priced(self, model: CostModel, moves: Sequence[MoveForm]) -> Problem:
        """The same program on a cluster of other speeds, in which the devices of each kind are still equal."""
        other = copy.copy(self)
        other.model = model
        other._add_up(moves)
        other.unsharded = other.computation(np.zeros((self.segments, model.world))).max(axis=1)
        return other

    def communication(self, ratios: Array) -> float:
        """Seconds of all collectives."""
        total = (
            self.constant
            + float(self.per_shard @ np.count_nonzero(ratios, axis=1))
            + float(self.per_largest @ ratios.max(axis=1))
            + float(self.per_exchange @ (ratios * (1 - ratios)).max(axis=1))
        )
        for (s, t), (fixed, moved) in self.pairs.items():
            total += rebalance_seconds(fixed, moved, ratios[s], ratios[t])
        return total

    def by_signature(self, ratios: Array) -> Array:
        """The share by which each merged signature is divided, 1 where it is not, shape (signatures, n)."""
        shares: Array = np.where(self.sharded[:, None], ratios[self.segment], 1.0)
        return shares

    def _unlike(self, ratios: Array) -> tuple[Index, Index]:
        """The first of the devices that are of one kind and have the same shares, and for each device its place
        among these."""
        if len(self.kinds) == len(self._kind):
            return np.arange(len(self._kind)), np.arange(len(self._kind))
        every = np.concatenate([self._kind[None], ratios])
        _, first, place = np.unique(every, axis=1, return_index=True, return_inverse=True)
        return first, place.reshape(-1)

    def computation(self, ratios: Array) -> Array:
        """Seconds of each merged stage on each device."""
        seconds = np.zeros((len(self.signatures), self.model.world))
        for s in range(self.segments):
            own = self.segment == s
            seconds[own] = self.model.seconds(self.signatures[own], self.model.even_shares(ratios[s]))
        first, place = self._unlike(ratios)
        stage_seconds: Array = (self.counts @ seconds[:, first])[:, place]
        return stage_seconds

    def step_seconds(self, ratios: Array) -> float:
        """t(Q, B)."""
        return float(self.weight @ self.computation(ratios).max(axis=1)) + self.communication(ratios)

    def seconds_within(self, ratios: Array) -> float:
        """t(Q, B), infinite where a ratio is above its bound or a device lacks memory."""
        over = (ratios > self.most * (1 + THRESHOLDS.bound_part)).any()
        if over or (self.room is not None and not self.room.fits(ratios)):
            return math.inf
        return self.step_seconds(ratios)

    def lines(self, ratios: Array) -> Lines:
        """Supporting lines at B of the seconds with shares above 0."""
        slope = np.zeros((self.segments, len(self.weight), self.model.world))
        constant = np.zeros_like(slope)
        whole = np.zeros(slope.shape[1:])
        first, place = self._unlike(ratios)
        for s in range(self.segments):
            own = self.segment == s
            up, at = self.model.supports(self.signatures[own], self.model.even_shares(ratios[s]))
            up, at = up[:, first], at[:, first]
            counts, cut = self.counts[:, own], self.sharded[own]
            slope[s] = (counts @ up)[:, place]
            constant[s] = (counts[:, cut] @ at[cut])[:, place]
            whole += (counts[:, ~cut] @ at[~cut])[:, place]
        return Lines(slope, constant, whole)

    def sets(self) -> list[Mask]:
        """Sets of devices that may have shares, of each kind the first ranks, all devices first: every set if there
        are at most ``device_sets``, else the fastest n, n - 1, ..., 1."""
        sizes = [len(kind) for kind in self.kinds]
        if math.prod(n + 1 for n in sizes) - 1 <= THRESHOLDS.device_sets:
            every = itertools.product(*(range(n, -1, -1) for n in sizes))
            return [self.first(c) for c in sorted((c for c in every if any(c)), key=lambda c: -sum(c))]
        alone = self.model.alone()
        kind_of = {j: c for c, kind in enumerate(self.kinds) for j in kind}
        counts = [0] * len(sizes)
        sets = []
        for j in sorted(kind_of, key=lambda j: (alone[j], j)):
            counts[kind_of[j]] += 1
            sets.append(self.first(counts))
        return sets[::-1]

    def first(self, counts: Sequence[int]) -> Mask:
        """The set of the first ``counts[c]`` devices of each kind c."""
        mask = np.zeros(self.model.world, dtype=bool)
        for kind, count in zip(self.kinds, counts, strict=True):
            mask[list(kind[:count])] = True
        return mask
