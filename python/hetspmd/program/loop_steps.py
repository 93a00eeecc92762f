"""Which steps of a program run once for each micro-batch, and which collectives may.

A collective of something that does not change in the loop has two places: outside of the loop, once, or in it, once
for each micro-batch. This is what tells the levels of ZeRO (Rajbhandari et al. 2020) from each other:

- a parameter in shards that is gathered before the loop is held whole through all of it (ZeRO-1, ZeRO-2); one that
  is gathered in the loop is held from there to its last reader (ZeRO-3);
- a gradient that is summed whole over the loop is reduced to shards after it (ZeRO-1); one that is reduced in the
  loop is summed in shards (ZeRO-2, ZeRO-3).

:attr:`MicroBatches.repeated` says of which tensors the collectives run in the loop. What is computed of such a
tensor alone (a view, a cast) then runs in the loop, too.
"""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Collection, Container, Mapping
from dataclasses import dataclass

from hetspmd.placement import PARTIAL, REPLICATE, Placement
from hetspmd.program.dataflow import compute_keys
from hetspmd.program.micro_batches import MicroBatches
from hetspmd.program.program import Communicate, Compute, Program, Step
from hetspmd.program.schedule import Places, Schedule
from hetspmd.program.time_split import Phase, results_of
from hetspmd.rules.theory import Theory
from hetspmd.trace.graph import Graph, Instruction

Value = tuple[int, Placement]
"""A tensor in its placement on the devices."""


@dataclass(frozen=True)
class LoopSteps:
    """What runs in the loop.

    Attributes:
        places: The places in the program of the steps that run once for each micro-batch.
        values: What these steps make.
    """

    places: frozenset[int]
    values: frozenset[Value]


_LAST: deque[tuple[Graph, MicroBatches, Program, LoopSteps]] = deque(maxlen=4)
"""What was asked last: the costs, the simulation and the count of memory of one candidate ask the same."""


def loop_steps(graph: Graph, batches: MicroBatches, program: Program) -> LoopSteps:
    """The steps of a program that run once for each micro-batch."""
    asked = (graph, batches, program)
    for *before, steps in tuple(_LAST):
        if all(map(operator.is_, before, asked)):
            return steps
    steps = _loop_steps(*asked)
    _LAST.append((*asked, steps))
    return steps


def _loop_steps(graph: Graph, batches: MicroBatches, program: Program) -> LoopSteps:
    phases, keys = batches.loop.phases, compute_keys(graph)
    read = _read_in_loop(graph, batches, program)
    once: set[Value] = {(c.tensor, REPLICATE) for c in graph.constants}
    repeated: set[Value] = set()
    places: list[int] = []

    def only_in_loop(key: Value) -> bool:
        return not _has(once, key) and _has(repeated, key)

    made_in_loop: list[tuple[Value, ...]] = []
    for place, step in enumerate(program.steps):
        if isinstance(step, Compute):
            phase = phases[step.instruction]
            if phase != "before":  # nothing that is made before the loop reads it
                if phase == "in":
                    places.append(place)
                    made_in_loop.append(keys(step).writes)
                continue
            _, needed, made = keys(step)
            inside = any(map(only_in_loop, needed))
        else:
            inside = _runs_in_loop(graph, batches, step, read) or (
                batches.is_made_before(graph, step.tensor) and only_in_loop((step.tensor, step.source))
            )
            made = ((step.tensor, step.target),)
        if inside:
            places.append(place)
            repeated.update(made)
        else:
            once.update(made)
    return LoopSteps(frozenset(places), frozenset(repeated.union(*made_in_loop)))


def _read_in_loop(graph: Graph, batches: MicroBatches, program: Program) -> dict[int, set[Placement]]:
    """In which placements the loop reads the sums that leave it and that collectives turn, by tensor."""
    moved = {step.tensor for step in program.steps if isinstance(step, Communicate)} & batches.summed
    readers = {reader for tensor in moved for reader in graph.consumers.get(tensor, ())}
    phases, keys = batches.loop.phases, compute_keys(graph)
    read: dict[int, set[Placement]] = {}
    for step in program.steps:
        if isinstance(step, Compute) and step.instruction in readers and phases[step.instruction] == "in":
            for tensor, form in keys(step).reads:
                read.setdefault(tensor, set()).add(form)
    return read


