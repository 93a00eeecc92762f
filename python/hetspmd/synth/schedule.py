"""Which steps run forward and which backward, and in what order.

Everything here is decided from the program and the rules alone, never from a rank's lengths, so all ranks
issue the same collectives in the same order.

- Forward are the steps from which the loss, the outputs and the updated buffers are derived; backward are the
  other steps that some gradient needs; the rest is dead and dropped.
- A collective of a value that this graph computes starts right after the step that produces it. One that
  reads another collective's result keeps its place: started at once, it would have every device wait at once.
- A collective of a value that is there from the beginning (a parameter or its second reading, the batch, a value
  of the other graph) is *prefetched*. Such collectives form groups, in the order in which they are needed; those
  that one step needs are a group. The first group starts with the graph, each other one right before the group
  before it is waited for. So one group is on its way while the one before it is used, and no more memory is held
  ahead than that.
- Cheap work on what collectives deliver is *put off* until its result is needed, or the graph ends: done at
  once, it would have every device wait there. Put off are the computations of :func:`_is_put_off`.

Nothing else moves: other computations keep the program's order.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hetspmd.errors import PlanError
from hetspmd.forms import ALL_REDUCE, IDENTITY, Form, form_text, is_sharded
from hetspmd.rules.theory import Theory
from hetspmd.synth.program import Communicate, Compute, Program, Result, Step
from hetspmd.trace.graph import Graph

Key = tuple[int, Form]
"""(tensor id, form): a value of the local program."""


@dataclass(frozen=True)
class Schedule:
    """The steps of the two local graphs, in the order in which they are emitted."""

    forward: tuple[Step, ...]
    backward: tuple[Step, ...]


def reads(graph: Graph, step: Step) -> tuple[Key, ...]:
    """The values that a step reads."""
    if isinstance(step, Communicate):
        return ((step.tensor, step.source),)
    return tuple(zip(graph.instructions[step.instruction].inputs, step.row.pre, strict=True))


def writes(graph: Graph, step: Step) -> tuple[Key, ...]:
    """The values that a step produces."""
    if isinstance(step, Communicate):
        return ((step.tensor, step.target),)
    outputs = graph.instructions[step.instruction].outputs
    return tuple((t, f) for t, f in zip(outputs, step.row.post, strict=True) if t >= 0)


def schedule(theory: Theory, program: Program) -> Schedule:
    """Divide and order the steps. Raises PlanError if a step reads what is not there."""
    graph = theory.graph
    have: dict[Key, int] = {}
    provider: list[list[int]] = []
    for index, step in enumerate(program.steps):
        provider.append([_provider(graph, have, key) for key in reads(graph, step)])
        for key in writes(graph, step):
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
    ahead |= {i for i, s in enumerate(program.steps) if _is_source(graph, s) and not _is_tangent(graph, s)}
    behind = closure(program.gradients) - ahead
    return Schedule(
        tuple(program.steps[i] for i in _Order(theory, program, sorted(ahead), provider).found),
        tuple(program.steps[i] for i in _Order(theory, program, sorted(behind), provider).found),
    )


class _Order:
    """The order of one local graph. Steps are indices into the program; ``provider[i]`` are the steps that
    step i reads, ``members`` those of this graph, ascending. ``found`` is the order."""

    def __init__(
        self, theory: Theory, program: Program, members: Sequence[int], provider: Sequence[Sequence[int]]
    ) -> None:
        self.theory, self.graph, self.program, self.provider = theory, theory.graph, program, provider
        self.members = set(members)
        self.given = {i for i in members if _is_source(self.graph, program.steps[i])}
        # The second reading of a parameter is a view of what is there.
        self.given |= {
            i for i in members
            if _is_second_read(self.graph, program.steps[i])
            and all(p in self.given or p not in self.members for p in provider[i])
        }  # fmt: skip
        self.fetched: set[int] = set()
        self.followers: dict[int, list[int]] = {}
        for index in members:
            if isinstance(program.steps[index], Communicate):
                (source,) = provider[index]
                if source in self.given or source not in self.members:
                    self.fetched.add(index)
                elif isinstance(program.steps[source], Compute):
                    self.followers.setdefault(source, []).append(index)
        self.put_off: set[int] = set()
        sent = {p for i in members if isinstance(program.steps[i], Communicate) for p in provider[i]}
        for index in members:
            if index not in sent and self._is_put_off(index):
                self.put_off.add(index)
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
        """All steps: before each of ``standing``, the next group of prefetched collectives if it needs one,
        and what was put off and is needed now."""
        needs: list[list[int]] = []
        there: set[int] = set()
        for index in standing:
            needs.append(self._needs(index, there))
            there.update(needs[-1])
        rest = sorted((self.fetched | self.put_off) - there)
        groups = [[i for i in need if i in self.fetched] for need in (*needs, rest)]
        waiting = iter([group for group in groups if group])
        found = [*given, *next(waiting, ())]
        for need, group, index in zip(needs, groups, standing, strict=False):
            if group:
                found += next(waiting, ())
            found += [i for i in need if i in self.put_off]
            found.append(index)
        return found + [i for i in rest if i in self.put_off]

    def _needs(self, index: int, there: set[int]) -> list[int]:
        """The prefetched collectives and the put off steps that must come before a step, ascending, without
        those that are ``there``."""
        found: set[int] = set()
        stack = [index]
        while stack:
            for p in self.provider[stack.pop()]:
                if p not in there and p not in found and (p in self.fetched or p in self.put_off):
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
    return isinstance(step, Compute) and graph.instructions[step.instruction].is_source


def _is_second_read(graph: Graph, step: Step) -> bool:
    return isinstance(step, Compute) and step.instruction in graph.second_reads


def _is_tangent(graph: Graph, step: Step) -> bool:
    return isinstance(step, Compute) and graph.tangent in graph.instructions[step.instruction].outputs


def _provider(graph: Graph, have: dict[Key, int], key: Key) -> int:
    """The step that a value comes from, itself or as a slice or mask of Identity."""
    tensor, form = key
    found = have.get(key)
    if found is None and (form == ALL_REDUCE or is_sharded(form)):
        found = have.get((tensor, IDENTITY))
    if found is None:
        raise PlanError(
            f"the program reads {graph.tensors[tensor].name} | {form_text(form)} before it is produced; "
            "compile the plan again"
        )
    return found
