"""In which mode and on what a model is called, in words, for ranks that do not call it alike."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hetspmd.trace.admissible import argument_names, spoken
from hetspmd.trace.autocast import autocast_state
from hetspmd.trace.compat.trees import flatten
from hetspmd.trace.host.places import NOTHING, text
from hetspmd.trace.host.plain import fingerprint
from hetspmd.trace.values import dtype_name

if TYPE_CHECKING:
    from hetspmd.run.host_guard import Guard
    from hetspmd.run.setting import Mode
    from hetspmd.trace.host.facts import Read

_MOST_LEAVES = 12
"""Leaves of an argument that a message names: more make it unreadable."""
_MOST_DIFFERENCES = 3
"""Values that are others than in the trace, of which a message tells."""
_LONGEST = 80
"""Characters of the text of a value in a message."""


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
    values: dict[str, set[str]] = {}
    now: dict[str, str] = {}
    for guard in guards:
        for name, was, value in guard.values():
            values.setdefault(name, set()).add(was)
            now[name] = value
    return [f"{name} is {now[name][:80]}" for name, was in values.items() if was != {now[name]}][
        :_MOST_LEAVES
    ]


def parted(model: nn.Module, mode: Mode, states: Sequence[tuple[Mode, Guard]]) -> str:
    """What of a model is not as in ``states``, in which plans for the present batch serve."""
    if not states:
        return "there is no plan for the batch"
    guards = [guard for state_mode, guard in states if state_mode == mode]
    if not guards:
        return _modes(model, states[-1][0], mode)
    differences = [_difference(read, value) for read, value in guards[-1].differences()[:_MOST_DIFFERENCES]]
    return "; ".join(differences) or "gradients are on, or each step is planned anew"


def _modes(model: nn.Module, before: Mode, now: Mode) -> str:
    """What is not the same in two modes of a model."""
    if before[3] != now[3]:
        return "submodules, hooks or parameters of the model are others than before"
    modules = [f"module {name}" if name else "the model" for name, _ in model.named_modules()]
    parameters = [f"parameter {name}" for name, _ in model.named_parameters()]
    parts = _turned(modules, before[0], now[0], ("in train mode", "in eval mode"))
    parts += _turned(parameters, before[1], now[1], ("trained", "frozen"))
    if before[2] != now[2]:
        parts.append(f"autocast is {now[2] or 'off'} and was {before[2] or 'off'}")
    return "; ".join(parts)


def _turned(
    names: Sequence[str], before: Sequence[bool], now: Sequence[bool], states: tuple[str, str]
) -> list[str]:
    """The first of these that is on now and was off, or the other way, with the number of others."""
    indices = [i for i, (a, b) in enumerate(zip(before, now, strict=True)) if a != b]
    if not indices:
        return []
    others = f" (and {len(indices) - 1} more)" if len(indices) > 1 else ""
    is_, was = states if now[indices[0]] else states[::-1]
    return [f"{names[indices[0]]}{others} is {is_} and was {was}"]


def _difference(read: Read, value: object) -> str:
    """A value that forward reads, which is another one than in the trace."""
    was, now = (
        _without_values(read.value),
        "missing" if value is NOTHING else _without_values(fingerprint(value)),
    )
    name = text(read.root, read.path)
    return f"{name} has other values" if was == now else f"{name} was {was} and is {now}"


def _without_values(fingerprint: str) -> str:
    """The text of a value, of a tensor without the digest of its elements."""
    return re.sub(r"(tensor \w+\[[\d, ]*\]) \d+", r"\1", fingerprint)[:_LONGEST]


def _leaf(leaf: Any) -> str:
    if isinstance(leaf, torch.Tensor):
        return f"{dtype_name(leaf.dtype)}{list(leaf.shape)}"
    return repr(leaf)[:80]
