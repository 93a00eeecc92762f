"""In which mode and on what a model is called, in words, for ranks that do not call it alike."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hetspmd.trace.admissible import argument_names, spoken
from hetspmd.trace.autocast import autocast_state
from hetspmd.trace.compat import flatten
from hetspmd.trace.values import dtype_name

if TYPE_CHECKING:
    from hetspmd.run.host_guard import Guard

__all__ = ["TorchMode", "calling_text", "changing"]

_MOST_LEAVES = 12
"""Leaves of an argument that a message names: more make it unreadable."""


@dataclass(frozen=True)
class TorchMode:
    """The mode in which this thread calls the model. It is taken at the call: the step has others of its own, and
    words about the call may be asked for while the step runs."""

    gradients: bool
    autocast: str

    @classmethod
    def now(cls, device: torch.device) -> TorchMode:
        """The present one."""
        return cls(torch.is_grad_enabled(), autocast_state(device.type))


def calling_text(
    model: nn.Module,
    called: Any,
    torch_mode: TorchMode,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    why: str = "",
) -> str:
    """Mode of the model and of torch, then the batch; ``why`` no plan fits, if one is looked for."""
    modules = [m.training for m in model.modules()]
    mode = "train mode" if all(modules) else "eval mode"
    if any(modules) and not all(modules):
        mode = f"{sum(modules)} of {len(modules)} modules in train mode, the others in eval mode"
    frozen = sum(not p.requires_grad for p in model.parameters())
    parts = [mode, f"gradients {'on' if torch_mode.gradients else 'off'}"]
    if frozen:
        parts.append(f"{frozen} parameters frozen")
    if torch_mode.autocast:
        parts.append(f"autocast {torch_mode.autocast}")
    names = argument_names(called, args)
    for path, value in (*((f"args[{i}]", a) for i, a in enumerate(args)), *kwargs.items()):
        leaves = flatten(value)[0]
        parts.append(f"{spoken(path, names)} {', '.join(map(_leaf, leaves[:_MOST_LEAVES]))}")
    if why:
        parts.append(f"for which there is no plan yet: {why}")
    return "; ".join(parts)


def changing(guards: Iterable[Guard]) -> list[str]:
    """What of Python is not the same in all the plans that were made and now, with its value now."""
    known: dict[str, set[str]] = {}
    now: dict[str, str] = {}
    for guard in guards:
        for name, was, value in guard.values():
            known.setdefault(name, set()).add(was)
            now[name] = value
    return [f"{name} is {now[name][:80]}" for name, was in known.items() if was != {now[name]}][:_MOST_LEAVES]


def _leaf(leaf: Any) -> str:
    if isinstance(leaf, torch.Tensor):
        return f"{dtype_name(leaf.dtype)}{list(leaf.shape)}"
    return repr(leaf)[:80]
