"""Attributes of the model that are looked for on HAP, and state dicts whose keys begin with ``module.``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from torch import nn
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present

from hetspmd.run.shards import FULL

_CHECKPOINT: Final = "torch.distributed.checkpoint.state_dict"
_LIBRARIES: Final = frozenset(
    (
        "accelerate",
        "diffusers",
        "lightning",
        "lightning_fabric",
        "peft",
        "pytorch_lightning",
        "transformers",
        "trl",
    )
)
"""Packages that run loops over a model of the user's."""


def forwards(wrapper: nn.Module, name: str) -> bool:
    """Whether ``name`` is an attribute of ``wrapper.module`` and not of the wrapper."""
    own = wrapper.__dict__
    module = own.get("_modules", {}).get("module")
    if module is None or name.startswith("__") or name in own or hasattr(type(wrapper), name):
        return False
    if any(name in own[kind] for kind in ("_parameters", "_buffers", "_modules")):
        return False
    return hasattr(module, name)


def attribute_of_the_model(name: str, caller: str) -> str:
    """What to say where HAP is asked for an attribute that its model has, by a function of the module ``caller``: a
    library's is not the user's to change."""
    own = f"HAP has no attribute {name!r}; the model has"
    if caller.startswith(_CHECKPOINT):
        return (
            f"{own}, and {_CHECKPOINT} takes models apart by such names. Write, on every rank, "
            'state = {"model": hap.full_state_dict(), "optimizer": hetspmd.full_optimizer_state_dict(hap, '
            "optimizer)}, which torch.distributed.checkpoint saves and loads, and load each part with "
            "hap.load_full_state_dict and hetspmd.load_full_optimizer_state_dict"
        )
    if caller.partition(".")[0] in _LIBRARIES:
        return (
            f"{own}, and {caller} reads it there, for an option that works on the model itself. Leave the option "
            "out, and do what it does before HAP(...): model.gradient_checkpointing_enable(), a hook or an adapter "
            "on the model; another loss, with label smoothing for example, is HAP(..., loss=...)"
        )
    return f"{own}: write hap.module.{name}. Methods that compute need whole parameters: {FULL}; then model.{name}"


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
