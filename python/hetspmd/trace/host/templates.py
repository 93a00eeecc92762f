"""Values of Python as JSON from which another rank makes them again, with numbers in the place of tensors."""

from __future__ import annotations

import collections
import enum
import functools
import json
import sys
from collections.abc import Callable
from typing import Any

import torch

from hetspmd.errors import PlanError
from hetspmd.trace.host.plain import type_name


class NoTemplateError(Exception):
    """A value cannot be made again on another rank."""


def to_text(value: object, tensor: Callable[[torch.Tensor], Any]) -> str:
    """The template of a value; ``tensor`` gives the number of a tensor. Raises NoTemplateError."""
    return json.dumps(_template(value, tensor))


def _template(value: Any, tensor: Callable[[torch.Tensor], Any]) -> Any:
    kind = type(value)
    if kind in (bool, int, str, type(None)):
        return value
    if kind is float:
        return value if value == value and abs(value) != float("inf") else {"float": repr(value)}
    if kind is complex:
        return {"complex": [value.real, value.imag]}
    if isinstance(value, torch.Tensor):
        return {"tensor": tensor(value)}
    if kind is torch.Size:
        return {"size": list(value)}
    if isinstance(value, (torch.dtype, torch.device)):
        return {type(value).__name__: str(value).removeprefix("torch.")}
    if isinstance(value, enum.Enum):
        return {"enum": [kind.__module__, kind.__qualname__, value.name]}
    if kind in (list, tuple, set, frozenset, collections.deque):
        parts = [_template(v, tensor) for v in value]
        return (
            {kind.__name__: parts, "most": value.maxlen}
            if kind is collections.deque
            else {kind.__name__: parts}
        )
    if kind in (dict, collections.OrderedDict, collections.defaultdict):
        return {kind.__name__: [[_template(k, tensor), _template(v, tensor)] for k, v in value.items()]}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return {
            "namedtuple": [kind.__module__, kind.__qualname__],
            "of": [_template(v, tensor) for v in value],
        }
    raise NoTemplateError(type_name(kind))


_KINDS: dict[str, Callable[[Any], Any]] = {
    "list": list,
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "deque": collections.deque,
    "dict": dict,
    "OrderedDict": collections.OrderedDict,
    "defaultdict": dict,
}


def number_of(tensor: int) -> str:
    """The template of the Python number that a tensor without dims holds."""
    return json.dumps({"number": {"tensor": tensor}})


def from_text(text: str, tensor: Callable[[Any], torch.Tensor]) -> Any:
    """Inverse of :func:`to_text`. Raises PlanError for what :func:`to_text` does not write."""
    return _value(json.loads(text), tensor)


def _value(template: Any, tensor: Callable[[Any], torch.Tensor]) -> Any:
    if not isinstance(template, dict):
        return template
    (name, content), *more = template.items()
    if name in ("dict", "OrderedDict", "defaultdict"):
        return _KINDS[name]([(_value(k, tensor), _value(v, tensor)) for k, v in content])
    if name == "deque":
        return collections.deque((_value(v, tensor) for v in content), more[0][1])
    if name in _KINDS:
        return _KINDS[name]([_value(v, tensor) for v in content])
    if name == "tensor":
        return tensor(content)
    if name == "number":
        return tensor(content["tensor"]).item()
    if name == "namedtuple":
        return _class(*content)(*(_value(v, tensor) for v in more[0][1]))
    if name == "enum":
        return _class(*content[:2])[content[2]]
    simple: dict[str, Callable[[Any], Any]] = {
        "float": float,
        "complex": lambda c: complex(*c),
        "size": torch.Size,
        "device": torch.device,
        "dtype": lambda n: getattr(torch, n),
    }
    return simple[name](content)


def _class(module: str, name: str) -> Any:
    value = functools.reduce(getattr, name.split("."), sys.modules[module])
    if isinstance(value, type) and (issubclass(value, enum.Enum) or hasattr(value, "_fields")):
        return value
    raise PlanError(f"{module}.{name} is no enumeration and no named tuple; compile the plan again")


def numbers_in(template: str) -> list[int]:
    """The numbers of the tensors of a template."""
    numbers: list[int] = []

    def noted(number: int) -> int:
        numbers.append(number)
        return number

    renumbered(template, noted)
    return numbers


def renumbered(template: str, number: Callable[[int], int]) -> str:
    """A template with other numbers of its tensors."""

    def again(template_part: Any) -> Any:
        if isinstance(template_part, list):
            return [again(m) for m in template_part]
        if isinstance(template_part, dict):
            return {k: number(v) if k == "tensor" else again(v) for k, v in template_part.items()}
        return template_part

    return json.dumps(again(json.loads(template)))
