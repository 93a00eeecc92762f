"""A step run in micro-batches on one device: what runs before the loop, in it and after it, by the triples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from hetspmd.dist.random import Draw, Randomness, random_op
from hetspmd.placement import PARTIAL, REPLICATE, is_sharded, sharded_dim
from hetspmd.program.lengths import Lengths
from hetspmd.program.time_split import Loop
from hetspmd.rules.brute import execute
from hetspmd.rules.nested import Level, localize_drawn
from hetspmd.rules.rule import LocalCall, Triple, localize
from hetspmd.rules.theory import Theory
from hetspmd.trace.evaluate import as_list, constant_value, local_op
from hetspmd.trace.graph import BUFFER, CONSTANT, INPUT, PARAMETER, TANGENT, Graph, Instruction, Ref, map_refs
from hetspmd.trace.values import to_torch, torch_dtype
from hetspmd.verify.reference import ReferenceResult
from workbench import CPU, randomness

Values = dict[int, torch.Tensor]


def run_in_turns(
    theory: Theory, loop: Loop, turns: Lengths, model: nn.Module, inputs: Sequence[torch.Tensor]
) -> ReferenceResult:
    """One step; ``turns`` are the units of each axis in each micro-batch."""
    return _Run(theory, loop, turns, model, inputs).run()


class _Run:
    def __init__(
        self, theory: Theory, loop: Loop, turns: Lengths, model: nn.Module, inputs: Sequence[torch.Tensor]
    ) -> None:
        self.theory, self.graph, self.loop, self.turns = theory, theory.graph, loop, turns
        self.sources = _sources(self.graph, model, inputs)
        self.random: Randomness = randomness()
        self.whole: Values = {}
        for constant in self.graph.constants:
            self.whole[constant.tensor] = constant_value(self.graph, constant, CPU)

    def run(self) -> ReferenceResult:
        with torch.no_grad():
            self._outside("before")
            parts = [self._turn(turn) for turn in range(self.turns.world)]
            for result in self.loop.leaving:
                of_turns = [part[result.tensor] for part in parts]
                if is_sharded(result.form):
                    self.whole[result.tensor] = torch.cat(of_turns, sharded_dim(result.form))
                else:
                    self.whole[result.tensor] = torch.stack(of_turns).sum(0).to(of_turns[0].dtype)
            self._outside("after")
        return _results(self.graph, self.whole)

    def _outside(self, phase: str) -> None:
        for instruction in self.graph.instructions:
            if self.loop.phases[instruction.id] != phase:
                continue
            if instruction.is_source:
                if instruction.op != CONSTANT:
                    self.whole[instruction.outputs[0]] = self.sources[instruction.outputs[0]]
                continue
            row, read = self.loop.rows[instruction.id], [self.whole[t] for t in instruction.inputs]
            self._keep(self.whole, instruction, self._call(instruction, row, (0, 0), 0, read))

    def _turn(self, turn: int) -> Values:
        values: Values = {}
        for instruction in self.graph.instructions:
            if self.loop.phases[instruction.id] == "in":
                row = self.loop.rows[instruction.id]
                read = [
                    self._read(values, t, p, turn) for t, p in zip(instruction.inputs, row.pre, strict=True)
                ]
                units = self._units(instruction, row, turn)
                self._keep(values, instruction, self._call(instruction, row, units, turn, read))
        return values

    def _units(self, instruction: Instruction, row: Triple, turn: int) -> tuple[int, int]:
        pairs = zip(self.theory.rows[instruction.id], self.theory.row_axes[instruction.id], strict=True)
        axis = next(a for r, a in pairs if r == row)
        if axis is None or row.factor is None:
            return 0, 0
        unit = self.theory.rules[instruction.id].factors[row.factor].size // self.theory.axes.axes[axis].units
        start, stop = self.turns.range(axis, turn)
        return start * unit, stop * unit

    def _read(self, values: Values, tensor: int, placement: int, turn: int) -> torch.Tensor:
        if tensor in values:
            return values[tensor]
        whole = self.whole[tensor]
        if placement == REPLICATE:
            return whole
        if placement == PARTIAL:
            return whole if turn == 0 else torch.zeros_like(whole)
        return whole.narrow(*self._region(tensor, placement, turn))

    def _region(self, tensor: int, placement: int, turn: int) -> tuple[int, int, int]:
        dim = sharded_dim(placement)
        axis = self.theory.axes.axis(tensor, dim)
        assert axis is not None
        unit = self.graph.tensors[tensor].shape[dim] // axis.units
        start, stop = self.turns.range(axis.id, turn)
        return dim, start * unit, (stop - start) * unit

    def _call(
        self,
        instruction: Instruction,
        row: Triple,
        units: tuple[int, int],
        turn: int,
        read: list[torch.Tensor],
    ) -> list[Any]:
        call, rule = self.theory.calls[instruction.id], self.theory.rules[instruction.id]
        world = self.turns.world
        if rule.random:
            first = instruction.outputs[0]
            region = self._region(first, row.post[0], turn) if is_sharded(row.post[0]) else None
            drawn = localize_drawn(call, rule, (Level(row, units),), turn, world)
            draw = Draw(instruction.id, self.graph.tensors[first].shape, region)
            return as_list(self._random(draw, drawn, read), len(instruction.outputs))
        return list(execute(localize(call, rule, row, turn, world, *units), read, CPU, 0))

    def _random(self, draw: Draw, local: LocalCall, read: Sequence[torch.Tensor]) -> Any:
        def value(argument: Any) -> Any:
            argument = map_refs(argument, lambda ref: read[ref.id] if isinstance(ref, Ref) else ref)
            return argument if isinstance(argument, torch.Tensor) else to_torch(argument, CPU)

        op, args, kwargs = local
        assert isinstance(op, str)
        return random_op(
            self.random,
            draw,
            local_op(op),
            [value(a) for a in args],
            {k: value(v) for k, v in kwargs.items()},
        )

    def _keep(self, values: Values, instruction: Instruction, outputs: Sequence[Any]) -> None:
        for tensor, value in zip(instruction.outputs, outputs, strict=True):
            if tensor >= 0:
                values[tensor] = value


def _sources(graph: Graph, model: nn.Module, inputs: Sequence[torch.Tensor]) -> Values:
    parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    of_kind: Mapping[str, Values] = {
        PARAMETER: {p.tensor: parameters[p.name].detach() for p in graph.parameters},
        BUFFER: {b.tensor: buffers[b.name] for b in graph.buffers},
        INPUT: {i.tensor: value for i, value in zip(graph.inputs, inputs, strict=True)},
    }
    values: Values = {}
    for instruction in graph.instructions:
        first = instruction.outputs[0]
        if instruction.op == TANGENT:
            meta = graph.tensors[first]
            values[first] = torch.ones(meta.shape, dtype=torch_dtype(meta.dtype))
        elif instruction.op in of_kind:
            values[first] = of_kind[instruction.op][first]
    return values


def _results(graph: Graph, values: Values) -> ReferenceResult:
    return ReferenceResult(
        loss=None if graph.loss is None else values[graph.loss],
        outputs={o.tensor: values[o.tensor] for o in graph.outputs if o.tensor is not None},
        gradients={p.name: values[p.gradient] for p in graph.parameters if p.gradient is not None},
        buffers={b.name: values[b.updated] for b in graph.buffers if b.updated is not None},
        parameters={p.name: values[p.updated] for p in graph.parameters if p.updated is not None},
    )
