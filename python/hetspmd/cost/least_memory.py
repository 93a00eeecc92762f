"""Bytes that any program of a step holds, whatever it divides: a bound that is known before any search.

In whichever form a program has a tensor, all devices together hold its bytes at least once, and device j holds at
least its smallest share of an axis that the tensor has. So at a moment

    sum over devices of what is held   >=   sum of the bytes of what must be alive,
    what device j holds                >=   sum of these bytes times the smallest share,

and a tensor that has no axis counts on every device. What must be alive is the same for all programs and all orders
that a schedule may have (:mod:`hetspmd.program.step_order`): forward are the instructions from which the loss, the
outputs and the updated buffers are derived, backward the others that some gradient needs, and in each of the two
only views and what has no FLOPs may be put off, until they are needed. Such an instruction is no moment of its own,
and what it makes counts from where it must have run. Of tensors that may share storage the largest counts, and a
view with no more bytes than what it shows.

In micro-batches what the loop makes counts with the largest of them, and the sums of the gradients from its
beginning on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, Final, TypeVar

import numpy as np
import numpy.typing as npt

from hetspmd.cost.loop_memory import AxisPlaces
from hetspmd.cost.memory import OPTIMIZER_BYTES, TEMPORARIES
from hetspmd.cost.model import Array, Index
from hetspmd.placement import REPLICATE, Placement
from hetspmd.program.lengths import Lengths
from hetspmd.program.micro_batches import MicroBatches
from hetspmd.rules.theory import Theory

WHAT: Final = ("parameters", "optimizer state", "gradients", "activations")
"""What bytes are of; inputs and buffers count as activations."""

_Number = TypeVar("_Number", bound=np.number[Any])

_PARAMETERS, _OPTIMIZER, _GRADIENTS, _ACTIVATIONS = range(len(WHAT))


@dataclass(frozen=True)
class Needed:
    """What any program needs at the moment at which the most is missing.

    total     bytes over all devices together
    room      bytes that they have for it
    parts     of the total, by :data:`WHAT`
    """

    total: int
    room: float
    parts: Mapping[str, int]

    @property
    def missing(self) -> int:
        """Bytes that are missing over all devices; 0 where nothing is."""
        return max(int(np.ceil(self.total - self.room)), 0) if np.isfinite(self.room) else 0


class LeastMemory:
    """What any program of a step must hold, from when to when.

    ``forms``: the forms in which the user wants parameters to be stored, by tensor. ``batches``: in micro-batches.
    """

    def __init__(
        self,
        theory: Theory,
        batches: MicroBatches | None = None,
        forms: Mapping[int, Placement] | None = None,
    ) -> None:
        self.theory, self.batches = theory, batches
        self._forms = forms or {}
        self._places = AxisPlaces(theory, batches)
        self._lives = _Lives(theory, batches)
        self._sets: dict[tuple[int, ...], int] = {}
        self._tell()

    def needed(self, capacity: Array) -> Needed:
        """What is needed at the moment at which the most is missing on devices of ``capacity`` bytes, at whatever
        shares, and on whichever of them."""
        totals = self._divided.sum(axis=1)
        whole = self._whole.sum(axis=1)
        room = np.maximum(capacity[None, :] - whole[:, None], 0.0).sum(axis=1)
        moment = int((totals - room).argmax()) if np.isfinite(room).any() else int((totals + whole).argmax())
        # What every device holds is needed once by each that has room for more.
        holders = int(np.count_nonzero(capacity > whole[moment])) or 1
        parts = self._divided[moment] + holders * self._whole[moment]
        total = int(parts.sum())
        have = float(room[moment] + holders * whole[moment])
        return Needed(total, have, dict(zip(WHAT, map(int, parts), strict=True)))

    def fits(self, capacity: Array) -> bool:
        """Whether some program might fit devices of ``capacity`` bytes."""
        return self.needed(capacity).missing == 0

    def at(self, lengths: Lengths) -> Array:
        """Bytes that every program holds at least on each device at integer lengths, at the worst moment."""
        units, of = self._places.units(lengths)
        shares = np.vstack([units / of[:, None], np.ones(lengths.world)])
        least = shares[self._padded].min(axis=1)
        held = self._over_time(self._nbytes[:, None] * least[self._set])
        # Shares are rounded as floating-point numbers.
        most: Array = np.floor(held.max(axis=0, initial=0.0) * (1 - 1e-12))
        return most

    # ----------------------------------------------------------------------------------------------------------

    def _tell(self) -> None:
        """Spans of bytes: (first moment, moment behind the last, bytes, set of axes, what of)."""
        graph, lives = self.theory.graph, self._lives
        parameters = {p.tensor for p in graph.parameters}
        gradients = {p.gradient for p in graph.parameters if p.gradient is not None}
        trained = [p.tensor for p in graph.parameters if p.gradient is not None]
        steps, moments = lives.moments, lives.moments + 1 + len(trained)
        spans: list[tuple[int, int, int, int, int]] = []
        for members in lives.by_storage(moments):
            tensors = [t for t, _, _ in members]
            axes = self._set_of(tensors)
            what = (
                _PARAMETERS
                if not parameters.isdisjoint(tensors)
                else _ACTIVATIONS
                if gradients.isdisjoint(tensors)
                else _GRADIENTS
            )
            sized = [(first, end, self._bytes(t, lives.shown[t])) for t, first, end in members]
            spans += [(first, end, nbytes, axes, what) for first, end, nbytes in _largest(sized)]
        for place, t in enumerate(trained):
            axes, numel = self._set_of([t]), graph.tensors[t].numel
            spans.append((0, moments, numel * OPTIMIZER_BYTES, axes, _OPTIMIZER))
            updated = steps + 1 + place
            spans.append((updated, updated + 1, graph.tensors[t].nbytes * TEMPORARIES, axes, _OPTIMIZER))
        columns = np.array(spans, dtype=np.int64).reshape(-1, 5)
        self._first, self._end, self._nbytes, self._set, self._what = (columns[:, c] for c in range(5))
        self._moments = moments

    @cached_property
    def _padded(self) -> Index:
        """The axes of each set, padded with its first; the last number is that of a share of one."""
        most = max(map(len, self._sets), default=1) or 1
        rows = [[*axes, *(axes[:1] or (-1,)) * (most - len(axes))] for axes in self._sets]
        return np.array(rows, dtype=np.int64).reshape(-1, most)

    @cached_property
    def _divided(self) -> Index:
        """Bytes of what may be divided at each moment, over all devices, by what they are of."""
        return self._by_what(np.array([bool(axes) for axes in self._sets], dtype=bool)[self._set])

    @cached_property
    def _whole(self) -> Index:
        """Bytes of each device at each moment of what has no axis."""
        return self._by_what(np.array([not axes for axes in self._sets], dtype=bool)[self._set])

    def _by_what(self, chosen: Array) -> Index:
        parts = np.zeros((len(self._nbytes), len(WHAT)), dtype=np.int64)
        parts[np.arange(len(parts)), self._what] = np.where(chosen, self._nbytes, 0)
        held: Index = self._over_time(parts)
        return held

    def _over_time(self, held: npt.NDArray[_Number]) -> npt.NDArray[_Number]:
        change = np.zeros((self._moments + 1, *held.shape[1:]), dtype=held.dtype)
        np.add.at(change, self._first, held)
        np.subtract.at(change, self._end, held)
        totals: npt.NDArray[_Number] = change.cumsum(axis=0)[: self._moments]
        return totals

    def _set_of(self, tensors: Sequence[int]) -> int:
        """The number of the set of axes along which tensors may be divided."""
        axes: set[int] = set()
        for t in tensors:
            if self._forms.get(t) != REPLICATE:
                axes.update(place for place, _ in self._divisions(t))
        return self._sets.setdefault(tuple(sorted(axes)), len(self._sets))

    def _divisions(self, tensor: int) -> list[tuple[int, int]]:
        """The places of the axes of a tensor, with its bytes."""
        of = self.theory.axes
        dims = range(len(self.theory.graph.tensors[tensor].shape))
        axes = dict.fromkeys(a.id for d in dims if (a := of.axis(tensor, d)) is not None)
        return [self._places.at(tensor, axis) for axis in axes]

    def _bytes(self, tensor: int, shown: Sequence[int]) -> int:
        """The bytes of a tensor over all devices, whole units of any of its axes, and no more than any of what it
        is a view of has."""
        least = self._places.at(tensor, self._places.whole)[1]
        for t in (tensor, *shown):
            nbytes = self._places.at(t, self._places.whole)[1]
            units = [self._units[place] for place, _ in self._divisions(t)]
            least = min(least, nbytes, *(nbytes // max(n, 1) * max(n, 1) for n in units))
        return least

    @cached_property
    def _units(self) -> list[int]:
        one = Lengths(1, tuple((axis.units,) for axis in self.theory.axes.axes))
        _, of = self._places.units(one)
        return [int(n) for n in of]


class _Lives:
    """From which moment to which each tensor must be there, in any order that a schedule may have.

    Moments are the instructions that are never put off, in order, forward before backward. ``moments``: how many.
    ``must[i]``: the moment at which instruction i must have run; ``reads[i]``: the one before which it may have
    read what it reads. ``shown[t]``: the tensors whose storage t may have.
    """

    def __init__(self, theory: Theory, batches: MicroBatches | None) -> None:
        self.theory, self.graph = theory, theory.graph
        graph = theory.graph
        forward = self._needed([graph.loss, *(o.tensor for o in graph.outputs), *graph.updates], frozenset())
        backward = self._needed([p.gradient for p in graph.parameters], forward)
        self.order = [*sorted(forward), *sorted(backward)]
        self.forward = forward
        moving = {i for i in self.order if self._may_move(i)}
        at: dict[int, int] = {}
        self.reads: dict[int, int] = {}
        self.moments = self.before_backward = 0
        for i in self.order:
            at[i] = self.moments
            self.moments += i not in moving
            self.reads[i] = self.moments
            self.before_backward += i not in moving and i in forward
        self.must = self._latest(at, moving)
        self._loop = (
            None
            if batches is None
            else next((at[i] for i in self.order if i not in moving and batches.loop.phases[i] == "in"), None)
        )
        self._summed = frozenset() if batches is None or self._loop is None else batches.summed
        self.shown = self._views()

    def by_storage(self, moments: int) -> list[list[tuple[int, int, int]]]:
        """Of tensors that may share storage, each with its first moment and the one behind its last, of so many."""
        graph, alive = self.graph, set(self.order)
        results = {graph.loss, *(o.tensor for o in graph.outputs), *graph.updates}
        results |= {p.gradient for p in graph.parameters}
        groups: dict[int, list[tuple[int, int, int]]] = {}
        for instruction in graph.instructions:
            for t in instruction.outputs:
                if t < 0 or not (instruction.is_source or instruction.id in alive):
                    continue
                root = self.shown[t][-1] if self.shown[t] else t
                if instruction.is_source:
                    first, end = (0, moments) if t != graph.tangent else (self.before_backward, moments)
                else:
                    readers = (self.reads[i] for i in graph.consumers.get(t, ()) if i in alive)
                    first, end = self.must[instruction.id], max(readers, default=0)
                    end = moments if t in results else end
                    if t in self._summed and self._loop is not None:
                        first = min(first, self._loop)
                if first < end:
                    groups.setdefault(root, []).append((t, first, end))
        return list(groups.values())

    def _needed(self, results: Sequence[int | None], done: frozenset[int] | set[int]) -> set[int]:
        """The instructions from which results are derived, but for sources and those that are done."""
        needed = {t for t in results if t is not None}
        found: set[int] = set()
        for instruction in reversed(self.graph.instructions):
            if needed.isdisjoint(instruction.outputs):
                continue
            needed.update(instruction.inputs)
            if not instruction.is_source and instruction.id not in done:
                found.add(instruction.id)
        return found

    def _may_move(self, instruction: int) -> bool:
        """Whether a schedule may put an instruction off, or run it when its graph begins (a second reading)."""
        rule = self.theory.rules.get(instruction)
        return instruction in self.graph.second_reads or (
            rule is not None and (bool(rule.alias) or (not rule.flops and not rule.random))
        )

    def _latest(self, at: Mapping[int, int], moving: set[int]) -> dict[int, int]:
        """The moment at which each instruction must have run: its own, or the first of those that need it, and
        before its graph ends."""
        must: dict[int, int] = {}
        for i in reversed(self.order):
            if i not in moving:
                must[i] = at[i]
                continue
            early = i in self.forward
            outputs = self.graph.instructions[i].outputs
            readers = [c for t in outputs if t >= 0 for c in self.graph.consumers.get(t, ())]
            needs = [must[c] for c in readers if c in must and (c in self.forward) == early]
            must[i] = min([*needs, self.before_backward if early else self.moments])
        return must

    def _views(self) -> list[tuple[int, ...]]:
        """Of each tensor those whose storage it may have, the nearest first."""
        shown: list[tuple[int, ...]] = [()] * len(self.graph.tensors)
        for instruction in self.graph.instructions:
            rule = self.theory.rules.get(instruction.id)
            if rule is None or not rule.alias or not instruction.inputs or instruction.is_source:
                continue
            base = instruction.inputs[0]
            for t in instruction.outputs:
                if t >= 0:
                    shown[t] = (base, *shown[base])
        return shown


def _largest(spans: Sequence[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Of spans (first, end, bytes) the most bytes at each time, as spans that do not overlap."""
    if len(spans) == 1:
        return list(spans)
    times = sorted({time for first, end, _ in spans for time in (first, end)})
    found: list[tuple[int, int, int]] = []
    for start, stop in pairwise(times):
        most = max((n for first, end, n in spans if first <= start and stop <= end), default=0)
        if most:
            found.append((start, stop, most))
    return found
