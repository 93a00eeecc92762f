"""Small collectives share a bucket: one collective carries several tensors.

A collective costs a latency, and time of the thread that issues it, however little it carries. So collectives of
one kind and dtype that are smaller than a bucket, and that may run together, become a :class:`Bucket`. It starts
where the last of them would have. They may run together in three cases:

- nothing in this graph reads their results before its last collective has started (gradients);
- no computation stands between them (what one layer gathers);
- they are tiny (:data:`TINY`) even together, and the later one is waited for first (both sums of a normalisation's
  backward): then nothing waits for longer than before.

No bucket carries more bytes than its size, so that what is early does not wait for long. A collective whose source
another one delivers is never in a bucket with it.

All of this is decided from whole tensors, so that every rank forms the same buckets.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from hetspmd.cluster.collective_kinds import KINDS, Kind
from hetspmd.placement import REPLICATE
from hetspmd.program.program import Communicate, Compute, Program, Step, communication_text
from hetspmd.trace.graph import Graph

TINY: Final = 10
"""Times as long to carry as to begin a full bucket takes: what has at most one of so many parts of a bucket's bytes
takes no longer to carry than to begin."""

_DTYPES: Final = ("float32", "float64", "float16", "bfloat16")


@dataclass(frozen=True, slots=True)
class Bucket:
    """Collectives of one kind and dtype that run as one, in the order in which the program has them."""

    members: tuple[Communicate, ...]

    @property
    def kind(self) -> Kind:
        """Of all of them."""
        return self.members[0].kind


Scheduled = Step | Bucket
"""What a local graph consists of."""


def members(step: Communicate | Bucket) -> tuple[Communicate, ...]:
    """The collectives that run as this one."""
    return step.members if isinstance(step, Bucket) else (step,)


def coalesces(graph: Graph, tensor: int, kind: Kind, nbytes: float) -> bool:
    """Whether a collective of this kind may share a bucket of ``nbytes`` bytes."""
    meta = graph.tensors[tensor]
    return KINDS[kind].coalesces and meta.dtype in _DTYPES and 0 < meta.nbytes < nbytes


def transfer_text(step: Communicate | Bucket, names: Sequence[str]) -> str:
    """A collective for people; ``names`` of the graph's tensors. ``All-Reduce(b1, b2 and 3 more)``."""
    if isinstance(step, Communicate):
        return communication_text(step, names[step.tensor])
    shown = ", ".join(names[m.tensor] for m in step.members[:2])
    more = len(step.members) - 2
    return f"{KINDS[step.kind].text}({shown}{f' and {more} more' if more else ''})"


@dataclass
class _Open:
    """A bucket that takes more members: their places in the order, and bytes."""

    places: list[int] = field(default_factory=list)
    nbytes: int = 0
    needed: int = 0
    beside: bool = True
    """No computation has come since the last member."""


@dataclass(frozen=True, slots=True)
class Small:
    """A collective that may share a bucket: its kind and dtype, its bytes, and the place in the order of the first
    step that reads its result."""

    kind: Kind
    dtype: str
    nbytes: int
    needed: int


def bucketed(
    graph: Graph, program: Program, order: Sequence[int], nbytes: float
) -> tuple[tuple[int, ...], ...]:
    """The steps of one local graph in their order, with buckets of at most ``nbytes`` bytes. Steps are places in
    the program; several in one entry share a bucket."""
    if nbytes <= 0:
        return tuple([(place,) for place in order])
    steps = [program.steps[place] for place in order]
    moves = [(i, s) for i, s in enumerate(steps) if isinstance(s, Communicate)]
    small = [(i, s) for i, s in moves if coalesces(graph, s.tensor, s.kind, nbytes)]
    entries: list[tuple[int, ...]] = [(place,) for place in order]
    if len(small) < 2:
        return tuple(entries)
    needed = _needed(graph, steps, {s.tensor for _, s in small})
    places: dict[int, Small] = {}
    for i, step in small:
        meta = graph.tensors[step.tensor]
        places[i] = Small(step.kind, meta.dtype, meta.nbytes, needed[i])
    sources = graph.sources
    computed = [isinstance(s, Compute) and s.instruction not in sources for s in steps]
    for group in grouped(places, computed, moves[-1][0], nbytes):
        for i in group[:-1]:
            entries[i] = ()
        entries[group[-1]] = tuple(order[i] for i in group)
    return tuple(entry for entry in entries if entry)


def grouped(
    small: Mapping[int, Small], computed: Sequence[bool], last: int, nbytes: float
) -> list[list[int]]:
    """The places in the order of the steps of the collectives that run together, at least two a group.

    ``small``: by place, ascending, those that may. ``computed``: of every step, whether it is a computation.
    ``last``: the place of the last collective of all.
    """
    late: dict[tuple[Kind, str], _Open] = {}
    near: dict[tuple[Kind, str], _Open] = {}
    closed: list[list[int]] = []

    def close(group: dict[tuple[Kind, str], _Open], key: tuple[Kind, str]) -> None:
        closed.append(group.pop(key).places)

    for at, computes in enumerate(computed):
        if computes:
            for bucket in near.values():
                bucket.beside = False
            continue
        for key in [k for k, o in near.items() if o.needed <= at]:
            close(near, key)
        one = small.get(at)
        if one is None:
            continue
        key = (one.kind, one.dtype)
        group = late if one.needed > last else near
        if key in group:
            bucket = group[key]
            together = bucket.nbytes + one.nbytes
            free = bucket.beside or (one.needed <= bucket.needed and together * TINY <= nbytes)
            if together > nbytes or (group is near and not free):
                close(group, key)
        bucket = group.setdefault(key, _Open(needed=len(computed) + 1))
        bucket.beside = True
        bucket.places.append(at)
        bucket.nbytes += one.nbytes
        bucket.needed = min(bucket.needed, one.needed)
    closed += [bucket.places for group in (late, near) for bucket in group.values()]
    return [places for places in closed if len(places) > 1]


def _needed(graph: Graph, steps: Sequence[Step], tensors: set[int]) -> list[int]:
    """By step, where the result of a collective of one of ``tensors`` is first read: itself, a slice or a mask."""
    first: list[int] = [len(steps)] * len(steps)
    readers: dict[int, list[tuple[int, int]]] = {}
    reading = {reader for tensor in tensors for reader in graph.consumers.get(tensor, ())}
    for at in range(len(steps) - 1, -1, -1):
        step = steps[at]
        if isinstance(step, Communicate):
            if step.tensor not in tensors:
                continue
            for reader, form in readers.get(step.tensor, ()):
                if step.target in (form, REPLICATE):
                    first[at] = min(first[at], reader)
            readers.setdefault(step.tensor, []).append((at, step.source))
        elif step.instruction in reading:
            inputs = graph.instructions[step.instruction].inputs
            for tensor, form in zip(inputs, step.row.pre, strict=True):
                readers.setdefault(tensor, []).append((at, form))
    return first
