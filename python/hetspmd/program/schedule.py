"""Which steps run forward and which backward, and in what order.

Everything here is decided from the program and the rules alone, never from a rank's lengths, so all ranks
issue the same collectives in the same order.

- Forward are the steps from which the loss, the outputs and the updated buffers are derived; backward are the
  other steps that some gradient needs; the rest is dead and dropped.
- A collective of a value that this graph computes starts right after the step that produces it. One that
  reads another collective's result keeps its place: started at once, it would have every device wait at once.
- A collective of a value that is there from the beginning (a parameter or its second reading, the batch, a value
  of the other graph) is *prefetched*. Such collectives form groups, in the order in which they are needed; those
  that one step needs are a group. The program says how many groups are on their way ahead (``program.ahead``): so
  many start with the graph, each other one right before the one that is as many before it is waited for. With one,
  a group is on its way while the one before it is used, and no more memory is held ahead than that; more hide what
  takes longer than the work between two groups (:mod:`hetspmd.optimize.prefetch`).
- Cheap work on what collectives deliver is *put off* until its result is needed, or the graph ends: done at
  once, it would have every device wait there. Put off are the computations of :func:`_is_put_off`.

Nothing else moves: other computations keep the program's order. In the end small collectives are gathered into
buckets (:mod:`hetspmd.program.buckets`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import NamedTuple, Self

from hetspmd.errors import PlanError
from hetspmd.placement import PARTIAL, REPLICATE, Placement, is_sharded, placement_text
from hetspmd.program.buckets import Scheduled, bucketed
from hetspmd.program.program import Communicate, Compute, Program, Result, Step
from hetspmd.rules.theory import Theory
from hetspmd.trace.graph import Graph

Key = tuple[int, Placement]
"""(tensor id, form): a value of the local program."""


@dataclass(frozen=True)
class Schedule:
    """The steps of the two local graphs, in the order in which they are emitted."""

    forward: tuple[Scheduled, ...]
    backward: tuple[Scheduled, ...]


def reads(graph: Graph, step: Scheduled) -> tuple[Key, ...]:
    """The values that a step reads."""
    if isinstance(step, Compute):
        return tuple(zip(graph.instructions[step.instruction].inputs, step.row.pre, strict=True))
    if isinstance(step, Communicate):
        return ((step.tensor, step.source),)
    return tuple((m.tensor, m.source) for m in step.members)


def writes(graph: Graph, step: Scheduled) -> tuple[Key, ...]:
    """The values that a step produces."""
    if isinstance(step, Compute):
        outputs = graph.instructions[step.instruction].outputs
        made = tuple(zip(outputs, step.row.post, strict=True))
        return made if -1 not in outputs else tuple(key for key in made if key[0] >= 0)
    if isinstance(step, Communicate):
        return ((step.tensor, step.target),)
    return tuple((m.tensor, m.target) for m in step.members)


class Values(NamedTuple):
    """What each step of a program reads and writes."""

    reads: list[tuple[Key, ...]]
    writes: list[tuple[Key, ...]]

    @classmethod
    def of(cls, graph: Graph, program: Program) -> Self:
        """Those of a program of ``graph``."""
        return cls([reads(graph, s) for s in program.steps], [writes(graph, s) for s in program.steps])


def schedule(
    theory: Theory, program: Program, bucket_bytes: float = 0, *, values: Values | None = None
) -> Schedule:
    """Divide and order the steps, with buckets of at most ``bucket_bytes`` bytes. ``values``: those of the program,
    if known.

    Raises PlanError if a step reads what is not there.
    """
    graph = theory.graph
    have: dict[Key, int] = {}
    provider: list[list[int]] = []
    values = Values.of(graph, program) if values is None else values
    for index, (before, after) in enumerate(zip(*values, strict=True)):
        provider.append([have[key] if key in have else _provider(graph, have, key) for key in before])
        for key in after:
            have.setdefault(key, index)

    def closure(results: Iterable[Result | None]) -> set[int]:
        stack = [_provider(graph, have, (r.tensor, r.form)) for r in results if r is not None]
        found: set[int] = set()
        while stack:
            index = stack.pop()
            if index not in found:
                found.add(index)
                stack += provider[index]
        return found

    ahead = closure((program.loss, *program.outputs, *program.buffers))
    there = graph.sources if graph.tangent is None else graph.sources - {graph.producers[graph.tangent]}
    ahead.update(i for i, s in enumerate(program.steps) if isinstance(s, Compute) and s.instruction in there)
    behind = closure(program.gradients) - ahead

    def ordered(members: set[int]) -> tuple[Scheduled, ...]:
        order = _Order(theory, program, sorted(members), provider).found
        return bucketed(graph, [program.steps[i] for i in order], bucket_bytes)

    return Schedule(ordered(ahead), ordered(behind))


class _Order:
    """The order of one local graph. Steps are indices into the program; ``provider[i]`` are the steps that
    step i reads, ``members`` those of this graph, ascending. ``found`` is the order."""

    def __init__(
        self, theory: Theory, program: Program, members: Sequence[int], provider: Sequence[Sequence[int]]
    ) -> None:
        self.theory, self.graph, self.program, self.provider = theory, theory.graph, program, provider
        self.members = set(members)
        self.given: set[int] = set()
        self.fetched: set[int] = set()
        self.put_off: set[int] = set()
        self.followers: dict[int, list[int]] = {}
        computed: list[int] = []
        sent: set[int] = set()
        late: set[int] = set()
        sources, second_reads = self.graph.sources, self.graph.second_reads
        for index in members:
            step = program.steps[index]
            if isinstance(step, Communicate):
                late.add(index)
                (source,) = provider[index]
                sent.add(source)
                if source in self.given or source not in self.members:
                    self.fetched.add(index)
                elif isinstance(program.steps[source], Compute):
                    self.followers.setdefault(source, []).append(index)
            elif step.instruction in sources:
                self.given.add(index)
            elif step.instruction in second_reads and all(
                p in self.given or p not in self.members for p in provider[index]
            ):
                # The second reading of a parameter is a view of what is there.
                self.given.add(index)
                computed.append(index)
            else:
                computed.append(index)
        for index in computed:
            if not (late.isdisjoint(provider[index]) or index in sent) and self._is_put_off(index):
                self.put_off.add(index)
                late.add(index)
        self.found = self._ordered([i for i in members if i in self.given], self._standing(members))

    def _standing(self, members: Sequence[int]) -> list[int]:
        """What is neither given, nor prefetched, nor put off, in order."""
        moved = self.given | self.fetched | self.put_off
        moved.update(i for group in self.followers.values() for i in group)
        found: list[int] = []
        for index in members:
            if index not in moved:
                found += [index, *self.followers.get(index, ())]
        return found

    def _ordered(self, given: list[int], standing: list[int]) -> list[int]:
        """All steps: before each of ``standing`` that needs a group of prefetched collectives the next group that
        is not on its way, and what was put off and is needed now."""
        needs: list[Sequence[int]] = []
        there: set[int] = set()
        moved = self.fetched | self.put_off
        for index in standing:
            if moved.isdisjoint(self.provider[index]):
                needs.append(())
                continue
            needs.append(self._needs(index, moved, there))
            there.update(needs[-1])
        rest = sorted(moved - there)
        groups = [[i for i in need if i in self.fetched] for need in (*needs, rest)]
        waiting = iter([group for group in groups if group])
        found = [*given, *chain.from_iterable(islice(waiting, self.program.ahead))]
        for need, group, index in zip(needs, groups, standing, strict=False):
            if group:
                found += next(waiting, ())
            found += [i for i in need if i in self.put_off]
            found.append(index)
        return found + [i for i in rest if i in self.put_off]

    def _needs(self, index: int, moved: set[int], there: set[int]) -> list[int]:
        """What of ``moved`` (the prefetched collectives and the put off steps) must come before a step, ascending,
        without what is ``there``."""
        found: set[int] = set()
        stack = [index]
        while stack:
            for p in self.provider[stack.pop()]:
                if p in moved and p not in there and p not in found:
                    found.add(p)
                    stack.append(p)
        return sorted(found)

    def _is_put_off(self, index: int) -> bool:
        """Whether a computation of which no collective reads a result is put off.

        It reads what collectives of this graph deliver, or put off steps produce, and at most sources beside
        that. It is an alias (the memory is held anyway), or it moves bytes only (no FLOPs, nothing random) and
        putting it off holds no more bytes than it saves: the values whose memory it reads have together no
        more bytes than its results, and they are all divided, or none is.
        """
        step = self.program.steps[index]
        if not isinstance(step, Compute):
            return False
        read = dict(zip(reads(self.graph, step), self.provider[index], strict=True))
        late = {key: p for key, p in read.items() if self._is_late(p)}
        rule = self.theory.rules.get(step.instruction)
        others = [p for key, p in read.items() if key not in late]
        if not late or rule is None or not all(_is_source(self.graph, self.program.steps[p]) for p in others):
            return False
        if rule.alias:
            return True
        held = {self._held(key, p) for key, p in late.items()}
        results = writes(self.graph, step)
        divided = {is_sharded(form) for _, form in (*held, *results)}
        cheap = not rule.flops and not rule.random
        return cheap and len(divided) == 1 and self._bytes(held) <= self._bytes(results)

    def _is_late(self, index: int) -> bool:
        communicated = index in self.members and isinstance(self.program.steps[index], Communicate)
        return communicated or index in self.put_off

    def _held(self, key: Key, provider: int) -> Key:
        """The value whose memory holds what is read as ``key``: what views show, slices and masks are cut from."""
        step = self.program.steps[provider]
        while isinstance(step, Compute) and provider in self.put_off:
            if not self.theory.rules[step.instruction].alias:
                break
            key, provider = reads(self.graph, step)[0], self.provider[provider][0]
            step = self.program.steps[provider]
        return next(k for k in writes(self.graph, step) if k[0] == key[0])

    def _bytes(self, keys: Iterable[Key]) -> int:
        return sum(self.graph.tensors[t].nbytes for t, _ in keys)


def _is_source(graph: Graph, step: Step) -> bool:
    return isinstance(step, Compute) and step.instruction in graph.sources


def _provider(graph: Graph, have: dict[Key, int], key: Key) -> int:
    """The step that a value comes from, itself or as a slice or mask of a replicated one."""
    tensor, form = key
    found = have.get(key)
    if found is None and (form == PARTIAL or is_sharded(form)):
        found = have.get((tensor, REPLICATE))
    if found is None:
        raise PlanError(
            f"the program reads {graph.tensors[tensor].name} | {placement_text(form)} before it is produced; "
            "compile the plan again"
        )
    return found
