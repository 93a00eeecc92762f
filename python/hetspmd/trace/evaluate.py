"""Constants: computed once, when a program is lowered, on the device that will read them."""

from __future__ import annotations

from typing import Any

import torch

from hetspmd.errors import PlanError
from hetspmd.trace.assemble import constant_data
from hetspmd.trace.compat.tensors import has_kernel
from hetspmd.trace.gpu_attention import ON_GPU
from hetspmd.trace.graph import CONSTANT, Constant, Graph, Instruction, Ref, map_refs
from hetspmd.trace.values import to_torch, torch_dtype, torch_op


def constant_value(graph: Graph, constant: Constant, device: torch.device) -> torch.Tensor:
    """The tensor of a constant. Raises PlanError if its program reads what it does not hold."""
    if constant.data is not None:
        return _data(graph, constant.tensor, constant.data, device)
    environment: dict[int, torch.Tensor] = {}
    with torch.no_grad():
        for instruction in constant.program:
            for tensor, value in zip(
                instruction.outputs, _run(graph, instruction, environment, device), strict=True
            ):
                if tensor >= 0:
                    environment[tensor] = value
    try:
        return environment[constant.tensor]
    except KeyError:
        name = graph.tensors[constant.tensor].name
        raise PlanError(
            f"the program of constant {name} does not compute it; compile the plan again"
        ) from None


def _data(graph: Graph, tensor: int, text: str, device: torch.device) -> torch.Tensor:
    meta = graph.tensors[tensor]
    return constant_data(text, meta.shape, torch_dtype(meta.dtype)).to(device)


def _run(
    graph: Graph, instruction: Instruction, environment: dict[int, torch.Tensor], device: torch.device
) -> list[Any]:
    if instruction.op == CONSTANT:
        return [_data(graph, instruction.outputs[0], instruction.args[0], device)]
    return run_instruction(instruction, environment, device)


def run_instruction(
    instruction: Instruction, environment: dict[int, torch.Tensor], device: torch.device
) -> list[Any]:
    """The outputs of an instruction of the reference graph, run whole."""

    def value(ref: Ref) -> torch.Tensor:
        return environment[ref.id]

    op = local_op(instruction.op, device)
    args = [_torch(map_refs(a, value), device) for a in instruction.args]
    kwargs = {k: _torch(map_refs(v, value), device) for k, v in instruction.kwargs}
    return as_list(op(*args, **kwargs), len(instruction.outputs))


def _torch(value: Any, device: torch.device) -> Any:
    return value if isinstance(value, torch.Tensor) else to_torch(value, device)


def as_list(result: Any, count: int) -> list[Any]:
    """What an op returned as a list of ``count`` outputs."""
    if isinstance(result, torch.Tensor) or result is None:
        return [result]
    outputs = list(result)
    if len(outputs) != count:
        raise PlanError(f"an op returned {len(outputs)} results instead of {count}; compile the plan again")
    return outputs


_REPLACED = {"aten.view.default": "aten.reshape.default", "aten._unsafe_view.default": "aten.reshape.default"}


def local_op(name: str, device: torch.device | None = None) -> Any:
    """The op that computes ``name`` on any strides (``reshape`` for ``view``), on ``device`` if one is given.

    Raises PlanError if the device has no such op: kernels of one kind of device are part of a plan.
    """
    if device is None or device.type in ("cpu", "meta"):
        return torch_op(_REPLACED.get(name, name))
    if name in ON_GPU and device.type == "cuda":
        return ON_GPU[name]
    op = torch_op(_REPLACED.get(name, name))
    if not has_kernel(op, device.type):
        raise PlanError(
            f"{name}, which the plan calls, has no kernel for {device.type}: the plan was compiled for a model on "
            f"another kind of device; compile it where the model lies on {device.type}"
        )
    return op
