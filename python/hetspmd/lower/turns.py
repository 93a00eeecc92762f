"""The local graphs of a rank for a step in micro-batches, one for each of its turns.

What runs once before the loop is written into the graph of the first turn, and what runs once after it into that of
the last one, in the order of the schedule: parameters are gathered while the first turn computes, and a gradient is
reduced as soon as the last turn has added to it, while that goes on.

The forward graph of a rank runs all of them, and so the backward, too: it leaves the gradients as what is saved.
The backward graph multiplies them by the gradient that comes in, in which they are linear. Where gradients are
computed in float16, in which small ones vanish, they are computed of the loss as it is expected to be scaled.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import fx

from hetspmd.lower.calls import expected_tangent, relative_tangent
from hetspmd.lower.emit import identifier, take_saved
from hetspmd.lower.local import ActiveEmitter
from hetspmd.lower.local_program import Groups, LocalInterface, LocalProgram
from hetspmd.lower.passes import rewrite
from hetspmd.lower.turn_writer import Own, Rows, TurnGraph, TurnsWriter
from hetspmd.placement import is_sharded
from hetspmd.program.level_layout import LevelKey
from hetspmd.program.turn_layout import TurnLayout
from hetspmd.program.turn_steps import TurnSteps
from hetspmd.trace.graph import Graph
from hetspmd.trace.values import torch_dtype

aten = torch.ops.aten


@dataclass(frozen=True)
class LocalTurns:
    """One rank's graphs of a step in micro-batches.

    Attributes:
        turns: For each turn of the device ``turn(runtime, sums, *values)``, which adds to the list ``sums``. It
            returns what is joined of ``steps.leaving``. The first one is given ``(*parameters, *buffers, *inputs,
            tangent)`` (there is no ``tangent`` without gradients), and returns the values of ``steps.read`` and
            ``steps.carried`` behind that; the others are given those of ``steps.read``, the last one those of
            ``steps.carried`` behind them. The last one returns ``(joined, (loss, outputs, buffers, gradients))``,
            and empties the list; outputs that are joined are left out there. The only turn is first and last.
            Turns that are alike are one graph.
        own: For each turn what it is given behind the values, which :meth:`own_values` makes.
        steps: The steps that the graphs were written from.
        layout: Where the parts lie.
    """

    turns: tuple[fx.GraphModule, ...]
    own: tuple[tuple[Own, ...], ...]
    steps: TurnSteps
    layout: TurnLayout

    def own_values(
        self, turn: int, values: Sequence[Any], call: Callable[[Any, tuple[Any, ...]], Any]
    ) -> list[Any]:
        """What a turn is given behind ``values``. ``call`` calls a function, or writes that it is called."""
        return [
            call(aten.slice.Tensor, (values[own.place], own.dim, own.start, own.stop))
            if isinstance(own, Rows)
            else own
            for own in self.own[turn]
        ]

    @property
    def summed(self) -> tuple[LevelKey, ...]:
        """What is summed over the micro-batches, in the order of the list ``sums``."""
        return tuple(key for key in self.steps.leaving if not is_sharded(key[1]))


@dataclass(frozen=True)
class TurnGraphs:
    """The graphs of all turns of a rank, as they were written or while passes rewrite them. ``interface`` tells
    what the rank is given and returns."""

    turns: tuple[TurnGraph, ...]
    steps: TurnSteps
    layout: TurnLayout
    interface: Callable[[], LocalInterface]

    @property
    def graphs(self) -> tuple[fx.Graph, ...]:
        """One for each turn, or for several that are alike."""
        return tuple(turn.forward for turn in self.turns if turn.of == turn.number)

    def local_turns(self) -> LocalTurns:
        """The graphs as code."""
        return as_code(self.turns, self.steps, self.layout)

    def program(self) -> LocalProgram:
        """The local program that runs all of a step."""
        interface, turns = self.interface(), self.local_turns()
        given = {field.name: getattr(interface, field.name) for field in fields(LocalInterface)}
        backward = (
            _scaled(len(self.steps.gradients), _in_float16(self.layout.graph))
            if self.steps.gradients
            else None
        )
        return LocalProgram(**given, forward=_forward(turns, interface), backward=backward)


class TurnEmitter:
    """Writes the graphs of an active rank for a step in micro-batches. ``of`` would write those of a step in one;
    ``turns`` are the micro-batches that the rank takes, in their order
    (:meth:`hetspmd.plan.step_plan.StepPlan.turns`)."""

    def __init__(self, steps: TurnSteps, layout: TurnLayout, of: ActiveEmitter, turns: Sequence[int]) -> None:
        self.steps, self.layout, self.of, self.turns = steps, layout, of, turns

    def emit(self) -> TurnGraphs:
        """The graphs. Raises PlanError if the program reads what it has not produced, or if the row of an
        instruction in time cannot be had at once with its row on the devices."""
        rank = self.of.layout.rank(self.of.at)
        writing = TurnsWriter(self.steps, self.layout, rank, self.of.device, self.of.groups())
        writing.awaited = self.of.awaited
        return TurnGraphs(writing.turns(self.turns), self.steps, self.layout, self.of.interface)


def lower_turns(
    steps: TurnSteps, layout: TurnLayout, rank: int, device: torch.device, turns: Sequence[int]
) -> LocalTurns:
    """The graphs of the active device ``rank`` alone, after all passes. ``turns``: the micro-batches that it takes.

    Raises what :meth:`TurnEmitter.emit` raises.
    """
    written = TurnsWriter(steps, layout, rank, device, Groups(f"all ranks of rank {rank}")).turns(turns)
    rewrite(turn.forward for turn in written if turn.of == turn.number)
    return as_code(written, steps, layout)


def as_code(turns: Sequence[TurnGraph], steps: TurnSteps, layout: TurnLayout) -> LocalTurns:
    """The graphs of the turns as code."""
    modules = {turn.of: turn.module() for turn in turns if turn.of == turn.number}
    return LocalTurns(
        tuple(modules[turn.of] for turn in turns), tuple(turn.own for turn in turns), steps, layout
    )


def no_sums(count: int) -> list[torch.Tensor | None]:
    """The sums before the first micro-batch."""
    return [None] * count


def _forward(turns: LocalTurns, interface: LocalInterface) -> fx.GraphModule:
    graph, meta = fx.Graph(), turns.layout.graph
    runtime = graph.placeholder("runtime")
    given = [
        graph.placeholder(f"{kind}_{identifier(meta.tensors[local.tensor].name)}")
        for kind, tensors in (
            ("parameter", interface.parameters),
            ("buffer", interface.buffers),
            ("batch", interface.inputs),
        )
        for local in tensors
    ]
    scaled = _in_float16(meta)
    if meta.tangent is not None:
        tangent = meta.tensors[meta.tangent]
        shape, dtype = list(tangent.shape), torch_dtype(tangent.dtype)
        if scaled:
            given.append(graph.call_function(expected_tangent, (runtime, shape, dtype, interface.device)))
        else:
            kwargs: dict[str, Any] = {"dtype": dtype, "device": interface.device}
            given.append(graph.call_function(aten.ones.default, (shape,), kwargs))
    sums = graph.call_function(no_sums, (len(turns.summed),))
    count, last = len(turns.steps.read), len(turns.turns) - 1
    values: list[fx.Node] = []
    constants: dict[str, torch.Tensor] = {}

    def argument(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        constants[f"constant{len(constants)}"] = value
        return graph.create_node("get_attr", list(constants)[-1])

    for number in range(last + 1):
        read = given if number == 0 else values if number == last else values[:count]
        own = [argument(value) for value in turns.own_values(number, read, graph.call_function)]
        left = graph.call_module(f"turn{number}", (runtime, sums, *read, *own))
        if number == 0 < last:
            joined = sum(is_sharded(key[1]) for key in turns.steps.leaving)
            several = count + len(turns.steps.carried)
            values = [graph.call_function(operator.getitem, (left, joined + i)) for i in range(several)]
    results = graph.call_function(operator.getitem, (left, 1))
    graph.output(graph.call_function(also_saved, (results, given[-1])) if scaled else results)
    # A GraphModule that is made of others writes their code again, which takes as long as it took first.
    names = [f"turn{number}" for number in range(last + 1)]
    modules = dict.fromkeys(names, torch.nn.Identity())
    forward = fx.GraphModule({**constants, **modules}, graph, "Forward")
    for name, turn in zip(names, turns.turns, strict=True):
        setattr(forward, name, turn)
    return forward


def _in_float16(graph: Graph) -> bool:
    """Whether a gradient is computed in float16, in which one that is not scaled may vanish."""
    makers = (i for i in graph.instructions if i.phase == "backward")
    return graph.tangent is not None and any(
        graph.tensors[t].dtype == "float16" for i in makers for t in i.outputs if t >= 0
    )


def also_saved(
    results: tuple[Any, Any, Any, list[Any]], value: torch.Tensor
) -> tuple[Any, Any, Any, list[Any]]:
    """What the last turn returns, with a value behind what is saved."""
    loss, outputs, buffers, saved = results
    return loss, outputs, buffers, [*saved, value]


def _scaled(count: int, expected: bool) -> fx.GraphModule:
    """The gradients that were saved, times the gradient that comes in; ``expected``: by the gradient for which they
    were computed, which is saved behind them."""
    graph = fx.Graph()
    runtime, tangent, saved = (graph.placeholder(name) for name in ("runtime", "tangent", "saved"))
    if expected:
        by = graph.call_function(take_saved, (saved, count))
        tangent = graph.call_function(relative_tangent, (runtime, tangent, by))
    gradients = [graph.call_function(take_saved, (saved, index)) for index in range(count)]
    graph.output([graph.call_function(aten.mul.Tensor, (gradient, tangent)) for gradient in gradients])
    return fx.GraphModule({}, graph, "Backward")
