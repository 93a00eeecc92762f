"""A plan of a HAP module, ready to run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hetspmd.plan.plan import Plan
from hetspmd.run.autograd import Runner
from hetspmd.run.beside import Served
from hetspmd.run.guard import Expected
from hetspmd.run.known_parameters import KnownParameters
from hetspmd.run.setting import Mode
from hetspmd.run.store import Slot


@dataclass(kw_only=True)
class Entry:
    """A plan that the module can run, and for which batches, modes and states. ``model``: the model itself
    does so."""

    plan: Plan
    mode: Mode
    served: Served
    expected: Expected
    runner: Runner
    output_spec: Any
    parameters: list[Slot]
    buffers: list[Slot]
    known_parameters: KnownParameters
    inputs: list[str]
    model: bool
    compared: bool = False
    number: int = -1
    traced: bool = True
    """Whether the plan is known to be of this model."""
    used: int = 0
    """When it was last called, in calls of the module."""

    @property
    def differentiable(self) -> bool:
        return self.runner.program.backward is not None
