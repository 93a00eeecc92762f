"""hetspmd: synthesizes uneven SPMD programs for PyTorch training on clusters of unlike devices.

model = hetspmd.HAP(model, "cluster.yaml", example=batch)     # like DistributedDataParallel
plan = hetspmd.compile(model, batch, "cluster.yaml")          # the program, its cost, its alternatives
report = hetspmd.verify(model, batch, "cluster.yaml")         # all ranks in one process against one device
tuned = hetspmd.tune(model, batch, "cluster.yaml")            # the fastest of several plans, as measured
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hetspmd import errors, rules
    from hetspmd.cluster.cluster import Cluster
    from hetspmd.errors import HetspmdError
    from hetspmd.optimize.compile_options import CompileOptions
    from hetspmd.optimize.compiler import compile
    from hetspmd.plan.plan import Plan
    from hetspmd.rules.registry import rule
    from hetspmd.rules.rule import SUM, Call, Cut, Factor, Local, OpRule
    from hetspmd.run.gradient_hooks import on_full_gradient
    from hetspmd.run.loader import Loader, loader
    from hetspmd.run.module import HAP
    from hetspmd.run.norms import clip_grad_norm_, get_total_norm
    from hetspmd.run.one_process import hide_ranks
    from hetspmd.run.optimizer_guard import allow_optimizer
    from hetspmd.run.optimizer_state import full_optimizer_state_dict, load_full_optimizer_state_dict
    from hetspmd.run.scaler import GradScaler
    from hetspmd.tune.tune import Tuned, tune
    from hetspmd.verify.comparison import VerifyReport, verify

__version__ = "0.1.0"

_HOMES = {
    "HAP": "run.module",
    "SUM": "rules",
    "Call": "rules",
    "Cluster": "cluster.cluster",
    "CompileOptions": "optimize.compile_options",
    "Cut": "rules",
    "Factor": "rules",
    "GradScaler": "run.scaler",
    "HetspmdError": "errors",
    "Loader": "run.loader",
    "Local": "rules",
    "OpRule": "rules",
    "Plan": "plan.plan",
    "Tuned": "tune.tune",
    "VerifyReport": "verify.comparison",
    "allow_optimizer": "run.optimizer_guard",
    "clip_grad_norm_": "run.norms",
    "compile": "optimize.compiler",
    "full_optimizer_state_dict": "run.optimizer_state",
    "get_total_norm": "run.norms",
    "hide_ranks": "run.one_process",
    "load_full_optimizer_state_dict": "run.optimizer_state",
    "loader": "run.loader",
    "on_full_gradient": "run.gradient_hooks",
    "rule": "rules",
    "tune": "tune.tune",
    "verify": "verify.comparison",
}
"""Where the public names live; they are imported when first used, so that ``hetspmd --help`` need not wait for
torch."""

__all__ = [
    "HAP",
    "SUM",
    "Call",
    "Cluster",
    "CompileOptions",
    "Cut",
    "Factor",
    "GradScaler",
    "HetspmdError",
    "Loader",
    "Local",
    "OpRule",
    "Plan",
    "Tuned",
    "VerifyReport",
    "allow_optimizer",
    "clip_grad_norm_",
    "compile",
    "errors",
    "full_optimizer_state_dict",
    "get_total_norm",
    "hide_ranks",
    "load_full_optimizer_state_dict",
    "loader",
    "on_full_gradient",
    "rule",
    "rules",
    "tune",
    "verify",
]


_ATTACHED = {
    "Recording": ("record.record", "Recording"),
    "explain": ("optimize.explain", "explain"),
    "plan_text": ("report.summary", "plan_text"),
    "recording_text": ("report.recording", "recording_text"),
    "recording_trace": ("report.recording", "chrome_trace"),
    "timeline_text": ("report.timeline_text", "timeline_text"),
    "timeline_trace": ("report.timeline_text", "chrome_trace"),
}
"""What later packages do with the objects of earlier ones: they print, explain and record them."""


def attached(name: str) -> Any:
    """A function of a later package that is a method of an earlier one's class (``print(plan)``)."""
    module, function = _ATTACHED[name]
    return getattr(import_module(f"hetspmd.{module}"), function)


class _Door(ModuleType):
    """``hetspmd.verify`` and ``hetspmd.tune`` are functions, and the packages in which they live have their
    names."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _HOMES and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Door


def __getattr__(name: str) -> Any:
    if name in ("errors", "rules"):
        return import_module(f"hetspmd.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'hetspmd' has no attribute {name!r}")
    found = getattr(import_module(f"hetspmd.{_HOMES[name]}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return [*globals(), *__all__]
