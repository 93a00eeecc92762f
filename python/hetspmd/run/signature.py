"""``hap.forward`` with the signature of what it runs.

Libraries look there for the names of the batch's columns and for whether a model takes further arguments (Trainer).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from inspect import Parameter, Signature, signature
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hetspmd.run.module import HAP

__all__ = ["Forward"]


class Forward:
    """A method ``forward`` of HAP, whose signature is that of the model, or of the ``loss`` function that was
    given, without its model."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.__doc__ = function.__doc__

    def __get__(self, hap: HAP | None, _kind: type | None = None) -> Callable[..., Any]:
        return self.function if hap is None else _Bound(self.function, hap)


class _Bound(partial[Any]):
    """The method of one HAP module."""

    @property
    def __signature__(self) -> Signature:
        hap: HAP = self.args[0]
        if hap.loss_function is None:
            return signature(hap.module.forward)
        of = signature(hap.loss_function)
        first = next(iter(of.parameters.values()), None)
        if first is None or first.kind in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD):
            return of
        return of.replace(parameters=list(of.parameters.values())[1:])
