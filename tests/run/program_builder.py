"""Programs made without the search: random ones, and the well-known hand-made ones."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

from hetspmd.cluster.collective_kinds import Kind
from hetspmd.placement import PARTIAL, REPLICATE, Placement, after_cut, is_before_cut, is_sharded, shard
from hetspmd.program.lengths import Lengths
from hetspmd.program.micro_batches import micro_batches
from hetspmd.program.program import Communicate, Compute, Program, Result, Step
from hetspmd.rules.rule import Triple
from hetspmd.rules.theory import Theory
from hetspmd.search.constraints import Constraints
from hetspmd.trace.graph import PARAMETER, Instruction

Choose = Callable[[Instruction, list[Triple]], Triple]


class Builder:
    """Writes a program step by step; communications are put in where a form is missing."""

    def __init__(self, theory: Theory, dice: random.Random) -> None:
        self.theory, self.dice = theory, dice
        self.forms: dict[int, list[Placement]] = {}
        self.steps: list[Step] = []

    def ready(self, instruction: Instruction, row: Triple) -> bool:
        """Whether a row needs no communication."""
        return all(
            f in self.forms[t] or REPLICATE in self.forms[t]
            for t, f in zip(instruction.inputs, row.pre, strict=True)
        )

    def reach(self, tensor: int, form: Placement) -> None:
        have = self.forms[tensor]
        if form in have or REPLICATE in have:
            return
        source = self.dice.choice(have)
        if is_before_cut(source):
            self.communicate(tensor, "rebalance", source, after_cut(source))
            self.reach(tensor, form)
            return
        if is_sharded(form) and source != form:
            scatter: list[Kind] = ["reduce_scatter", "grouped_reduce", "ring_reduce", "exchange_reduce"]
            options: list[Kind] = scatter if source == PARTIAL else ["all_to_all"]
            self.communicate(tensor, self.dice.choice(options), source, form)
            return
        gather: list[Kind] = ["all_gather", "grouped_broadcast", "ring_gather"]
        kind: Kind = "all_reduce" if source == PARTIAL else self.dice.choice(gather)
        self.communicate(tensor, kind, source, REPLICATE)

    def communicate(self, tensor: int, kind: Kind, source: Placement, target: Placement) -> None:
        self.steps.append(Communicate(tensor, kind, source, target))
        self.forms[tensor].append(target)

    def compute(self, instruction: Instruction, row: Triple) -> None:
        for tensor, form in zip(instruction.inputs, row.pre, strict=True):
            self.reach(tensor, form)
        self.steps.append(Compute(instruction.id, row))
        for tensor, form in zip(instruction.outputs, row.post, strict=True):
            if tensor >= 0:
                self.forms[tensor] = [form]

    def finish(self) -> Program:
        graph = self.theory.graph

        def result(tensor: int, form: Placement) -> Result:
            self.reach(tensor, form)
            return Result(tensor, form)

        loss = None if graph.loss is None else result(graph.loss, REPLICATE)
        outputs = []
        for output in graph.outputs:
            if output.tensor is not None:
                have = self.forms[output.tensor]
                outputs.append(Result(output.tensor, self.dice.choice(have)))
        gradients = []
        for parameter in graph.parameters:
            if parameter.gradient is not None:
                stored = self.forms[parameter.tensor][0]
                gradients.append(result(parameter.gradient, stored))
        buffers = [result(b.updated, REPLICATE) for b in graph.buffers if b.updated is not None]
        return Program(tuple(self.steps), loss, tuple(outputs), tuple(gradients), tuple(buffers))


def build(theory: Theory, choose: Choose, seed: int = 0) -> Program:
    """A program whose rows ``choose`` picks from all that an instruction has."""
    builder = Builder(theory, random.Random(seed))
    for instruction in theory.graph.instructions:
        builder.compute(instruction, choose(instruction, list(theory.rows[instruction.id])))
    return builder.finish()


def random_program(theory: Theory, seed: int) -> Program:
    """Any row for any instruction."""
    dice = random.Random(seed)
    return build(theory, lambda _, rows: dice.choice(rows), seed)


def cheap_random_program(theory: Theory, seed: int) -> Program:
    """Mostly rows that need no communication, from random beginnings."""
    builder = Builder(theory, random.Random(seed))
    dice = builder.dice
    for instruction in theory.graph.instructions:
        rows = list(theory.rows[instruction.id])
        free = [r for r in rows if builder.ready(instruction, r)]
        divided = [r for r in free if r.name != "always"]
        pick = divided if divided and dice.random() < 0.9 else free if free and dice.random() < 0.9 else rows
        builder.compute(instruction, dice.choice(pick))
    return builder.finish()


def data_parallel(theory: Theory, batch: int, *, sharded_parameters: bool = False) -> Program:
    """Every instruction divided along the axis of dim 0 of tensor ``batch`` where it can be."""
    axis = theory.axes.axis(batch, 0)
    assert axis is not None

    def choose(instruction: Instruction, rows: list[Triple]) -> Triple:
        axes = theory.row_axes[instruction.id]
        if instruction.op == PARAMETER:
            return next((r for r in rows[1:] if sharded_parameters), rows[0])
        return next((r for r, a in zip(rows, axes, strict=True) if a == axis.id), rows[0])

    builder = Builder(theory, random.Random(0))
    for instruction in theory.graph.instructions:
        rows = list(theory.rows[instruction.id])
        row = choose(instruction, rows)
        if not instruction.is_source and row.name == "always":
            partial = [
                r for r in rows
                if any(PARTIAL in builder.forms[t] for t in instruction.inputs)
                and builder.ready(instruction, r)
            ]  # fmt: skip
            row = partial[0] if partial else row
        builder.compute(instruction, row)
    return builder.finish()


def uneven(theory: Theory, world: int, seed: int = 0) -> Lengths:
    """Random lengths, with empty shards."""
    dice = random.Random(seed)
    units = []
    for axis in theory.axes.axes:
        cuts = sorted(dice.randint(0, axis.units) for _ in range(world - 1))
        edges = [0, *cuts, axis.units]
        units.append(tuple(b - a for a, b in itertools.pairwise(edges)))
    return Lengths(world, tuple(units))


def divided_in_the_loop(theory: Theory, seed: int) -> Constraints:
    """The devices divide the samples as the micro-batches do; parameters are whole, or in shards, as drawn."""
    loop, draw = micro_batches(theory, 2).loop, random.Random(seed)
    forms = {}
    for p in theory.graph.parameters:
        shape = theory.graph.tensors[p.tensor].shape
        dims = [d for d in range(len(shape)) if theory.axes.axis(p.tensor, d) is not None]
        forms[p.tensor] = draw.choice([REPLICATE, *(shard(d) for d in dims)])

    def allowed(instruction: int, row: Triple, _axis: int | None) -> bool:
        return loop.phases[instruction] != "in" or row == loop.rows[instruction]

    return Constraints(forms, allowed)
