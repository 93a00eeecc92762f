"""Which rows of each input a rank needs: those that its part of the program depends on.

A rank takes slices of what is whole, and computes some things whole before it takes a slice (a view of the
labels, a mask). So the program is followed backwards: from what a rank reads of a value to what that needs of the
values before. An instruction passes on what is needed of its results where a triple of the theory says so: a
slice of the result follows from the same slice of its inputs. Everything else needs all of what it reads.

Rows that are not needed are still read where something is computed whole (``InputRows.touched``): whatever lies
there, nothing depends on it, but the ops must not fail on it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from hetspmd.lower.local import ActiveEmitter
from hetspmd.lower.lowering import emitter_of, numbers_of_turns, turns_of
from hetspmd.placement import PARTIAL, REPLICATE, is_sharded, sharded_dim
from hetspmd.plan.plan import Plan
from hetspmd.program.level_layout import LevelKey, LevelLayout, RankPlace
from hetspmd.program.levels import Both, LocalSteps, carried, keys_of, made_by, provider, rows_of
from hetspmd.program.program import Compute
from hetspmd.program.turn_layout import TurnLayout
from hetspmd.program.turn_steps import TurnSteps

Intervals: TypeAlias = tuple[tuple[int, int], ...]
"""Rows ``start .. stop``, ascending and apart."""


@dataclass(frozen=True)
class InputRows:
    """What a rank needs of the inputs, in the graph's order.

    Attributes:
        rows: Of each input the rows that are needed along dim 0; of one without dims its single row.
        touched: Whether ops read rows that are not needed.
    """

    rows: tuple[Intervals, ...]
    touched: bool


@dataclass(frozen=True)
class _Part:
    """A part of a value: of the units of an axis (its group) along a dim, those of the bits of ``mask``."""

    dim: int
    group: int
    mask: int


_Need: TypeAlias = "_Part | bool"
"""What is needed of a value: a part, all of it (True) or nothing (False)."""


def _joined(one: _Need, other: _Need) -> _Need:
    if isinstance(one, _Part) and isinstance(other, _Part):
        if (one.dim, one.group) != (other.dim, other.group):
            return True
        return _Part(one.dim, one.group, one.mask | other.mask)
    return True if True in (one, other) else one or other


@dataclass(eq=False)
class _Value:
    """A value that the program has, of a tensor, and what is needed of it. ``given``: it depends on inputs."""

    need: _Need = False
    given: bool = False


@dataclass
class _Call:
    """An instruction as a rank runs it, with what it reads of each input."""

    instruction: int
    inputs: list[tuple[_Value | None, _Need]]
    outputs: list[_Value | None]


def input_rows(plan: Plan, rank: int) -> InputRows:
    """The rows that a rank of the plan's cluster needs; an idle rank needs none.

    Raises PlanError if the program cannot run by its schedule.
    """
    graph = plan.graph
    emitter = emitter_of(plan, rank, torch.device("cpu"))
    if not isinstance(emitter, ActiveEmitter):
        return InputRows(((),) * len(graph.inputs), False)
    if plan.batches is None:
        followed = _Follower(emitter.layout, [i.tensor for i in graph.inputs])
        followed.step(emitter.steps, emitter.at)
    else:
        steps, layout = turns_of(plan, plan.batches)
        followed = _Follower(layout, [i.tensor for i in graph.inputs])
        place = emitter.layout.rank(emitter.at)
        followed.turns(steps, layout, numbers_of_turns(plan, rank), place)
    return followed.result()


class _Follower:
    """Follows the steps of a rank as :mod:`hetspmd.lower.emit` writes them, then goes back."""

    def __init__(self, layout: LevelLayout, inputs: Sequence[int]) -> None:
        self.layout, self.theory, self.graph = layout, layout.theory, layout.graph
        self.inputs = {tensor: _Value(given=True) for tensor in inputs}
        self.calls: list[_Call] = []
        self.touched = False

    def step(self, steps: LocalSteps[Any, Any], at: RankPlace) -> None:
        """All of a step without micro-batches."""
        forward = _Writer(self, at)
        for tensors in (self.graph.parameters, self.graph.buffers):
            for t in tensors:
                key = self.layout.whole(t.tensor, steps.stored.get(t.tensor, REPLICATE))
                forward.have[key] = _Value()
        for tensor, value in self.inputs.items():
            forward.have[self.layout.whole(tensor, steps.stored.get(tensor, REPLICATE))] = value
        forward.write(steps.forward)
        backward = _Writer(self, at)
        if self.graph.tangent is not None:
            backward.have[self.layout.whole(self.graph.tangent)] = _Value()
        for key, copied in steps.saved if steps.gradients else ():
            if copied:
                forward.read(key)
            backward.have[key] = forward.value(key)
        backward.write(steps.backward)
        for key in (*((steps.loss,) if steps.loss is not None else ()), *steps.outputs, *steps.buffers):
            forward.read(key)
        for key in steps.gradients:
            backward.read(key)

    def turns(self, steps: TurnSteps, layout: TurnLayout, turns: Sequence[int], rank: int) -> None:
        """A step in micro-batches, of the active rank of this number, which takes these."""
        before, graph, given = _Writer(self, RankPlace(0, rank)), self.graph, layout.given
        for tensors in (graph.parameters, graph.buffers):
            for t in tensors:
                before.have[given(t.tensor, steps.stored.get(t.tensor, REPLICATE))] = _Value()
        for tensor, value in self.inputs.items():
            before.have[given(tensor, steps.stored.get(tensor, REPLICATE))] = value
        if graph.tangent is not None:
            before.have[given(graph.tangent)] = _Value()
        before.write(steps.before)
        for turn in turns:
            writer = _Writer(self, RankPlace(turn, rank))
            writer.have |= {key: before.value(key) for key in steps.read}
            writer.write(steps.turn)
            for key in steps.leaving:
                writer.read(key)
        after = _Writer(self, RankPlace(0, rank))
        after.have |= {key: before.value(key) for key in steps.carried}
        summed = [key for key in steps.leaving if not is_sharded(key[1])]
        after.have |= {(key[0], REPLICATE, *key[2:]): _Value() for key in summed}
        after.write(steps.after)
        results = [*steps.buffers, *steps.gradients, *(k for k in steps.outputs if not is_sharded(k[1]))]
        for key in (*results, *(() if steps.loss is None else (steps.loss,))):
            after.read(key)

    def result(self) -> InputRows:
        """Go back from what is read to the inputs."""
        for call in reversed(self.calls):
            passed = self._passed(call)
            for place, (value, read) in enumerate(call.inputs):
                if value is None:
                    continue
                need = read if passed is None else passed[place]
                self.touched = self.touched or (value.given and need != read)
                value.need = _joined(value.need, need)
        rows = tuple(self._rows(tensor, value.need) for tensor, value in self.inputs.items())
        return InputRows(rows, self.touched)

    def _passed(self, call: _Call) -> list[_Need] | None:
        """What is needed of each input for what is needed of the outputs; None: all that is read."""
        needs = [False if value is None else value.need for value in call.outputs]
        if not any(needs):
            return [False] * len(call.inputs)
        first = next(need for need in needs if need)
        if not isinstance(first, _Part):
            return None
        mask, axes = 0, self.theory.axes.axes
        for need in needs:
            if isinstance(need, _Part) and need.group == first.group:
                mask |= need.mask
            elif need:
                return None
        rows = zip(self.theory.rows[call.instruction], self.theory.row_axes[call.instruction], strict=True)
        for row, axis in rows:
            if axis is None or axes[axis].group != first.group or PARTIAL in row.pre:
                continue
            fits = all(
                not isinstance(need, _Part) or (is_sharded(form) and sharded_dim(form) == need.dim)
                for need, form in zip(needs, row.post, strict=True)
            )
            if fits:
                return [
                    _Part(sharded_dim(form), first.group, mask) if is_sharded(form) else read
                    for form, (_, read) in zip(row.pre, call.inputs, strict=True)
                ]
        return None

    def _rows(self, tensor: int, need: _Need) -> Intervals:
        shape = self.graph.tensors[tensor].shape
        count = shape[0] if shape else 1
        if not need or not count:
            return ()
        axis = self.theory.axes.axis(tensor, 0)
        if not isinstance(need, _Part) or need.dim != 0 or axis is None:
            return ((0, count),)
        unit = count // axis.units
        return merged((u * unit, (u + 1) * unit) for u in range(axis.units) if need.mask >> u & 1)


class _Writer:
    """The values that are there while the steps of one graph are followed, at a place."""

    def __init__(self, follower: _Follower, at: RankPlace) -> None:
        self.of, self.layout, self.at = follower, follower.layout, at
        self.have: dict[LevelKey, _Value] = {}

    def value(self, key: LevelKey) -> _Value:
        """The value of which a key is read; a constant is none of the others."""
        base = provider(self.have, key)
        if base is None:
            return _Value()
        value = self.have[key] = self.have[base]
        return value

    def what(self, key: LevelKey) -> _Need:
        """What a key is of its tensor: a part along the dim that the levels cut, or all of it; nothing where it is
        the zeros of a summand."""
        if provider(self.have, key) != key and any(
            form == PARTIAL and self.layout.peers(level, self.at)[0] for level, form in enumerate(key[1:])
        ):
            return False
        regions = self.layout.regions(key, self.at)
        dims = {region.dim for region in regions}
        if len(dims) != 1:
            return True
        (dim,) = dims
        axis = self.of.theory.axes.axis(key[0], dim)
        if axis is None:
            return True
        unit = self.of.graph.tensors[key[0]].shape[dim] // axis.units
        start = sum(region.start for region in regions) // unit
        return _Part(dim, axis.group, ((1 << regions[-1].extent // unit) - 1) << start)

    def read(self, key: LevelKey) -> None:
        """A key is read as it is."""
        need = self.what(key)
        value = self.value(key)
        value.need = _joined(value.need, need)

    def write(self, steps: Iterable[Any]) -> None:
        """Follow steps."""
        for step in steps:
            if isinstance(step, (Compute, Both)):
                self._compute(step)
            else:
                pairs = [(source, target) for source, target in carried(step) if target not in self.have]
                for source, target in pairs:
                    if self.layout.is_nothing(step):
                        self.have[target] = self.value(source)
                        continue
                    self.read(source)
                    self.have[target] = _Value(given=self.value(source).given)

    def _compute(self, step: Compute | Both) -> None:
        instruction, rows = self.of.graph.instructions[step.instruction], rows_of(step)
        keys = keys_of(instruction.inputs, *(row.pre for row in rows))
        inputs: list[tuple[_Value | None, _Need]] = []
        for key in keys:
            if key[0] < 0:
                inputs.append((None, False))
            else:
                read = self.what(key)
                inputs.append((self.value(key), read))
        given = any(value.given for value, _ in inputs if value is not None)
        outputs: list[_Value | None] = []
        for key in made_by(self.of.graph, step):
            new = key[0] >= 0 and key not in self.have
            outputs.append(self.have.setdefault(key, _Value(given=given)) if new else None)
        self.of.calls.append(_Call(step.instruction, inputs, outputs))


def merged(intervals: Iterable[tuple[int, int]]) -> Intervals:
    """The union of intervals."""
    found: list[tuple[int, int]] = []
    for start, stop in sorted(i for i in intervals if i[0] < i[1]):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], stop))
        else:
            found.append((start, stop))
    return tuple(found)
