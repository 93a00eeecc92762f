"""Sample calls, on which the oracle tests the rules (see :mod:`hetspmd.rules.oracle`).

A module of this package defines ``SAMPLES``: op name -> a function without arguments that returns a list of
``(args, kwargs)`` with concrete CPU tensors. It may define as well:

``SHAPE_ONLY``  op name -> indices of outputs whose values nobody needs (random seeds): only their shape and
                dtype are compared
``FIXED``       op name -> indices of tensor inputs that are never redrawn in the search for missing rows,
                because only certain values make sense
``UNTESTED``    op name -> why it cannot be tested on a CPU
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from pkgutil import iter_modules
from typing import Any, TypeAlias

from hetspmd.errors import RuleError
from hetspmd.rules.registry import op_name

Sample: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]
Factory: TypeAlias = Callable[[], list[Sample]]


@dataclass(frozen=True)
class SampleSet:
    """What all modules of this package define, merged."""

    samples: dict[str, Factory] = field(default_factory=dict)
    shape_only: dict[str, tuple[int, ...]] = field(default_factory=dict)
    fixed: dict[str, tuple[int, ...]] = field(default_factory=dict)
    untested: dict[str, str] = field(default_factory=dict)


@cache
def load() -> SampleSet:
    """The merged samples, sorted by op. Raises RuleError where two modules define samples of the same op."""
    merged = SampleSet()
    source: dict[str, str] = {}
    for name in sorted(module.name for module in iter_modules(__path__)):
        module = import_module(f"{__name__}.{name}")
        for op, factory in module.SAMPLES.items():
            key = op_name(op)
            if key in source:
                raise RuleError(f"samples of {key} are defined in {source[key]} and in {name}")
            source[key] = name
            merged.samples[key] = factory
        merged.shape_only.update({op_name(k): tuple(v) for k, v in getattr(module, "SHAPE_ONLY", {}).items()})
        merged.fixed.update({op_name(k): tuple(v) for k, v in getattr(module, "FIXED", {}).items()})
        merged.untested.update({op_name(k): v for k, v in getattr(module, "UNTESTED", {}).items()})
    ordered = {op: merged.samples[op] for op in sorted(merged.samples)}
    return SampleSet(ordered, merged.shape_only, merged.fixed, dict(sorted(merged.untested.items())))
