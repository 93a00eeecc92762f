"""Hooks on the backward of a step that forward registers: part of a trace only as far as they change the gradient.

A hook that changes the gradient, in place or by what it returns, is traced with the backward. One that looks at it,
and returns nothing or the gradient itself, would be called by no program; nor is a gradient kept of a tensor of the
graph. Both are refused with their line. Hooks lie on tensors, on several of them, on nodes of autograd's graph and,
if forward takes them off again, on modules.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from types import FrameType
from typing import Any, Final

import torch
from torch import nn

from hetspmd.errors import TraceError
from hetspmd.trace.compat.tensors import replace_node_registration, same_content
from hetspmd.trace.frames import frame_line
from hetspmd.trace.host.foreign import is_foreign
from hetspmd.trace.host.plain import tensors_in

_OF_MODULES: Final = (
    "register_backward_hook",
    "register_full_backward_hook",
    "register_full_backward_pre_hook",
)
_OF_ALL_MODULES: Final = tuple(name.replace("register_", "register_module_") for name in _OF_MODULES)
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
            torch.Tensor.register_hook = _registering(register, 1)  # type: ignore[method-assign]  # on purpose
            torch.Tensor.retain_grad = _retaining(retain)  # type: ignore[method-assign]  # on purpose
            replace_node_registration(lambda own: _registering(own, 1))
            for holder, names, position in (
                (nn.Module, _OF_MODULES, 1),
                (nn.modules.module, _OF_ALL_MODULES, 0),
            ):
                for name in names:
                    setattr(holder, name, _registering(getattr(holder, name), position))


def _registering(register: Callable[..., Any], position: int) -> Callable[..., Any]:
    """A function that registers a hook, its argument at this position, which is called for nothing but a change."""

    @wraps(register)
    def registering(*args: Any, **kwargs: Any) -> Any:
        frame = _user(sys._getframe(1))
        if frame is None:
            return register(*args, **kwargs)
        line = frame_line(frame)
        if "hook" in kwargs:
            return register(*args, **{**kwargs, "hook": _changing(kwargs["hook"], line)})
        return register(*args[:position], _changing(args[position], line), *args[position + 1 :], **kwargs)

    return registering


def _changing(hook: Callable[..., Any], line: str) -> Callable[..., Any]:
    """The hook, refused where it changes no gradient."""

    @wraps(hook, updated=())
    def changing(*arguments: Any) -> Any:
        gradients = [t for argument in arguments for t in tensors_in(argument)]
        before = [gradient._version for gradient in gradients]
        changed = hook(*arguments)
        in_place = before != [gradient._version for gradient in gradients]
        if not in_place and all(any(same_content(t, g) for g in gradients) for t in tensors_in(changed)):
            raise TraceError(
                f"a hook on the backward, at {line}, only looks at the gradient (it returns none, or the same), "
                "and no plan would call it; let it return another gradient, or take it off. The gradients of "
                "parameters are there after loss.backward(), and hetspmd.on_full_gradient(parameter, hook) sees "
                "whole ones"
            )
        return changed

    return changing


def _retaining(retain: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(retain)
    def retain_grad(tensor: torch.Tensor) -> None:
        frame = _user(sys._getframe(1))
        if frame is not None and not tensor.is_leaf:
            raise TraceError(
                f"retain_grad() at {frame_line(frame)} keeps the gradient of a tensor inside of the step, of which "
                "a plan keeps none; compute what you need of it in the single-device model: hap.full_module()"
            )
        retain(tensor)

    return retain_grad


def _user(frame: FrameType | None) -> FrameType | None:
    """The caller's frame while a model is traced, if it is not torch's own.

    A hook on several tensors is registered on each by torch: its frame is that of who has called torch.
    """
    if not _TRACING.get():
        return None
    while frame is not None and frame.f_globals.get("__name__") == "torch.autograd.graph":
        if frame.f_code.co_name not in ("register_multi_grad_hook", "<genexpr>"):
            return None
        frame = frame.f_back
    return None if frame is None or is_foreign(frame.f_globals.get("__name__")) else frame
