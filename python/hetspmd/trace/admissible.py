"""What a model or a batch may not hold, refused by name before anything is traced."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from hetspmd.errors import ExampleError, ShardError, TraceError
from hetspmd.trace.compat.tensors import FakeTensorMode, is_compiled_module, is_sharded_wrapper

_LITERALS = (type(None), bool, int, float, str)

_WRAPPERS = (nn.parallel.DistributedDataParallel, nn.DataParallel)


def check_model(model: object) -> None:
    """Raise TraceError or ExampleError for a model that hetspmd cannot divide, with the path of the module."""
    if not isinstance(model, nn.Module):
        raise ExampleError(
            f"the model is a {type(model).__name__}, not an nn.Module; give the module itself, and a function that "
            "computes the loss as loss="
        )
    for path, module in model.named_modules():
        name = f"{path} of {type(model).__name__}" if path else "the model"
        _check_module(module, name)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if isinstance(tensor, (UninitializedParameter, UninitializedBuffer)):
            raise ExampleError(
                f"{name} is a parameter of a lazy module and has no shape yet; call model(batch) once on one "
                "device before HAP or compile"
            )
        _check_layout(tensor, name)
        _check_class(tensor, name)


def _check_module(module: nn.Module, name: str) -> None:
    kind = type(module).__name__
    if isinstance(module, _WRAPPERS) or is_sharded_wrapper(module) or is_hap(module):
        raise TraceError(
            f"{name} is a {kind}: hetspmd distributes the single-device model itself; give it the plain module "
            "(wrapped.module), and wrap it in HAP once, on the outside"
        )
    if is_compiled_module(module):
        raise TraceError(
            f"{name} is compiled by torch.compile; give hetspmd the plain module (compiled._orig_mod) "
            "and say HAP(..., compile=True)"
        )
    if isinstance(module, (torch.jit.ScriptModule, torch.jit.ScriptFunction)):
        raise TraceError(
            f"{name} is a {kind} of TorchScript, which cannot be traced; give the Python module that it "
            "was made from"
        )
    if isinstance(module, nn.SyncBatchNorm):
        raise TraceError(
            f"{name} is a SyncBatchNorm; use nn.BatchNorm1d, 2d or 3d: under HAP batch norm sees the "
            "global batch, so that nothing is left to synchronize"
        )
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse:
        raise TraceError(
            f"{name} is an {kind} with sparse gradients, which cannot be divided; say sparse=False"
        )


def is_hap(module: object) -> bool:
    """Whether a module is a HAP, which says so by its class: this package knows nothing of those that run."""
    return bool(getattr(type(module), "runs_a_plan", False))


def check_leaf(leaf: object, path: str) -> None:
    """Raise ExampleError unless a leaf of the batch is a dense tensor or a plain value."""
    if isinstance(leaf, torch.Tensor):
        _check_layout(leaf, path)
    elif type(leaf).__module__ == "numpy":
        raise ExampleError(
            f"{path} is a {type(leaf).__name__} of numpy; a batch holds tensors and plain values: "
            "torch.as_tensor(...) makes one"
        )
    elif not isinstance(leaf, _LITERALS):
        raise ExampleError(f"{path} is a {type(leaf).__name__}; a batch holds tensors and plain values")


def _check_layout(tensor: torch.Tensor, name: str) -> None:
    if tensor.is_nested:
        raise ExampleError(f"{name} is a nested tensor; pad it to one shape and give a mask beside it")
    if tensor.layout != torch.strided:
        layout = str(tensor.layout).removeprefix("torch.")
        raise ExampleError(f"{name} is a tensor of layout {layout}; shards are dense: give {name}.to_dense()")
    if tensor.is_quantized:
        raise ExampleError(f"{name} is a quantized tensor; give it dequantized")


def _check_class(tensor: torch.Tensor, name: str) -> None:
    """A class that changes what ops do with its tensors would be lost in the trace."""
    kind = type(tensor)
    if hasattr(kind, "plain_class"):
        raise ShardError(
            f"parameter {name} is a shard of another HAP module. One HAP serves every batch and mode, train() and "
            "eval(); for a second one build the model anew, or, on every rank: model = hap.full_module()"
        )
    if isinstance(getattr(tensor, "fake_mode", None), FakeTensorMode):
        return
    functions = {_plain(of.__torch_function__) for of in (torch.Tensor, nn.Parameter)}
    dispatches = getattr(kind, "__torch_dispatch__", None) is not None and (
        _plain(kind.__torch_dispatch__) is not _plain(torch.Tensor.__torch_dispatch__)
    )
    if dispatches or _plain(kind.__torch_function__) not in functions:
        raise TraceError(
            f"{name} is a {kind.__name__}, whose class changes what ops do with it; hetspmd traces and divides "
            "plain parameters: make it an nn.Parameter, and write what its class does into forward"
        )


def _plain(function: Any) -> Any:
    return getattr(function, "__func__", function)


def argument_names(function: Any, args: Sequence[Any]) -> dict[str, str]:
    """``args[0]`` to the name that ``function`` gives it, for positional arguments that have one.

    ``function`` is a module, of which ``forward`` counts, or a loss without its first argument.
    """
    try:
        function = function.forward if isinstance(function, nn.Module) else function
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return {}
    return {
        f"args[{i}]": p.name
        for i, p in zip(range(len(args)), parameters, strict=False)
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    }


def spoken(path: str, names: Mapping[str, str]) -> str:
    """A path such as ``args[1][0]`` as people know it: ``hidden[0] (args[1][0])``."""
    head, bracket, rest = path.partition("]")
    name = names.get(head + bracket)
    return path if name is None else f"{name}{rest} ({path})"
