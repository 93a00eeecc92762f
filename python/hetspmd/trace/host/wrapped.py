"""The functions that lie in what Python and its library make of functions."""

from __future__ import annotations

import functools
import operator
from types import BuiltinFunctionType, FunctionType, MappingProxyType, MethodType
from typing import Any

from hetspmd.trace.host.content import own_attributes


def functions_in(value: Any) -> list[Any]:
    """The functions that calling a value, or reading it from an object that has it in its class, may call."""
    functions: list[Any] = []
    if type(value) is FunctionType:
        attributes = value.__dict__
    elif isinstance(value, property):
        return [function for function in (value.fget, value.fset, value.fdel) if function is not None]
    else:
        attributes = own_attributes(value)
        if isinstance(value, functools.singledispatchmethod):
            functions += functions_in(value.dispatcher)
        if isinstance(value, (functools.cached_property, functools.partialmethod, functools.partial)):
            functions.append(value.func)
    if attributes:
        functions += (registered(value) or {}).values()
        wrapped = attributes.get("__wrapped__")
        if wrapped is not None and wrapped is not value:
            functions.append(wrapped)
    return functions


def registered(value: Any) -> MappingProxyType[Any, Any] | None:
    """The functions of ``functools.singledispatch`` by class, None for anything else."""
    if isinstance(value, functools.singledispatchmethod):
        value = value.dispatcher
    registry = own_attributes(value).get("registry")
    return registry if isinstance(registry, MappingProxyType) else None


def unbound(value: Any) -> Any:
    """The function of a method, anything else as it is."""
    return value.__func__ if isinstance(value, (MethodType, staticmethod, classmethod)) else value


def asked_for(value: Any) -> frozenset[str]:
    """The names of attributes that a function of C asks an object for, and that of a function itself, which may lie
    where no code names it; none for anything else."""
    if isinstance(value, (FunctionType, BuiltinFunctionType)):
        return frozenset({value.__name__})
    if not isinstance(value, (operator.attrgetter, operator.methodcaller)):
        return frozenset()
    texts = (text for text in value.__reduce__()[1] if isinstance(text, str))
    return frozenset(name for text in texts for name in text.split("."))
