"""Kinds of values that are found: functions and what they are bound to, and iterators.

A class may answer any question about its attributes (``__getattr__`` that makes what is asked for, or raises
KeyError). So only the class itself and the object's own ``__dict__`` are asked.
"""

from __future__ import annotations

import functools
import io
from collections.abc import Iterator
from types import BuiltinFunctionType, FunctionType, MethodType, MethodWrapperType, ModuleType
from typing import Any

from hetspmd.trace.host.content import own_attributes

__all__ = ["bound_to", "is_function", "is_iterator"]

_BOUND = (MethodType, BuiltinFunctionType, MethodWrapperType)
_FUNCTIONS = (*_BOUND, FunctionType, functools.partial)


def is_function(value: Any) -> bool:
    """Whether a value is a function, a method, a partial function, or wraps one."""
    kind = type(value)
    if kind is dict or kind is list or kind is tuple:
        return False
    return isinstance(value, _FUNCTIONS) or "__wrapped__" in own_attributes(value)


def bound_to(value: Any) -> Iterator[tuple[str, Any]]:
    """What a method or a partial function is called with, each with the step to it."""
    if isinstance(value, functools.partial):
        yield ".func", value.func
        yield ".args", value.args
        yield ".keywords", value.keywords
    elif isinstance(value, _BOUND) and not isinstance(value.__self__, (ModuleType, type(None))):
        yield ".__self__", value.__self__


def is_iterator(value: Any) -> bool:
    """Whether a value gives another one each time it is asked; a file that is written to does not."""
    if isinstance(value, io.IOBase):
        return not value.closed and not value.writable()
    return hasattr(type(value), "__next__")
