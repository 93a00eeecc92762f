"""Steps to the items of containers, as text: an index or key by which every rank finds the same item.

A key is written as JSON where that has it, else as a template (:mod:`hetspmd.trace.host.templates`): an enum, a
dtype, a device. A step to any other key, such as a class or an object, is there for people alone, and leads
nowhere.
"""

from __future__ import annotations

import enum
import json
from typing import Any, Final

import torch

from hetspmd.errors import PlanError
from hetspmd.trace.host import raw
from hetspmd.trace.host.cached import CALL, spoken_call
from hetspmd.trace.host.content import own_attributes
from hetspmd.trace.host.templates import NoTemplateError, from_text, to_text

ALL: Final = "[*]"
"""A step to a container's class, with its keys or its number of elements; written, to its whole content."""
OTHERS: Final = "[**]"
"""A step to the items of a dict to whose keys no step leads."""
FUNCTIONS: Final = "[functions]"
"""A step to what others were put in the place of functions of a module, or beside them."""
CALLS: Final = "[calls]"
"""A step to what a call of a module runs beside its class: a forward of its own, and hooks in their order. The keys
of hooks count on for all modules of a process."""
_HOOKS: Final = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_NOWHERE: Final = "[?"
_SIMPLE: Final = (int, str, bool, type(None))


def step_to(key: Any) -> str:
    """The step to an item of a container."""
    try:
        return f"[{json.dumps(_written(key))}]"
    except (NoTemplateError, TypeError, ValueError):
        return f"{_NOWHERE}{key!r}]"


def key_of(step: str) -> Any:
    """Inverse of :func:`step_to`. Raises ValueError. JSON, since Python's own parser is not safe in threads."""
    try:
        return _read(json.loads(step[1:-1]))
    except (KeyError, AttributeError, TypeError, PlanError) as error:  # an enum that is not here
        raise ValueError(f"no key {step}") from error


def told(key: Any) -> bool:
    """Whether the step to a key leads to it."""
    if type(key) in _SIMPLE:
        return True
    try:
        return bool(key_of(step_to(key)) == key)
    except (ValueError, RuntimeError):
        return False


def leads(step: str) -> bool:
    """Whether a step is more than text for people."""
    return not step.startswith(_NOWHERE)


def spoken(step: str) -> str:
    """A step as people read it."""
    if not leads(step):
        return f"[{step.removeprefix(_NOWHERE)}"
    if step.startswith(CALL):
        return spoken_call(step)
    return f"[{key_of(step)}]" if step.startswith("[{") else step


def others(mapping: dict[Any, Any]) -> dict[Any, Any]:
    """The items of a dict to whose keys no step leads."""
    return {key: value for key, value in raw.pairs(mapping) if not told(key)}


def calls_of(module: Any) -> tuple[Any, ...]:
    """What a call of a module runs beside its class: its own ``forward`` or None, and its hooks."""
    attributes = own_attributes(module)
    hooks = (hook for name in _HOOKS for hook in attributes.get(name, {}).values())
    return attributes.get("forward"), *hooks


def _written(key: Any) -> Any:
    if type(key) is tuple:
        return [_written(k) for k in key]
    if isinstance(key, float) and key != key:
        raise NoTemplateError("NaN")  # it is equal to no other
    if key is None or (isinstance(key, (int, str, float)) and not isinstance(key, enum.Enum)):
        return key
    return json.loads(to_text(key, _no_tensor))


def _read(key: Any) -> Any:
    if isinstance(key, list):
        return tuple(map(_read, key))
    return from_text(json.dumps(key), _no_tensor) if isinstance(key, dict) else key


def _no_tensor(_tensor: torch.Tensor) -> Any:
    raise NoTemplateError("tensor")
