"""Whether a plan that was given, not made here, computes the model: the model is traced again, once, and compared.

A plan file holds a whole graph. Where the code of the model has changed since, its parameters may be those of
before, and the plan would go on computing the old model. Names of instructions and the modules that they come from
do not count, nor do copies between segments and outputs that a plan was made without.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch

from hetspmd.dist.communicator import Communicator
from hetspmd.errors import PlanMismatchError
from hetspmd.trace.graph import REBALANCE, Argument, Constant, Graph, Instruction, Output, Ref, map_refs

_MEND = (
    "compile the plan again with this model, this batch and this version of torch, or pass check_plan=False if it "
    "is known to be right"
)


def check_same_model(communicator: Communicator, plan: Graph, trace: Callable[[], Graph], kind: str) -> None:
    """Raise PlanMismatchError on every rank unless ``trace``, which rank 0 calls, gives the plan's graph. Blocks.

    ``kind`` is that of the device. Elsewhere than on the CPU graphs depend on where a model was traced, so that
    there a difference is a warning.
    """
    problem = ""
    if communicator.rank == 0:
        try:
            with communicator.busy():
                problem = difference(plan, trace())
            if problem and plan.host.draws:
                problem += (
                    f" (the model's Python draws random numbers{plan.host.draws}, and a plan keeps the outcome of "
                    "its own trace)"
                )
        except Exception as error:  # which the other ranks must hear of
            problem = f"the model cannot be traced again ({type(error).__name__}: {error})"
    problem = communicator.exchange(problem)[0]
    if not problem:
        return
    if kind == "cpu":
        raise PlanMismatchError(f"the plan does not compute this model: {problem}; {_MEND}")
    if communicator.rank == 0:
        warnings.warn(
            f"the plan may not compute this model, or was made on another kind of device than {kind}: {problem}; "
            f"{_MEND}",
            stacklevel=3,
        )


def difference(plan: Graph, model: Graph) -> str:
    """The first difference between a plan's graph and a model's; empty if they compute the same."""
    if len(plan.outputs) == len(model.outputs):
        left_out = [o.tensor is None and o.value is None for o in plan.outputs]
        if any(out and o.tensor is not None for out, o in zip(left_out, model.outputs, strict=True)):
            model = model.with_outputs(
                tuple(Output(None) if out else o for out, o in zip(left_out, model.outputs, strict=True))
            )
    for mine, other in zip_longest(_items(plan), _items(model)):
        if mine is None:
            return f"the model has more: {other.text}"
        if other is None:
            return f"the plan has more: {mine.text}"
        if mine.text != other.text:
            place = other.source or mine.source
            where = f" in module {place}" if place else ""
            return (
                f"the first difference is{where}, where the plan has {mine.text} and the model {other.text}"
            )
    return ""


@dataclass(frozen=True)
class _Item:
    text: str
    source: str = ""


def _items(graph: Graph) -> Iterator[_Item]:
    """What a graph computes, one thing after another, tensors numbered in the order in which they are made."""
    same = {i.outputs[0]: i.inputs[0] for i in graph.instructions if i.op == REBALANCE}
    number: dict[int, int] = {}
    yield _Item(f"autocast {graph.autocast or 'off'}")
    yield _Item(f"the batch {graph.input_spec}")
    for static in graph.statics:
        yield _Item(f"{static.path} = {static.value!r}")
    for instruction in graph.instructions:
        if instruction.op != REBALANCE:
            yield _Item(_text(graph, instruction, number, same), instruction.source)

    def numbered(tensor: int | None) -> str:
        return "none" if tensor is None else f"e{number.get(same.get(tensor, tensor), -1)}"

    for p in graph.parameters:
        yield _Item(
            f"parameter {', '.join(p.names)}: {numbered(p.tensor)}, its gradient {numbered(p.gradient)}"
        )
    for b in graph.buffers:
        yield _Item(f"buffer {', '.join(b.names)}: {numbered(b.tensor)}, its new value {numbered(b.updated)}")
    for i in graph.inputs:
        yield _Item(f"input {i.path}: {numbered(i.tensor)}")
    for constant in graph.constants:
        yield _Item(f"constant {numbered(constant.tensor)}: {_constant(graph, constant)}")
    yield _Item(f"the loss: {numbered(graph.loss)}")
    for index, output in enumerate(graph.outputs):
        yield _Item(f"output {index}: {numbered(output.tensor)} {output.value!r}")
    yield _Item(f"the outputs {graph.output_spec}")


def _text(graph: Graph, instruction: Instruction, number: dict[int, int], same: Mapping[int, int]) -> str:
    def renumbered(reference: Ref) -> Argument:
        return Ref(number.get(same.get(reference.id, reference.id), -1))

    parts = [_argument(map_refs(a, renumbered)) for a in instruction.args]
    parts += [f"{k}={_argument(map_refs(v, renumbered))}" for k, v in instruction.kwargs]
    for tensor in instruction.outputs:
        if tensor >= 0:
            number[tensor] = len(number)
    types = ", ".join(
        f"{graph.tensors[t].dtype}{list(graph.tensors[t].shape)}" if t >= 0 else "nothing"
        for t in instruction.outputs
    )
    return f"{instruction.op}({', '.join(parts)}) -> {types} ({instruction.phase})"


def _argument(value: Argument) -> str:
    if isinstance(value, Ref):
        return f"e{value.id}"
    if isinstance(value, tuple):
        return f"[{', '.join(map(_argument, value))}]"
    return repr(value)


def _constant(graph: Graph, constant: Constant) -> str:
    if constant.data is not None:
        return constant.data
    number: dict[int, int] = {}
    return "; ".join(_text(graph, i, number, {}) for i in constant.program)


def traced_for(plan: Graph, trace: Callable[..., Graph], *arguments: Any, **options: Any) -> Graph:
    """The model's graph as the plan's was traced: with its backward, if the plan has one."""
    with torch.set_grad_enabled(plan.training or torch.is_grad_enabled()):
        return trace(*arguments, training=plan.training, **options)
