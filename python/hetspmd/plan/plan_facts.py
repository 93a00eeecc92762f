"""Facts of a plan that several reports show: its collectives, and where its parameters live."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from hetspmd.cluster.collective_kinds import KINDS, Kind
from hetspmd.placement import Placement
from hetspmd.plan.plan import Plan
from hetspmd.plan.update import ParameterUpdate
from hetspmd.program.micro_batches import largest_axis
from hetspmd.program.program import Communicate
from hetspmd.trace.graph import BUFFER, INPUT, PARAMETER, REBALANCE, Graph


@dataclass(frozen=True, slots=True)
class Collective:
    """A communication of the program: ``nbytes`` of the whole tensor, predicted ``seconds``, and ``role``:
    what the tensor is in the model's own terms."""

    position: int
    step: Communicate
    nbytes: int
    seconds: float
    role: str


@dataclass(frozen=True, slots=True)
class Storage:
    """Parameters whose names differ only in numbers and that are stored alike.

    ``pattern`` has ``*`` for the numbers; ``shapes`` are their different shapes; ``extents`` the elements per
    active device along the sharded dim, empty where the parameters are replicated; ``nbytes`` is the size of all of
    them, whole.
    """

    pattern: str
    count: int
    shapes: tuple[tuple[int, ...], ...]
    form: Placement
    extents: tuple[int, ...]
    nbytes: int


def rows_of_turns(plan: Plan) -> dict[int, tuple[int, ...]]:
    """Of each active device, by rank, how many samples it takes in each of its turns; nothing without a loop."""
    batches = plan.batches
    axis = None if batches is None else largest_axis(plan.theory, batches.loop.axes)
    if batches is None or axis is None:
        return {}
    by_device = zip(*batches.table(axis, plan.lengths.units[axis]), strict=True)
    return {
        rank: tuple(rows[: len(plan.step_plan.turns(rank))])
        for rank, rows in zip(plan.active, by_device, strict=True)
    }


def collectives(plan: Plan) -> tuple[Collective, ...]:
    """The communications in program order, priced at the plan's lengths."""
    roles = tensor_roles(plan.graph)
    collectives = []
    for position, step in enumerate(plan.program.steps):
        if isinstance(step, Communicate):
            seconds = plan.costs.move_seconds(step.tensor, step.source, step.target, step.kind, plan.lengths)
            nbytes = plan.graph.tensors[step.tensor].nbytes
            collectives.append(Collective(position, step, nbytes, seconds, roles[step.tensor]))
    return tuple(collectives)


def tensor_roles(graph: Graph) -> tuple[str, ...]:
    """For each tensor ``parameter NAME``, ``gradient of NAME``, ``loss``, or the module it is of."""
    roles = ["" for _ in graph.tensors]
    kinds = {PARAMETER: "parameter", BUFFER: "buffer", INPUT: "input"}
    for instruction in graph.instructions:
        module = instruction.source or "the model"
        for tensor in instruction.outputs:
            if tensor >= 0:
                backward = "backward of " if instruction.phase == "backward" else ""
                kind = kinds.get(instruction.op, "constant")
                source = f"{kind} {graph.tensors[tensor].name}"
                roles[tensor] = source if instruction.is_source else backward + module
    for parameter in graph.parameters:
        if parameter.gradient is not None:
            roles[parameter.gradient] = f"gradient of {parameter.name}"
    for holder in graph.holders:
        if holder.updated is not None:
            roles[holder.updated] = f"new {holder.name}"
    if graph.loss is not None:
        roles[graph.loss] = "loss"
    return tuple(roles)


def sent(plan: Plan) -> tuple[Collective, ...]:
    """The collectives but for copies at cuts whose lengths agree: those are none."""
    return tuple(c for c in collectives(plan) if c.seconds > 0 or not KINDS[c.step.kind].keeps_dim)


def transfers(plan: Plan) -> int:
    """How many times something is sent for :func:`sent`: the collectives of a bucket run as one."""
    if plan.inside is not None:
        return len(sent(plan))  # in three steps each
    together = (*plan.schedule.forward, *plan.schedule.backward)
    return len(sent(plan)) - sum(len(places) - 1 for places in together)


def segment_modules(graph: Graph) -> tuple[tuple[str, str], ...]:
    """The first and the last module that each segment runs in forward."""
    modules: list[list[str]] = [[] for _ in range(graph.segment_count)]
    for i, instruction in enumerate(graph.instructions):
        if instruction.phase == "forward" and instruction.source and instruction.op != REBALANCE:
            modules[graph.segments[i] if graph.segments else 0].append(instruction.source)
    return tuple((names[0], names[-1]) if names else ("", "") for names in modules)


def storage(plan: Plan) -> tuple[Storage, ...]:
    """Where parameters live, grouped, in the order of the model."""
    groups: dict[tuple[str, Placement, tuple[int, ...]], list[ParameterUpdate]] = {}
    for parameter in plan.update.parameters:
        pattern = re.sub(r"(?<=\.)\d+(?=\.)", "*", parameter.name)
        groups.setdefault((pattern, parameter.stored, parameter.extents), []).append(parameter)
    storages = []
    for (pattern, form, extents), members in groups.items():
        tensors = [plan.graph.tensors[p.tensor] for p in members]
        name = pattern if len(members) > 1 else members[0].name
        shapes = tuple(dict.fromkeys(t.shape for t in tensors))
        storages.append(Storage(name, len(members), shapes, form, extents, sum(t.nbytes for t in tensors)))
    return tuple(storages)


def by_kind(collectives: tuple[Collective, ...]) -> Iterator[tuple[Kind, int, int, float]]:
    """``(kind, count, bytes, seconds)`` per kind of collective, the dearest first."""
    totals: dict[Kind, tuple[int, int, float]] = {}
    for collective in collectives:
        count, nbytes, seconds = totals.get(collective.step.kind, (0, 0, 0.0))
        totals[collective.step.kind] = (count + 1, nbytes + collective.nbytes, seconds + collective.seconds)
    for kind, (count, nbytes, seconds) in sorted(totals.items(), key=lambda item: (-item[1][2], item[0])):
        yield kind, count, nbytes, seconds