def step_phases(graph: Graph, batches: MicroBatches, program: Program) -> tuple[Phase, ...]:
    """When each step of a program runs: before the loop, in it, or after it."""
    inside, phases = loop_steps(graph, batches, program).places, batches.loop.phases

    def phase(step: Step) -> Phase:
        if isinstance(step, Compute):
            return phases[step.instruction]
        if batches.placements[step.tensor] != REPLICATE:
            return "after"
        return phases[graph.producers[step.tensor]]

    return tuple(["in" if place in inside else phase(step) for place, step in enumerate(program.steps)])


def loop_order(graph: Graph, program: Program, schedule: Schedule, batches: MicroBatches) -> list[Places]:
    """The order in which a step in micro-batches runs, by places in the program: that of its schedule.

    Where devices have turns of their own, all that is before the loop comes first, and of that the collectives that
    parameters wait for. A device with one turn would else begin what is after the loop before another one has ended
    what is before it, and ranks must run collectives in one order; and a device that computes more in its first
    turn than others would keep these waiting.
    """
    order = [*schedule.forward, *schedule.backward]
    if not batches.own_turns:
        return order
    phases = step_phases(graph, batches, program)
    before = [tuple(p for p in places if phases[p] == "before") for places in order]
    others = [tuple(p for p in places if phases[p] != "before") for places in order]
    given = [places for places in before if places and _is_given(graph, program, places)]

    def is_first(places: Places) -> bool:
        steps = [program.steps[place] for place in places]
        return all(isinstance(s, Communicate) and graph.producers[s.tensor] in graph.sources for s in steps)

    first = [places for places in before if places and is_first(places)]
    there = {*given, *first}
    behind = [places for places in before if places and places not in there]
    return [*given, *first, *behind, *(places for places in others if places)]


def _is_given(graph: Graph, program: Program, places: Places) -> bool:
    step = program.steps[places[0]]
    return isinstance(step, Compute) and graph.instructions[step.instruction].is_source


def _has(values: Container[Value], key: Value) -> bool:
    """Whether a value is there, or is a slice or a mask of one that is whole."""
    return key in values or (key[0], REPLICATE) in values


def _runs_in_loop(
    graph: Graph, batches: MicroBatches, step: Communicate, read: Mapping[int, Collection[Placement]]
) -> bool:
    """Whether a collective runs once for each micro-batch. ``read``: what the loop reads, by tensor."""
    time = batches.placements[step.tensor]
    if time == REPLICATE:
        return batches.is_made_before(graph, step.tensor) and batches.repeats(step)
    if step.tensor not in batches.summed:
        return True
    return batches.repeats(step) or any(form != step.source for form in read.get(step.tensor, ()))


def waits_in_loop(graph: Graph, batches: MicroBatches, program: Program) -> bool:
    """Whether a collective is in the loop, at which the devices wait for each other."""
    places = loop_steps(graph, batches, program).places
    return any(isinstance(step, Communicate) for p, step in enumerate(program.steps) if p in places)


def repeatable(theory: Theory, batches: MicroBatches) -> frozenset[int]:
    """The tensors of which collectives can run in the loop though they need not.

    Of what is there before the loop these are the tensors that depend on parameters alone and that nothing reads
    but the loop, directly or through ops that draw no random numbers. Of sums over the loop they are the gradients.
    """
    graph = theory.graph
    results, phases = results_of(graph), batches.loop.phases
    sampled = {i.tensor for i in graph.inputs}
    for instruction in graph.instructions:
        if not sampled.isdisjoint(instruction.inputs):
            sampled.update(t for t in instruction.outputs if t >= 0)
    able: set[int] = set()

    def feeds_loop(reader: Instruction) -> bool:
        if phases[reader.id] == "in":
            return True
        rule = theory.rules.get(reader.id)
        draws = rule is not None and rule.random
        return phases[reader.id] == "before" and not draws and able.issuperset(reader.outputs)

    for instruction in reversed(graph.instructions):
        for tensor in instruction.outputs:
            if tensor < 0 or tensor in results or tensor in sampled:
                continue
            readers = [graph.instructions[i] for i in graph.consumers.get(tensor, ())]
            if phases[instruction.id] == "before" and readers and all(map(feeds_loop, readers)):
                able.add(tensor)
    gradients = {p.gradient for p in graph.parameters if p.gradient is not None} & batches.summed
    return frozenset(able | gradients)


def times_run(batches: MicroBatches | None, step: Communicate) -> int:
    """How often the bytes of a collective travel in a step: of what has a placement of its own in each micro-batch
    once, in parts; of what is whole or a summand in each, in each."""
    if batches is None:
        return 1
    time = batches.placements.get(step.tensor, REPLICATE)
    if batches.repeats(step) or (time == PARTIAL and step.tensor not in batches.summed):
        return batches.count
    return 1
