"""What the placeholders and outputs of a joint graph are, as torch describes them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch._functorch._aot_autograd.descriptors import (
    BufferAOTInput,
    GradAOTOutput,
    InputMutationAOTOutput,
    ParamAOTInput,
    PlainAOTInput,
    PlainAOTOutput,
    TangentAOTInput,
)


@dataclass(frozen=True)
class InputRole:
    """What a placeholder of the joint graph is: ``parameter``, ``buffer``, ``input`` or ``tangent``;
    ``name`` for the first two, ``index`` for the others."""

    kind: str
    name: str = ""
    index: int = -1


@dataclass(frozen=True)
class OutputRole:
    """What an output of the joint graph is: ``output`` (index), ``gradient`` (name of the parameter) or
    ``buffer`` (name of the mutated buffer)."""

    kind: str
    name: str = ""
    index: int = -1


def input_role(descriptor: Any) -> InputRole:
    if isinstance(descriptor, ParamAOTInput):
        return InputRole("parameter", name=descriptor.target)
    if isinstance(descriptor, BufferAOTInput):
        return InputRole("buffer", name=descriptor.target)
    if isinstance(descriptor, PlainAOTInput):
        return InputRole("input", index=descriptor.idx)
    if isinstance(descriptor, TangentAOTInput):
        output = output_role(descriptor.output)
        return InputRole("tangent", name=output.name, index=output.index)
    return InputRole("unknown", name=repr(descriptor))


def output_role(descriptor: Any) -> OutputRole:
    if isinstance(descriptor, PlainAOTOutput):
        return OutputRole("output", index=descriptor.idx)
    if isinstance(descriptor, GradAOTOutput):
        of = input_role(descriptor.grad_of)
        kind = "gradient" if of.kind == "parameter" else "input_gradient"
        return OutputRole(kind, name=of.name, index=of.index)
    if isinstance(descriptor, InputMutationAOTOutput):
        mutated = input_role(descriptor.mutated_input)
        return OutputRole(f"{mutated.kind}_mutation", name=mutated.name, index=mutated.index)
    return OutputRole("unknown", name=repr(descriptor))
