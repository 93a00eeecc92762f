"""Values, on the CPU, of tensors that depend on no parameter, input or randomness."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch

from hetspmd.trace.graph import CONSTANT, SOURCES, Constant, Graph, Instruction


def evaluate(graph: Graph) -> Callable[[int], torch.Tensor | None]:
    """A function from a tensor's id to its value, None if it has none before the step runs."""
    from hetspmd.trace.evaluate import constant_value

    constants = {c.tensor: c for c in graph.constants}
    tensors: dict[int, torch.Tensor | None] = {}
    cpu = torch.device("cpu")

    def value(tensor: int) -> torch.Tensor | None:
        if tensor not in tensors:
            tensors[tensor] = None
            instruction = graph.producer(tensor) if tensor in graph.producers else None
            if instruction is None:
                return None
            if instruction.op == CONSTANT:
                tensors[tensor] = constant_value(graph, constants[tensor], cpu)
            elif instruction.op not in SOURCES:
                needed = {t: value(t) for t in instruction.inputs}
                if all(v is not None for v in needed.values()):
                    tensors[tensor] = value_of(graph, instruction, tensor, needed)  # type: ignore[arg-type]  # none is None
        return tensors[tensor]

    return value


def value_of(
    graph: Graph, instruction: Instruction, tensor: int, values: Mapping[int, torch.Tensor]
) -> torch.Tensor:
    """One output of an instruction."""
    from hetspmd.trace.evaluate import run_instruction

    with torch.no_grad():
        results = run_instruction(instruction, dict(values), torch.device("cpu"))
    output: torch.Tensor = results[instruction.outputs.index(tensor)]
    return output


def instruction_value(instruction: Instruction, values: Mapping[int, torch.Tensor]) -> torch.Tensor:
    """The output of an instruction that has one."""
    from hetspmd.trace.evaluate import run_instruction

    with torch.no_grad():
        results = run_instruction(instruction, dict(values), torch.device("cpu"))
    output: torch.Tensor = results[0]
    return output


def computing(graph: Graph, tensor: int) -> Constant:
    """The constant that computes a tensor which does not vary."""
    constants = {c.tensor: c for c in graph.constants}
    wanted: set[int] = {tensor}
    program: list[Instruction] = []
    for instruction in reversed(graph.instructions):
        if not any(t in wanted for t in instruction.outputs):
            continue
        if instruction.op != CONSTANT:
            wanted.update(instruction.inputs)
            program.append(instruction)
            continue
        constant = constants[instruction.outputs[0]]
        if constant.data is None:
            program.extend(reversed(constant.program))
        else:
            program.append(replace(instruction, args=(constant.data,)))
    return Constant(tensor, tuple(replace(i, id=n) for n, i in enumerate(reversed(program))))
