"""What every rank of a program does: the steps of its two local graphs, of one level or of two (HAP 3, 6).

In a program of one level a value is ``e | form`` and a rank is a device. Across machines there are two levels:
``e | outer, inner``, where the outer form says what a machine holds of e, and the inner one what an accelerator
holds of that. Steps of one level are those of its schedule. Of two levels there are

- :class:`Both`, a computation by an outer and an inner row;
- :class:`InsideCollective`, a collective among the accelerators of each machine;
- :class:`Across`, one of the outer program, in three steps: each machine's first accelerator collects what its
  machine holds, communicates with the other first ones, and hands the result out, whole or in slices;
- :class:`Together`, several of either that share a bucket.

What a form says beyond what steps give is derived for free: a slice of what is whole on a level, or a mask, which
is the value itself on the first rank of that level and zeros on the others. There is one exception: a tensor that
is whole on machines and sliced inside along a dim is gathered inside before machines take slices of the same dim,
for these are other slices.

A step in micro-batches across machines has three levels (:mod:`hetspmd.program.nested_turns`): the micro-batches,
a level of time, stand before the machines. Its steps are those of two levels, which also say what their value is
in time.

A copy at a cut between segments (:mod:`hetspmd.trace.cuts`) has other lengths than its original across machines,
but the same inside, where all lengths are even. So ``shard(d)'`` is ``shard(d)`` inside, and the inner
program's rebalances are nothing. In time it has the lengths of its original, and on the devices others.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Generic, TypeAlias, TypeVar, cast

from hetspmd.cluster.collective_kinds import Kind
from hetspmd.placement import REPLICATE, Placement, after_cut, same_dim
from hetspmd.program.buckets import Bucket, Scheduled
from hetspmd.program.program import Communicate, Compute, Program, Result
from hetspmd.program.schedule import Schedule
from hetspmd.program.stored import given_forms
from hetspmd.rules.rule import Triple
from hetspmd.rules.theory import Theory
from hetspmd.trace.graph import Graph

Key = tuple[int, Placement, Placement]
"""(tensor id, outer form, inner form): a value of an accelerator's local program."""

FlatKey = tuple[int, Placement]
"""The same in a program of one level."""

AnyKey = TypeVar("AnyKey", bound=tuple[int, ...])
AnyStep = TypeVar("AnyStep")


@dataclass(frozen=True, slots=True)
class Both:
    """Run an instruction by an outer and an inner triple. ``in_time``: the outer level is the loop over
    micro-batches. ``turn``: its triple in time, of a step of three levels."""

    instruction: int
    outer: Triple
    inner: Triple
    in_time: bool = False
    turn: Triple | None = None


@dataclass(frozen=True, slots=True)
class InsideCollective:
    """Turn ``tensor | outer, source`` into ``tensor | outer, target`` within each machine. ``time``: what the
    tensor is in time, of a step of three levels."""

    tensor: int
    outer: Placement
    kind: Kind
    source: Placement
    target: Placement
    time: Placement | None = None


@dataclass(frozen=True, slots=True)
class Across:
    """Turn ``tensor | source, collected`` into ``tensor | target, handed_out`` between machines. ``time``: what the
    tensor is in time, of a step of three levels."""

    tensor: int
    kind: Kind
    source: Placement
    target: Placement
    collected: Placement
    handed_out: Placement
    time: Placement | None = None


@dataclass(frozen=True, slots=True)
class Together:
    """Collectives of one kind and dtype that run as one (:mod:`hetspmd.program.buckets`), all of them between
    machines or all of them inside."""

    members: tuple[Across, ...] | tuple[InsideCollective, ...]

    @property
    def kind(self) -> Kind:
        """Of all of them."""
        return self.members[0].kind


NestedStep = Both | InsideCollective | Across | Together
"""A step of two levels."""

Transfer = Communicate | Bucket | InsideCollective | Across | Together
"""A collective, or a bucket of them, of one level or of two."""


def between(step: NestedStep) -> tuple[Across, ...]:
    """The collectives between machines that a step is."""
    members = step.members if isinstance(step, Together) else (step,)
    return tuple(m for m in members if isinstance(m, Across))


def within(step: NestedStep) -> tuple[InsideCollective, ...]:
    """The collectives inside machines that a step is."""
    members = step.members if isinstance(step, Together) else (step,)
    return tuple(m for m in members if isinstance(m, InsideCollective))


def carried(step: Transfer) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """The values that a collective is given and those that it delivers, pair by pair."""
    if isinstance(step, (Bucket, Together)):
        return [pair for member in step.members for pair in carried(member)]
    if isinstance(step, Communicate):
        return [((step.tensor, step.source), (step.tensor, step.target))]
    tensor = value_of(step)
    if isinstance(step, InsideCollective):
        return [((*tensor, step.outer, step.source), (*tensor, step.outer, step.target))]
    return [((*tensor, step.source, step.collected), (*tensor, step.target, step.handed_out))]


def value_of(step: InsideCollective | Across) -> tuple[int, ...]:
    """The tensor of a collective and, of three levels, its form in time."""
    return (step.tensor,) if step.time is None else (step.tensor, step.time)


