"""The single device: an interpreter of the reference graph.

It runs every instruction whole, in order, and is what a distributed program must equal. With a
:class:`~hetspmd.dist.random.Randomness` in reference mode it makes the same random draws as the ranks do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from hetspmd.dist.random import Draw, Randomness, random_op
from hetspmd.rules.theory import Theory
from hetspmd.trace.evaluate import as_list, constant_value, local_op, run_instruction
from hetspmd.trace.graph import BUFFER, CONSTANT, INPUT, PARAMETER, TANGENT, Instruction, Ref, map_refs
from hetspmd.trace.values import to_torch, torch_dtype


@dataclass(frozen=True)
class ReferenceResult:
    """Loss, outputs by tensor id, gradients, updated buffers and updated parameters by (first) name."""

    loss: torch.Tensor | None
    outputs: dict[int, torch.Tensor]
    gradients: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]
    parameters: dict[str, torch.Tensor]


def run_reference(
    theory: Theory,
    parameters: Mapping[str, torch.Tensor],
    buffers: Mapping[str, torch.Tensor],
    inputs: Sequence[torch.Tensor],
    *,
    randomness: Randomness,
    watch: Callable[[Instruction, Mapping[int, torch.Tensor]], None] | None = None,
) -> ReferenceResult:
    """One step of the graph on one device: ``inputs`` are the batch's tensors in the graph's order.

    Nothing is changed in place. The caller has called ``randomness.begin_step``.
    """
    graph = theory.graph
    device = randomness.device
    values: dict[int, torch.Tensor] = {}
    sources: dict[str, dict[int, torch.Tensor]] = {
        PARAMETER: {p.tensor: parameters[p.name].detach() for p in graph.parameters},
        BUFFER: {b.tensor: buffers[b.name] for b in graph.buffers},
        INPUT: {i.tensor: value for i, value in zip(graph.inputs, inputs, strict=True)},
    }
    constants = {c.tensor: c for c in graph.constants}
    last: dict[int, int] = {t: i.id for i in graph.instructions for t in i.inputs}
    results = {o.tensor for o in graph.outputs} | {graph.loss} | set(graph.updates)
    results |= {p.gradient for p in graph.parameters}
    with torch.no_grad():
        for instruction in graph.instructions:
            first = instruction.outputs[0]
            if instruction.op in sources:
                values[first] = sources[instruction.op][first]
            elif instruction.op == CONSTANT:
                values[first] = constant_value(graph, constants[first], device)
            elif instruction.op == TANGENT:
                meta = graph.tensors[first]
                values[first] = torch.ones(meta.shape, dtype=torch_dtype(meta.dtype), device=device)
            elif theory.rules[instruction.id].random:
                _keep(values, instruction, _draw(theory, instruction, values, randomness))
            else:
                _keep(values, instruction, run_instruction(instruction, values, device))
            if watch is not None:
                watch(instruction, values)
            for tensor in instruction.inputs:
                if last[tensor] == instruction.id and tensor not in results:
                    values.pop(tensor, None)
    return ReferenceResult(
        None if graph.loss is None else values[graph.loss],
        {o.tensor: values[o.tensor] for o in graph.outputs if o.tensor is not None},
        {p.name: values[p.gradient] for p in graph.parameters if p.gradient is not None},
        {b.name: values[b.updated] for b in graph.buffers if b.updated is not None},
        {p.name: values[p.updated] for p in graph.parameters if p.updated is not None},
    )


def _keep(values: dict[int, torch.Tensor], instruction: Instruction, results: list[torch.Tensor]) -> None:
    for tensor, value in zip(instruction.outputs, results, strict=True):
        if tensor >= 0:
            values[tensor] = value


def _draw(
    theory: Theory, instruction: Instruction, values: dict[int, torch.Tensor], randomness: Randomness
) -> list[torch.Tensor]:
    def value(ref: Ref) -> torch.Tensor:
        return values[ref.id]

    def torch_value(argument: object) -> object:
        filled = map_refs(argument, value)
        return filled if isinstance(filled, torch.Tensor) else to_torch(filled, randomness.device)

    args = [torch_value(a) for a in instruction.args]
    kwargs = {k: torch_value(v) for k, v in instruction.kwargs}
    draw = Draw(instruction.id, theory.graph.tensors[instruction.outputs[0]].shape)
    result = random_op(randomness, draw, local_op(instruction.op), args, kwargs)
    return as_list(result, len(instruction.outputs))
