"""Kinds of values that are found: functions and what they are bound to, and iterators.

A class may answer any question about its attributes (``__getattr__`` that makes what is asked for, or raises
KeyError). So only the class itself and the object's own ``__dict__`` are asked.
"""

from __future__ import annotations

import functools
import io
from collections.abc import Iterator
from enum import Enum
from types import BuiltinFunctionType, FunctionType, MethodType, MethodWrapperType, ModuleType
from typing import Any

from hetspmd.trace.host.content import own_attributes
from hetspmd.trace.host.foreign import is_own
from hetspmd.trace.host.places import Path
from hetspmd.trace.host.plain import is_scalar
from hetspmd.trace.host.steps import step_to

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


def made_of(function: FunctionType) -> Iterator[tuple[Path, Any]]:
    """What a function can be given another of, while it stays the same object: its code, and defaults that are
    numbers, strings and the like; each with the steps to it."""
    yield (".__code__",), function.__code__
    positional, named = function.__defaults__ or (), function.__kwdefaults__ or {}
    if positional and all(map(is_scalar, positional)):
        yield (".__defaults__",), positional
    else:
        yield from (((".__defaults__", step_to(n)), v) for n, v in enumerate(positional) if is_scalar(v))
    yield from (((".__kwdefaults__", step_to(n)), v) for n, v in named.items() if is_scalar(v))


def tells_its_class(value: object) -> bool:
    """Whether an object says of which class it is: its class may say anything, or nothing."""
    try:
        return value.__class__ is type(value)
    except Exception:  # a class may raise anything when it is asked
        return False


def answers(value: object) -> bool:
    """Whether an object can be asked for its class at all, as ``isinstance`` does."""
    try:
        return value.__class__ is not None
    except Exception:  # a class may raise anything when it is asked
        return False


def parts_of(member: Enum) -> list[str]:
    """The attributes of a member of an enumeration of the user's that may change."""
    attributes = own_attributes(member) if is_own(type(member).__module__) else {}
    fixed = {"_name_", "__objclass__", "_sort_order_"}
    return sorted(
        n for n, v in attributes.items() if n not in fixed and not (n == "_value_" and is_scalar(v))
    )


def is_iterator(value: Any) -> bool:
    """Whether a value gives another one each time it is asked; a file that is written to does not."""
    if isinstance(value, io.IOBase):
        return not value.closed and not value.writable()
    return hasattr(type(value), "__next__")
