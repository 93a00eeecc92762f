"""What Python code writes to tensors while a step is traced, and no op of the graph says.

``tensor.data = value`` is no op: it gives a tensor another memory. It is done here to the trace's own tensors, so
that what reads the tensor later reads the new value, and what has read it before keeps the old one, as in eager
PyTorch. A write to a tensor that the trace does not follow is refused, since it would be lost; where an input is
written to is remembered for the error that refuses it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from types import FrameType, FunctionType, MethodWrapperType
from typing import Any, Final

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from hetspmd.errors import TraceError
from hetspmd.trace.compat.joint import assign_data
from hetspmd.trace.compat.tensors import is_traced, memory_of
from hetspmd.trace.frames import frame_line, here, line_of
from hetspmd.trace.host.foreign import is_foreign, is_own
from hetspmd.trace.host.seeds import refuse_generator

_GRADIENT: Final = tuple(getattr(torch.Tensor.grad, f"__{how}__") for how in ("get", "set", "delete"))
_VERSION: Final = torch.Tensor._version.__get__  # type: ignore[attr-defined]  # a getset descriptor of C
_SET_DATA: Final = torch.Tensor.data.__set__  # type: ignore[attr-defined]  # a getset descriptor of C
_OPERATORS: Final = frozenset(
    f"__i{name}__"
    for name in (
        "add",
        "sub",
        "mul",
        "truediv",
        "floordiv",
        "mod",
        "pow",
        "and",
        "or",
        "xor",
        "lshift",
        "rshift",
    )
) | {"__setitem__"}
_NO_WRITES: Final = frozenset({"requires_grad_"})


class Assignments(TorchFunctionMode):
    """Within it, assignments of memory reach the trace.

    ``assigned`` lists the tensors whose memory was replaced. ``changed`` maps the position of an input that is
    written to, among those given, to the line that does so.
    """

    def __init__(self, model: nn.Module, inputs: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.assigned: list[torch.Tensor] = []
        self.changed: dict[int, str] = {}
        self._model = model
        self._inputs = {memory_of(tensor): index for index, tensor in enumerate(inputs)}

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        keywords = kwargs or {}
        if type(func) is FunctionType and is_own(func.__module__):
            _refuse_wrapper(func)
        if type(func) is MethodWrapperType:
            if func == _SET_DATA:
                return self._assign(*args)
            if func in _GRADIENT or func == _VERSION:
                self._refuse_reading(func, args[0], sys._getframe(1))
        if keywords and any(isinstance(value, torch.Generator) for value in keywords.values()):
            keywords = self._without_generator(keywords)
        written = _written(func, args, keywords)
        if written is not None:
            self._look_at(written, getattr(func, "__name__", ""))
        return func(*args, **keywords)

    def _assign(self, tensor: torch.Tensor, value: torch.Tensor) -> None:
        if not is_traced(tensor):
            raise self._lost(tensor, "data =")
        if value.shape != tensor.shape or value.dtype != tensor.dtype:
            raise TraceError(
                f"forward gives {self._name(tensor)}, which is {_meta(tensor)}, the data of a tensor that is "
                f"{_meta(value)}{self._at()}; a tensor keeps its shape and dtype in a plan: give it its final "
                "shape before, or make a new tensor"
            )
        assign_data(tensor, value)
        self.assigned.append(tensor)

    def _refuse_reading(self, func: Any, tensor: torch.Tensor, frame: FrameType) -> None:
        """Refuse the gradient and the version of a parameter to the model's own code: a plan has neither."""
        name = frame.f_globals.get("__name__")
        path = self._path(tensor)
        if not path or is_foreign(name):
            return
        if func in _GRADIENT:
            raise TraceError(
                f"forward uses {path}.grad at {frame_line(frame)}, the gradient of the step before, which is no "
                "part of a step; use it after loss.backward(), outside of forward: hap.full_gradients(), or "
                "hetspmd.get_total_norm(hap) for its norm"
            )
        raise TraceError(
            f"forward asks {path}._version at {frame_line(frame)}, which a plan does not count; count the steps in "
            "a buffer: self.register_buffer(name, torch.zeros(())) in __init__"
        )

    def _without_generator(self, keywords: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments of a call that draws from torch's default generator, as those that name none do."""
        arguments = {k: v for k, v in keywords.items() if not isinstance(v, torch.Generator)}
        if any(v is not torch.default_generator for k, v in keywords.items() if k not in arguments):
            raise refuse_generator(here(self._model))
        return arguments

    def _look_at(self, written: torch.Tensor, how: str) -> None:
        if not is_traced(written):
            raise self._lost(written, how)
        index = self._inputs.get(memory_of(written))
        if index is not None:
            self.changed.setdefault(index, here(self._model))

    def _lost(self, tensor: torch.Tensor, how: str) -> TraceError:
        return TraceError(
            f"forward changes {self._name(tensor)} ({how}){self._at()}, a tensor that is neither a parameter nor a "
            "buffer of the model, so that the change would be lost; register it: "
            f"self.register_buffer({self._attribute(tensor)!r}, tensor)"
        )

    def _at(self) -> str:
        line = here(self._model)
        return f" at {line}" if line else ""

    def _attribute(self, tensor: torch.Tensor) -> str:
        return self._name(tensor).rpartition(".")[2] if self._path(tensor) else "name"

    def _name(self, tensor: torch.Tensor) -> str:
        return self._path(tensor) or "a tensor"

    def _path(self, tensor: torch.Tensor) -> str:
        """Where the tensor hangs in the model, "" if nowhere."""
        for path, module in self._model.named_modules():
            for table in (module._parameters, module._buffers, vars(module)):
                for key, value in table.items():
                    if value is tensor:
                        return f"{path}.{key}" if path else key
        return ""


@contextmanager
def named_writes() -> Iterator[None]:
    """Within it, torch's errors for writes that a trace cannot follow are named."""
    try:
        yield
    except ValueError as error:
        if "Cannot assign non-leaf Tensor to parameter" not in str(error):
            raise
        frame = f" at {line}" if (line := line_of(error)) else ""
        raise TraceError(
            f"forward assigns a changed parameter to its own name{frame}, as self.p += value does; change it in "
            "place: self.p.add_(value)"
        ) from error


def _written(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.Tensor | None:
    """The tensor that a call changes in place, as far as its name says so."""
    if kwargs and isinstance(out := kwargs.get("out"), torch.Tensor):
        return out
    in_place = _is_in_place(getattr(func, "__name__", "")) or (kwargs and kwargs.get("inplace") is True)
    if in_place and args and isinstance(args[0], torch.Tensor):
        return args[0]
    return None


@cache
def _is_in_place(name: str) -> bool:
    """Whether a function of this name changes its first argument."""
    return name in _OPERATORS or (name.endswith("_") and not name.endswith("__") and name not in _NO_WRITES)


def _meta(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _refuse_wrapper(function: FunctionType) -> None:
    """Refuse a function in the place of one of torch's that it calls: that one calls, under a mode, what now has
    its name, so that what the function adds would count twice."""
    if "handle_torch_function" not in function.__code__.co_names:
        raise TraceError(
            f"{function.__qualname__} of {function.__module__} stands in the place of a function of torch's and "
            "calls it; that one calls what has its name while it is traced, so that it would count twice. Call the "
            "wrapper by a name of its own, or let it compute with other functions"
        )
