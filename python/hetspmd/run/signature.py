"""``hap.forward`` with the signature of what it runs.

Libraries look there for the names of the batch's columns and for whether a model takes further arguments (Trainer).
They also take the method apart, put another one in its place and put it back (Accelerate), so that it is a method
as any other, of a function of its own with that signature.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from inspect import Parameter, Signature, signature
from types import FunctionType, MethodType
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from hetspmd.run.parameter_registry import ShardedModule
from hetspmd.trace.losses import PickedLoss

_HAP = Parameter("_hap", Parameter.POSITIONAL_ONLY)


class Forward:
    """A method ``forward`` of HAP, whose signature is that of the model, or of the ``loss`` function that was
    given, without its model."""

    def __init__(self, function: Callable[..., Any]) -> None:
        assert isinstance(function, FunctionType)
        self.function = function
        self.__doc__ = function.__doc__
        self._made: WeakKeyDictionary[ShardedModule, FunctionType] = WeakKeyDictionary()
        self._lock = threading.Lock()

    def __get__(self, hap: ShardedModule | None, _kind: type | None = None) -> Callable[..., Any]:
        if hap is None:
            return self.function
        function = self._made.get(hap)
        if function is None:
            with self._lock:
                function = self._made.setdefault(hap, _copied(self.function, hap))
        return MethodType(function, hap)


def _copied(function: FunctionType, hap: ShardedModule) -> FunctionType:
    """The function with the signature of what this module runs."""
    parts = function.__code__, function.__globals__, function.__name__, function.__defaults__
    twin = FunctionType(*parts, function.__closure__)
    twin.__kwdefaults__, twin.__doc__ = function.__kwdefaults__, function.__doc__
    twin.__qualname__, twin.__module__ = function.__qualname__, function.__module__
    vars(twin).update({k: v for k, v in vars(function).items() if k != "__wrapped__"})
    with suppress(ValueError, TypeError):  # a function in C has none
        of = _signature(hap)
        twin.__signature__ = of.replace(parameters=[_HAP, *of.parameters.values()])  # type: ignore[attr-defined]  # what inspect reads
    return twin


def _signature(hap: ShardedModule) -> Signature:
    loss = hap.loss_function
    if loss is None or isinstance(loss, PickedLoss):
        return signature(hap.module.forward)
    of = signature(loss.forward if isinstance(loss, nn.Module) else loss)
    first = next(iter(of.parameters.values()), None)
    if first is None or first.kind in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD):
        return of
    return of.replace(parameters=list(of.parameters.values())[1:])
