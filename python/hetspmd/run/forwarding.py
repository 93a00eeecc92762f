"""Attributes of the model that are looked for on HAP, and state dicts whose keys begin with ``module.``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present


def forwards(wrapper: nn.Module, name: str) -> bool:
    """Whether ``name`` is an attribute of ``wrapper.module`` and not of the wrapper."""
    own = wrapper.__dict__
    module = own.get("_modules", {}).get("module")
    if module is None or name.startswith("__") or name in own or hasattr(type(wrapper), name):
        return False
    if any(name in own[kind] for kind in ("_parameters", "_buffers", "_modules")):
        return False
    return hasattr(module, name)


def without_prefix(state: Mapping[str, Any], module: nn.Module) -> Mapping[str, Any]:
    """``state`` with the keys of ``module``, where the wrapper's ``module.`` stands in front of them."""
    if not isinstance(state, dict):
        return state
    names = {name for name, _ in (*module.named_parameters(remove_duplicate=False), *module.named_buffers())}
    inside = sum(key.removeprefix("module.") in names for key in state if key.startswith("module."))
    if inside <= sum(key in names for key in state):
        return state
    entries = state.copy()
    if (versions := getattr(state, "_metadata", None)) is not None:
        entries._metadata = dict(versions)  # type: ignore[attr-defined]  # as torch's own state dicts have it
    consume_prefix_in_state_dict_if_present(entries, "module.")
    return entries
