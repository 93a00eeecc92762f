"""Whether the ops of a graph that was read from a file are those of this torch.

First each call is held against its op's schema: the op is there, takes as many arguments and knows their names.
Then each is run once on fake tensors, without data, and must give the shapes and dtypes that the graph says. Equal
calls, as of equal layers, are run once.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from hetspmd.errors import PlanError, TraceError
from hetspmd.rules.kernels import reader_of
from hetspmd.rules.rule import Call, TensorType
from hetspmd.rules.theory import Theory
from hetspmd.trace.compat.tensors import fake_mode, is_op
from hetspmd.trace.evaluate import as_list, constant_value, local_op
from hetspmd.trace.graph import Argument, Graph, Instruction, Ref
from hetspmd.trace.values import dtype_name, to_torch, torch_dtype


def _fail(instruction: Instruction, problem: str) -> PlanError:
    place = f" of module {instruction.source}" if instruction.source else ""
    return PlanError(
        f"the plan does not fit torch {torch.__version__}: {instruction.name}{place} calls {instruction.op}, "
        f"{problem}; compile the plan again with this version"
    )


def check_schemas(graph: Graph) -> None:
    """Raise PlanError for an op that torch does not have, or that takes other arguments."""
    seen: set[tuple[str, int, tuple[str, ...]]] = set()
    for instruction in _calls(graph):
        key = instruction.op, len(instruction.args), tuple(name for name, _ in instruction.kwargs)
        if key not in seen:
            seen.add(key)
            _check_schema(instruction)


def _calls(graph: Graph) -> Iterable[Instruction]:
    for instructions in (graph.instructions, *(c.program for c in graph.constants)):
        yield from (i for i in instructions if not i.is_source)


def _check_schema(instruction: Instruction) -> None:
    try:
        op = local_op(instruction.op)
    except (TraceError, ValueError, AttributeError, RuntimeError):
        op = None
    if not is_op(op):
        raise _fail(instruction, "which is not there; import the library that defines it, if it has one")
    schema = op._schema
    if schema.is_mutable:
        raise _fail(instruction, "which changes its arguments in place")
    positional = [a.name for a in schema.arguments if not a.kwarg_only]
    names = {a.name for a in schema.arguments}
    bound = positional[: len(instruction.args)]
    if len(instruction.args) > len(positional):
        raise _fail(
            instruction,
            f"with {len(instruction.args)} arguments; it takes {len(positional)} ({schema})",
        )
    for name, _ in instruction.kwargs:
        if name not in names:
            raise _fail(instruction, f"with {name!r}, which it does not take ({schema})")
        if name in bound:
            raise _fail(instruction, f"with {name!r} twice ({schema})")
        bound.append(name)
    required = [a.name for a in schema.arguments if not a.kwarg_only and not a.has_default_value()]
    if missing := [name for name in required if name not in bound]:
        raise _fail(instruction, f"without {', '.join(missing)} ({schema})")


def check_calls(theory: Theory) -> None:
    """Raise PlanError for a call that torch refuses, or of which it makes other tensors than the graph says."""
    graph = theory.graph
    device = torch.device("cpu")
    seen: set[int] = set()
    with fake_mode():
        for id_, call in theory.calls.items():
            if id(call) not in seen:
                seen.add(id(call))
                _check_call(graph.instructions[id_], call, device)
        for constant in graph.constants:
            _check_constant(graph, constant, device)


def _check_constant(graph: Graph, constant: Any, device: torch.device) -> None:
    tensor = graph.tensors[constant.tensor]
    try:
        value = constant_value(graph, constant, device)
    except NotImplementedError:
        return
    except Exception as error:
        raise PlanError(
            f"the plan does not fit torch {torch.__version__}: constant {tensor.name} cannot be computed "
            f"({_said(error)}); compile the plan again with this version"
        ) from error
    if (tuple(value.shape), dtype_name(value.dtype)) != (tensor.shape, tensor.dtype):
        raise PlanError(
            f"the plan's graph is damaged: constant {tensor} is computed as "
            f"{dtype_name(value.dtype)}{list(value.shape)}; compile the plan again"
        )


def _check_call(instruction: Instruction, call: Call, device: torch.device) -> None:
    inputs = [torch.empty(t.shape, dtype=torch_dtype(t.dtype), device=device) for t in call.inputs]
    if (reader := reader_of(call.op)) is not None:
        inputs = [reader(t) for t in inputs]

    def value(argument: Argument) -> Any:
        return _fill(to_torch(argument, device), inputs)

    try:
        args = [value(a) for a in call.args]
        result = local_op(call.op)(*args, **{k: value(v) for k, v in call.kwargs.items()})
        outputs = as_list(result, len(call.outputs))
    except NotImplementedError:  # the op says nothing of its shapes
        return
    except PlanError as error:
        raise _fail(instruction, str(error)) from error
    except Exception as error:
        raise _fail(instruction, f"which fails ({_said(error)})") from error
    types = [_type(o) for o in outputs]
    if len(types) != len(call.outputs) or any(
        want is not None and have != want for have, want in zip(types, call.outputs, strict=True)
    ):
        raise _fail(instruction, f"which gives {_list(types)}; the graph says {_list(call.outputs)}")


def _fill(value: Any, inputs: list[torch.Tensor]) -> Any:
    if isinstance(value, Ref):
        return inputs[value.id]
    return [_fill(v, inputs) for v in value] if isinstance(value, list) else value


def _type(value: Any) -> TensorType | None:
    return (
        TensorType(tuple(value.shape), dtype_name(value.dtype)) if isinstance(value, torch.Tensor) else None
    )


def _list(types: Iterable[TensorType | None]) -> str:
    return ", ".join("nothing" if t is None else f"{t.dtype}{list(t.shape)}" for t in types)


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"[:300]
