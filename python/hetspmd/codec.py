"""Frozen dataclasses to JSON values and back, for plan files.

A dataclass is ``{"$": "ClassName", field: value, ...}``, a tuple a list, a mapping ``{"$map": [[k, v], ...]}``
in key order, a float that JSON lacks ``{"$float": "inf"}``. Only the classes of :data:`TYPES` are read back.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from functools import cache
from importlib import import_module
from typing import Any


@cache
def _types() -> dict[str, type]:
    # By module name: ``from hetspmd.rules import rule`` is the decorator.
    names = (
        "trace.graph", "rules.rule", "synth.program", "balance.lengths", "cost.cluster", "cost.measured",
        "cost.op_times", "cost.step", "plan",
    )  # fmt: skip
    found: dict[str, type] = {}
    for module in (import_module(f"hetspmd.{name}") for name in names):
        for name, value in vars(module).items():
            if (
                isinstance(value, type)
                and dataclasses.is_dataclass(value)
                and value.__module__ == module.__name__
            ):
                found[name] = value
    return found


def encode(value: Any) -> Any:
    """The JSON value of a dataclass tree. Raises TypeError for anything else."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"$float": repr(value)}
    if isinstance(value, (tuple, list)):
        return [encode(v) for v in value]
    if isinstance(value, Mapping):
        return {"$map": [[encode(k), encode(value[k])] for k in sorted(value)]}
    name = type(value).__name__
    known = _types().get(name)
    if known is type(value) and dataclasses.is_dataclass(known):
        fields = {f.name: encode(getattr(value, f.name)) for f in dataclasses.fields(known)}
        return {"$": name, **fields}
    raise TypeError(f"a {name} cannot be stored in a plan")


def decode(value: Any) -> Any:
    """Inverse of :func:`encode`; lists become tuples. Raises ValueError or KeyError for unknown text."""
    if isinstance(value, list):
        return tuple(decode(v) for v in value)
    if isinstance(value, dict):
        if "$float" in value:
            return float(value["$float"])
        if "$map" in value:
            return {decode(k): decode(v) for k, v in value["$map"]}
        cls = _types()[value["$"]]
        return cls(**{k: decode(v) for k, v in value.items() if k != "$"})
    return value
