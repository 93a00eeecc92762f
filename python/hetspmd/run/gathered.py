"""State dicts that gather: ``hap.state_dict()`` and ``optimizer.state_dict()`` with whole tensors.

Shards are refused unless ``HAP(..., gather_state=True)`` says that every rank makes these calls. Then loops that
save by themselves (Trainer, Accelerate, Lightning) save and resume as on one device.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from hetspmd.run.module import HAP

__all__ = ["add_module", "gathered_state"]


def gathered_state(hap: HAP, destination: dict[str, Any] | None, prefix: str) -> dict[str, Any]:
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


def add_module(hap: HAP, state: dict[str, Any], prefix: str) -> None:
    """Let a module that holds ``hap`` load the single-device model's keys, which lack the ``module.`` between them.

    ``state`` is changed; its keys behind ``prefix`` are those of ``hap``.
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
