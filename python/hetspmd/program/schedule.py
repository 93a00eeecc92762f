"""When the steps of a program run: forward or backward, in which order, and which collectives share a bucket.

A :class:`Schedule` is made once, by :func:`make_schedule`, and is a part of the plan. What simulates a step, counts
its memory, lowers it or reports it takes the schedule as it is. A plan that is read from a file is checked to have
one that its program can run by (:mod:`hetspmd.program.schedule_check`).

Everything is decided from the program and the rules alone, never from a rank's lengths, so all ranks issue the same
collectives in the same order:

- Forward are the steps from which the loss, the outputs and the updated buffers are derived; backward are the
  other steps that some gradient needs; the rest is dead and dropped.
- The order of each of the two is that of :mod:`hetspmd.program.step_order`.
- Small collectives are gathered into buckets (:mod:`hetspmd.program.buckets`).
- What the backward reads of the forward is saved (:mod:`hetspmd.program.saved_tensors`).
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast

from hetspmd.program.buckets import Bucket, Scheduled, bucketed
from hetspmd.program.dataflow import Key, Values, provider_of
from hetspmd.program.program import Communicate, Compute, Program, Result
from hetspmd.program.saved_tensors import SavedTensor, saved_tensors
from hetspmd.program.step_order import Order
from hetspmd.rules.theory import Theory
from hetspmd.trace.graph import Graph

Places = tuple[int, ...]
"""Places in a program's steps of what a local graph does at once: of one step, or of the collectives of a
bucket."""


class LocalOrder(NamedTuple):
    """The steps of the two local graphs, in the order in which they run."""

    forward: tuple[Scheduled, ...]
    backward: tuple[Scheduled, ...]


@dataclass(frozen=True)
class Schedule:
    """The order of a program's steps, by their places in the program.

    Attributes:
        forward: The steps of the forward graph, in order; several places in one entry are the collectives of a
            bucket, which run as one.
        backward: The same of the backward graph.
        saved: What the backward reads of the forward.
        prefetch_distance: How many groups of prefetched collectives are on their way ahead of the one that is
            used.
        bucket_bytes: The most bytes of a bucket.

    Raises:
        ValueError: The prefetch distance is less than 1, or the bytes of a bucket less than 0.
    """

    forward: tuple[Places, ...]
    backward: tuple[Places, ...]
    saved: tuple[SavedTensor, ...]
    prefetch_distance: int = 1
    bucket_bytes: int = 0

    def __post_init__(self) -> None:
        if self.prefetch_distance < 1:
            raise ValueError(f"a prefetch distance of {self.prefetch_distance}; it is at least 1")
        if self.bucket_bytes < 0:
            raise ValueError(f"buckets of at most {self.bucket_bytes} bytes; it is at least 0")

    def steps(self, program: Program) -> LocalOrder:
        """The steps of the program whose schedule this is."""
        return LocalOrder(
            tuple(scheduled(program, places) for places in self.forward),
            tuple(scheduled(program, places) for places in self.backward),
        )


def scheduled(program: Program, places: Places) -> Scheduled:
    """What runs at once: the step at a place, or the bucket of the collectives at several."""
    if len(places) == 1:
        return program.steps[places[0]]
    return Bucket(tuple(cast(Communicate, program.steps[place]) for place in places))


def make_schedule(
    theory: Theory,
    program: Program,
    bucket_bytes: int = 0,
    *,
    prefetch_distance: int = 1,
    values: Values | None = None,
) -> Schedule:
    """Divide and order the steps of a program.

    ``bucket_bytes``: the most bytes of a bucket. ``prefetch_distance``: how many groups of prefetched collectives
    are on their way ahead. ``values``: what the steps read and write, if known.

    Raises PlanError if a step reads what is not there, and ValueError for a distance below 1.
    """
    graph = theory.graph
    values = Values.of(graph, program) if values is None else values
    have, provider = _providers(graph, values)

    def closure(results: Iterable[Result | None], there: Container[int]) -> set[int]:
        """The steps from which results are derived; of those that are ``there``, whose own are known, no more."""
        needed = {provider_of(graph, have, (r.tensor, r.form)) for r in results if r is not None}
        for index in range(max(needed, default=-1), -1, -1):  # a step reads what is before it
            if index in needed and index not in there:
                needed.update(provider[index])
        return needed

    early = closure((program.loss, *program.outputs, *program.buffers), ())
    there = graph.sources if graph.tangent is None else graph.sources - {graph.producers[graph.tangent]}
    early.update(
        [i for i, s in enumerate(program.steps) if isinstance(s, Compute) and s.instruction in there]
    )
    late = closure(program.gradients, early) - early

    def ordered(members: set[int]) -> Sequence[int]:
        return Order(theory, program, values, sorted(members), provider, prefetch_distance).places

    forward, backward = ordered(early), ordered(late)
    return Schedule(
        forward=bucketed(graph, program, forward, bucket_bytes),
        backward=bucketed(graph, program, backward, bucket_bytes),
        saved=saved_tensors(graph, values, forward, backward, program.gradients),
        prefetch_distance=prefetch_distance,
        bucket_bytes=bucket_bytes,
    )


def _providers(graph: Graph, values: Values) -> tuple[dict[Key, int], list[list[int]]]:
    """The step that first makes each value, and the steps that each step reads. Raises PlanError if a step reads
    what is not there."""
    have: dict[Key, int] = {}
    provider: list[list[int]] = []
    for index, (before, after) in enumerate(zip(*values, strict=True)):
        try:
            provider.append([have[key] for key in before])
        except KeyError:
            provider.append([provider_of(graph, have, key) for key in before])
        for key in after:
            have.setdefault(key, index)
    return have, provider
