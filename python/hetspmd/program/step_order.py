"""The order of one local graph: what is prefetched, what is put off, what keeps its place.

- A collective of a value that this graph computes starts right after the step that produces it. One that
  reads another collective's result keeps its place: started at once, it would have every device wait at once.
- A collective of a value that is there from the beginning (a parameter or its second reading, the batch, a value
  of the other graph) is *prefetched*. Such collectives form groups, in the order in which they are needed; those
  that one step needs are a group. The prefetch distance says how many groups are on their way ahead: so many start
  with the graph, each other one right before the one that is as many before it is waited for. With one, a group is
  on its way while the one before it is used, and no more memory is held ahead than that; more hide what takes
  longer than the work between two groups (:mod:`hetspmd.optimize.prefetch`).
- Cheap work on what collectives deliver is *put off* until its result is needed, or the graph ends: done at
  once, it would have every device wait there. Put off are the computations of :meth:`Order._is_put_off`.

Nothing else moves: other computations keep the program's order.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain, islice

from hetspmd.placement import is_sharded
from hetspmd.program.dataflow import Key, Values
from hetspmd.program.program import Communicate, Compute, Program, Step
from hetspmd.rules.theory import Theory
from hetspmd.trace.graph import Graph


class Order:
    """The order of one local graph.

    Steps are places in the program; ``values`` has what each step reads and writes, ``provider[i]`` the steps that
    step i reads, ``members`` those of this graph, ascending. ``prefetch_distance``: how many groups of prefetched
    collectives are on their way ahead. ``places`` is the order.
    """

    def __init__(
        self,
        theory: Theory,
        program: Program,
        values: Values,
        members: Sequence[int],
        provider: Sequence[Sequence[int]],
        prefetch_distance: int,
    ) -> None:
        self.theory, self.graph, self.program, self.provider = theory, theory.graph, program, provider
        self.values = values
        self.prefetch_distance = prefetch_distance
        self.members = set(members)
        self.source_steps: set[int] = set()
        self.fetched: set[int] = set()
        self.put_off: set[int] = set()
        self.followers: dict[int, list[int]] = {}
        self._divide(members)
        self.places = self._ordered([i for i in members if i in self.source_steps], self._standing(members))

    def _divide(self, members: Sequence[int]) -> None:
        """Say which steps are given, prefetched, put off, or follow others."""
        steps, provider, here, given = self.program.steps, self.provider, self.members, self.source_steps
        sources, second_reads = self.graph.sources, self.graph.second_reads
        computed: list[int] = []
        sent: set[int] = set()
        late: set[int] = set()
        for index in members:
            step = steps[index]
            if isinstance(step, Communicate):
                late.add(index)
                (source,) = provider[index]
                sent.add(source)
                if source in given or source not in here:
                    self.fetched.add(index)
                elif isinstance(steps[source], Compute):
                    self.followers.setdefault(source, []).append(index)
            elif step.instruction in sources:
                given.add(index)
            else:
                computed.append(index)
                # The second reading of a parameter is a view of what is there.
                if step.instruction in second_reads and all(
                    p in given or p not in here for p in provider[index]
                ):
                    given.add(index)
        for index in computed:
            if not (late.isdisjoint(provider[index]) or index in sent) and self._is_put_off(index):
                self.put_off.add(index)
                late.add(index)

    def _standing(self, members: Sequence[int]) -> list[int]:
        """What is neither given, nor prefetched, nor put off, in order."""
        moved = self.source_steps | self.fetched | self.put_off
        followers = self.followers
        moved.update(i for group in followers.values() for i in group)
        standing: list[int] = []
        for index in members:
            if index not in moved:
                standing.append(index)
                if index in followers:
                    standing += followers[index]
        return standing

    def _ordered(self, sources: list[int], standing: list[int]) -> list[int]:
        """All steps: before each of ``standing`` that needs a group of prefetched collectives the next group that
        is not on its way, and what was put off and is needed now."""
        needs: list[tuple[int, list[int]]] = []
        there: set[int] = set()
        moved, provider = self.fetched | self.put_off, self.provider
        for at, index in enumerate(standing):
            if not moved.isdisjoint(provider[index]):
                needs.append((at, self._needs(index, moved, there)))
                there.update(needs[-1][1])
        rest = sorted(moved - there)
        groups = [[i for i in need if i in self.fetched] for _, need in (*needs, (len(standing), rest))]
        waiting = iter([group for group in groups if group])
        places = [*sources, *chain.from_iterable(islice(waiting, self.prefetch_distance))]
        done = 0
        for (at, need), group in zip(needs, groups, strict=False):
            places += standing[done:at]
            done = at
            if group:
                places += next(waiting, ())
            places += [i for i in need if i in self.put_off]
        return [*places, *standing[done:], *(i for i in rest if i in self.put_off)]

    def _needs(self, index: int, moved: set[int], there: set[int]) -> list[int]:
        """What of ``moved`` (the prefetched collectives and the put off steps) must come before a step, ascending,
        without what is ``there``."""
        needs: set[int] = set()
        stack = [index]
        while stack:
            for p in self.provider[stack.pop()]:
                if p in moved and p not in there and p not in needs:
                    needs.add(p)
                    stack.append(p)
        return sorted(needs)

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
        read = dict(zip(self.values.reads[index], self.provider[index], strict=True))
        late = {key: p for key, p in read.items() if self._is_late(p)}
        rule = self.theory.rules.get(step.instruction)
        others = [p for key, p in read.items() if key not in late]
        if not late or rule is None or not all(_is_source(self.graph, self.program.steps[p]) for p in others):
            return False
        if rule.alias:
            return True
        held = {self._held(key, p) for key, p in late.items()}
        results = self.values.writes[index]
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
            key, provider = self.values.reads[provider][0], self.provider[provider][0]
            step = self.program.steps[provider]
        return next(k for k in self.values.writes[provider] if k[0] == key[0])

    def _bytes(self, keys: Iterable[Key]) -> int:
        return sum(self.graph.tensors[t].nbytes for t, _ in keys)


def _is_source(graph: Graph, step: Step) -> bool:
    return isinstance(step, Compute) and step.instruction in graph.sources
