"""State dicts that gather: ``hap.state_dict()`` and ``optimizer.state_dict()`` with whole tensors.

Shards are refused unless ``HAP(..., gather_state=True)`` says that every rank makes these calls. Then loops that
save by themselves (Trainer, Accelerate, Lightning) save and resume as on one device.
"""

from __future__ import annotations

import functools
import threading
from collections import OrderedDict
from contextvars import ContextVar
from typing import Any, Protocol

import torch
from torch import nn

from hetspmd.run.parameter_registry import living

_LOCK = threading.Lock()
_REACHED: list[Any] = []
"""torch's own method, once it was replaced."""
_VERSIONS: ContextVar[dict[str, Any] | None] = ContextVar("hetspmd_versions", default=None)
"""The versions of the classes (``_metadata``) in the state dict that a module that holds a HAP is loading."""


class HasWholeState(Protocol):
    """A HAP module to functions that write and read its state."""

    module: nn.Module

    def full_state_dict(self) -> dict[str, Any]:
        """The single-device model's state dict."""


def reach_loading() -> None:
    """Let ``Module.load_state_dict`` give the versions in a state dict to what HAP modules inside wrap.

    torch looks for the version of a module under its path, in which ``module.`` stands behind that of a HAP.
    Without it a class that changes old state dicts (``_version``) would take a new one for an old one.
    """
    with _LOCK:
        if _REACHED:
            return
        load = nn.Module.load_state_dict
        _REACHED.append(load)

        @functools.wraps(load)
        def load_state_dict(self: nn.Module, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
            versions = getattr(state_dict, "_metadata", None)
            if versions is None or not _holds(self):
                return load(self, state_dict, *args, **kwargs)
            state = OrderedDict(state_dict)
            metadata = state._metadata = dict(versions)  # type: ignore[attr-defined]  # as torch's own state dicts have it
            token = _VERSIONS.set(metadata)
            try:
                return load(self, state, *args, **kwargs)
            finally:
                _VERSIONS.reset(token)

        nn.Module.load_state_dict = load_state_dict  # type: ignore[method-assign]  # on purpose


def _holds(module: nn.Module) -> bool:
    """Whether a HAP module is in the module."""
    ids = {id(hap) for hap in living()}
    return bool(ids) and any(id(part) in ids for part in module.modules())


def gathered_state(hap: HasWholeState, destination: dict[str, Any] | None, prefix: str) -> dict[str, Any]:
    """The single-device model's state dict, its keys behind ``prefix``; every rank must call this.

    No two tensors share memory, also where parameters are tied: the writers of safetensors files want it so.
    """
    whole = hap.full_state_dict()
    if destination is None:
        destination = OrderedDict()
        destination._metadata = OrderedDict()  # type: ignore[attr-defined]  # as torch's own state dicts have it
    seen: set[int] = set()
    for key, value in whole.items():
        if isinstance(value, torch.Tensor) and value.numel():
            memory = value.untyped_storage().data_ptr()
            value = value.clone() if memory in seen else value
            seen.add(memory)
        destination[prefix + key] = value
    versions = getattr(destination, "_metadata", None)
    if versions is not None:
        for path, version in getattr(whole, "_metadata", {}).items():
            versions[prefix + path if path else prefix.removesuffix(".")] = version
    return destination


def add_module(hap: HasWholeState, state: dict[str, Any], prefix: str) -> None:
    """Let a module that holds ``hap`` load the single-device model's keys, which lack the ``module.`` between them.

    ``state`` is changed; its keys behind ``prefix`` are those of ``hap``. So are the paths of the versions with it.
    """
    wrapped = hap.module
    names = {
        name for name, _ in (*wrapped.named_parameters(remove_duplicate=False), *wrapped.named_buffers())
    }
    own = [key.removeprefix(prefix) for key in state if key.startswith(prefix)]
    through = sum(key.startswith("module.") and key.removeprefix("module.") in names for key in own)
    if sum(key in names for key in own) <= through:
        return
    for key in own:
        state[f"{prefix}module.{key}"] = state.pop(prefix + key)
    versions = _VERSIONS.get()
    if versions is not None:
        inside = f"{prefix}module"
        moved = {f"{inside}.{p.removeprefix(prefix)}": v for p, v in versions.items() if p.startswith(prefix)}
        if (path := prefix.removesuffix(".")) in versions:
            moved[inside] = versions[path]
        versions.update({p: dict(v) for p, v in moved.items()})