@dataclass(frozen=True)
class LocalSteps(Generic[AnyStep, AnyKey]):
    """What each rank does, forward and backward, and the keys of what is left.

    ``saved``: what the backward may read of the forward, and whether it is a slice to be copied. ``stored``: the
    form of parameters, buffers and inputs on the level of devices; inside machines they are whole.
    """

    forward: tuple[AnyStep, ...]
    backward: tuple[AnyStep, ...]
    saved: tuple[tuple[AnyKey, bool], ...]
    stored: Mapping[int, Placement]
    loss: AnyKey | None
    outputs: tuple[AnyKey, ...]
    buffers: tuple[AnyKey, ...]
    gradients: tuple[AnyKey, ...]


Nested: TypeAlias = LocalSteps[NestedStep, Key]
"""Those of two levels (:func:`hetspmd.program.nesting.nest`)."""


def one_level(theory: Theory, program: Program, schedule: Schedule) -> LocalSteps[Scheduled, FlatKey]:
    """The steps of a program of one level, as its schedule has them."""
    graph = theory.graph
    order = schedule.steps(program)

    def computed(steps: tuple[Scheduled, ...]) -> tuple[Scheduled, ...]:
        return tuple(
            s for s in steps if not (isinstance(s, Compute) and graph.instructions[s.instruction].is_source)
        )

    def keys(results: Iterable[Result]) -> tuple[FlatKey, ...]:
        return tuple((r.tensor, r.form) for r in results)

    return LocalSteps(
        forward=computed(order.forward),
        backward=computed(order.backward),
        saved=tuple((s.key, s.how == "slice") for s in schedule.saved),
        stored=given_forms(graph, program),
        loss=None if program.loss is None else (program.loss.tensor, program.loss.form),
        outputs=keys(program.outputs),
        buffers=keys(program.buffers),
        gradients=keys(program.gradients),
    )


def provider(have: Container[AnyKey], key: AnyKey) -> AnyKey | None:
    """The value that ``key`` is, or is sliced or masked from; None if there is none."""
    if key in have:
        return key
    if len(key) > 3:
        return next((base for base in bases_of(key) if base in have), None)
    tensor, outer, *rest = key
    bases: list[tuple[int, ...]] = []
    if rest:
        bases.append((tensor, outer, REPLICATE))
        if not same_dim(outer, rest[0]):  # slices of slices are not slices of inner slices
            bases.append((tensor, REPLICATE, rest[0]))
    bases.append((tensor, *(REPLICATE for _ in key[1:])))
    return next((base for base in cast("list[AnyKey]", bases) if base in have), None)


def bases_of(key: AnyKey) -> list[AnyKey]:
    """The values from which one of several levels may be derived, the nearest first. What is whole on a level is
    sliced there before what lies below it: along a dim that a level below divides there is no such slice."""
    tensor, *forms = key
    levels = [n for n, form in enumerate(forms) if form != REPLICATE]
    bases: list[tuple[int, ...]] = []
    for count in range(1, len(levels) + 1):
        for derived in combinations(reversed(levels), count):
            kept = [n for n in levels if n not in derived]
            if not any(n < m and same_dim(forms[n], forms[m]) for n in derived for m in kept):
                bases.append((tensor, *(REPLICATE if n in derived else form for n, form in enumerate(forms))))
    return cast("list[AnyKey]", bases)


def rows_of(step: Compute | Both) -> tuple[Triple, ...]:
    """The row of each level of a computation."""
    if isinstance(step, Compute):
        return (step.row,)
    return (step.outer, step.inner) if step.turn is None else (step.turn, step.outer, step.inner)


def keys_of(tensors: Sequence[int], *forms: Sequence[Placement]) -> tuple[tuple[int, ...], ...]:
    """The values that are read in these forms of each level; a tensor that is None is -1."""
    return tuple(zip(tensors, *forms, strict=True))


def reads_of(graph: Graph, step: NestedStep) -> tuple[tuple[int, ...], ...]:
    """The values that a step reads."""
    if isinstance(step, Both):
        return keys_of(graph.instructions[step.instruction].inputs, *(row.pre for row in rows_of(step)))
    return tuple(operand for operand, _ in carried(step))


def written_by(graph: Graph, step: Both) -> tuple[tuple[int, ...], ...]:
    """The values that a computation gives; of a result that is None the tensor is -1."""
    return keys_of(graph.instructions[step.instruction].outputs, *_posts(step))


def made_by(graph: Graph, step: Compute | Both) -> tuple[tuple[int, ...], ...]:
    """:func:`written_by`, of one level or of several."""
    if isinstance(step, Both):
        return written_by(graph, step)
    return tuple(zip(graph.instructions[step.instruction].outputs, step.row.post, strict=True))


def _posts(step: Both) -> tuple[tuple[Placement, ...], ...]:
    """What a computation leaves on each level: a copy at a cut is before it on the level of the devices."""
    outer, inner = step.outer.post, step.inner.post
    if step.in_time:
        return tuple(map(after_cut, outer)), inner
    if step.turn is not None:
        return tuple(map(after_cut, step.turn.post)), outer, tuple(map(after_cut, inner))
    return outer, tuple(map(after_cut, inner))
