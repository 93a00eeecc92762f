"""Which steps run forward and which backward, and where collectives start.

Everything here is decided from the program alone, never from a rank's lengths, so all ranks issue the same
collectives in the same order.

- Forward are the steps from which the loss, the outputs and the updated buffers are derived; backward are the
  other steps that some gradient needs; the rest is dead and dropped.
- A collective starts right after the step that produces its source. One whose source is a parameter, a batch
  or a value of the other graph keeps its place: started at once it would only hold memory.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from hetspmd.errors import PlanError
from hetspmd.forms import ALL_REDUCE, IDENTITY, Form, form_text, is_sharded
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


def schedule(graph: Graph, program: Program) -> Schedule:
    """Divide and order the steps. Raises PlanError if a step reads what is not there."""
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
        tuple(program.steps[i] for i in _early_starts(graph, program, sorted(ahead), provider)),
        tuple(program.steps[i] for i in _early_starts(graph, program, sorted(behind), provider)),
    )


def _early_starts(graph: Graph, program: Program, order: list[int], provider: list[list[int]]) -> list[int]:
    members = set(order)
    followers: dict[int, list[int]] = {}
    for index in order:
        if isinstance(program.steps[index], Communicate):
            (source,) = provider[index]
            if source in members and not _is_source(graph, program.steps[source]):
                followers.setdefault(source, []).append(index)
    moved = {i for group in followers.values() for i in group}
    out: list[int] = []

    def put(index: int) -> None:
        out.append(index)
        for follower in followers.get(index, ()):
            put(follower)

    for index in order:
        if index not in moved:
            put(index)
    return out


def _is_source(graph: Graph, step: Step) -> bool:
    return isinstance(step, Compute) and graph.instructions[step.instruction].is_source


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
