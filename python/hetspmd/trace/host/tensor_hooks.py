"""Hooks on tensors that forward makes, which are part of a trace only as far as they change the gradient.

A hook that returns another gradient is traced with the backward. One that returns nothing looks at the gradient:
no program would call it again; nor is a gradient kept of a tensor of the graph. Both are refused with their line.
"""

from __future__ import annotations

import linecache
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from types import FrameType
from typing import Any

import torch

from hetspmd.errors import TraceError
from hetspmd.trace.host.code import is_foreign

__all__ = ["observers_refused"]

_LOCK = threading.Lock()
_REACHED: list[Any] = []
"""torch's own methods, once they were replaced."""
_TRACING: ContextVar[bool] = ContextVar("hetspmd_tracing_hooks", default=False)


@contextmanager
def observers_refused() -> Iterator[None]:
    """Within the context a hook that only looks at a gradient raises TraceError when the backward comes to it."""
    _reach_torch()
    token = _TRACING.set(True)
    try:
        yield
    finally:
        _TRACING.reset(token)


def _reach_torch() -> None:
    with _LOCK:
        if not _REACHED:
            register, retain = torch.Tensor.register_hook, torch.Tensor.retain_grad
            _REACHED.extend((register, retain))
            torch.Tensor.register_hook = _registering(register)  # type: ignore[method-assign]  # on purpose
            torch.Tensor.retain_grad = _retaining(retain)  # type: ignore[method-assign]  # on purpose


def _registering(register: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(register)
    def register_hook(tensor: torch.Tensor, hook: Callable[[Any], Any]) -> Any:
        frame = _user(sys._getframe(1))
        if frame is None:
            return register(tensor, hook)
        line = _line(frame)

        def looked_at(gradient: torch.Tensor) -> torch.Tensor:
            changed = hook(gradient)
            if changed is None:
                raise TraceError(
                    f"a hook on a tensor{line} only looks at the gradient, and no plan would call it; return the "
                    "gradient that it makes, or take the hook off. The gradients of parameters are there after "
                    "loss.backward(), and hetspmd.on_full_gradient(parameter, hook) sees whole ones"
                )
            return changed  # type: ignore[no-any-return]  # what a hook returns is a gradient

        return register(tensor, looked_at)

    return register_hook


def _retaining(retain: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(retain)
    def retain_grad(tensor: torch.Tensor) -> None:
        frame = _user(sys._getframe(1))
        if frame is not None and not tensor.is_leaf:
            raise TraceError(
                f"retain_grad(){_line(frame)} keeps the gradient of a tensor inside of the step, of which a plan "
                "keeps none; compute what you need of it in the single-device model: hap.full_module()"
            )
        retain(tensor)

    return retain_grad


def _user(frame: FrameType) -> FrameType | None:
    """The caller's frame while a model is traced, if it is not torch's own."""
    if not _TRACING.get() or is_foreign(frame.f_globals.get("__name__")):
        return None
    return frame


def _line(frame: FrameType) -> str:
    file, number = frame.f_code.co_filename, frame.f_lineno
    return f" at {file}:{number}: {linecache.getline(file, number).strip()}"
