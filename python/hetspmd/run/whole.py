"""The single-device model out of shards: its state dict, and a copy that can be called, saved and copied.

For a state dict whole tensors take the place of the shards for a moment, so that the model makes it itself: in its
own order, with its versions, extra state and the hooks of its modules, which see what they would see on one device.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from hetspmd.dist.doings import Loaded
from hetspmd.dist.runtime import Runtime
from hetspmd.run.loading import local_state
from hetspmd.run.shards import parameter_like
from hetspmd.run.store import Store
from hetspmd.trace.host.plain import tensors_in


def full_state_dict(store: Store, runtime: Runtime, *, keep: bool) -> dict[str, Any]:
    """The single-device model's state dict, on the CPU. Every rank must call this, with the sentry lifted.

    ``keep``: whether this rank wants it; the others get an empty dict.
    """
    whole = _gathered(store, runtime, torch.device("cpu"), keep=keep)
    if not keep:
        return {}
    with _in_place(store.module, whole):
        return store.module.state_dict()


def full_module(store: Store, runtime: Runtime, device: torch.device) -> nn.Module:
    """A single-device copy of the model on ``device``. Every rank must call this, with the sentry lifted."""
    whole = _gathered(store, runtime, device, keep=True)
    return copied(store.module, whole)


def copied(
    model: nn.Module, tensors: Mapping[int, torch.Tensor], memo: dict[int, Any] | None = None
) -> nn.Module:
    """A deep copy of the model with ``tensors`` in the place of its parameters and buffers, by their ``id``.

    Tensors of an autograd graph that modules keep from an earlier call (the weight of a ``weight_norm`` hook, a
    last activation) are copied by value.
    """
    memo = {} if memo is None else memo
    memo.update(tensors)
    for module in model.modules():
        for tensor in tensors_in(vars(module)):
            if not tensor.is_leaf:
                memo.setdefault(id(tensor), tensor.detach().clone())
    return copy.deepcopy(model, memo)


def load_full_state_dict(store: Store, state: Mapping[str, Any], loaded: Loaded, *, strict: bool) -> Any:
    """Load a single-device state dict; returns torch's report of missing and unexpected keys. ``loaded`` is told of
    what there is.

    Tensors are cut when they are read, unless hooks or methods of the model's own change a state dict while it is
    loaded: they are given whole tensors, and the sentry cuts what they leave. Raises RuntimeError for wrong keys or
    shapes, as ``Module.load_state_dict`` does.
    """
    entries = dict(state) if _changes_states(store.module) else local_state(state, store.shards, loaded)
    for key, value in entries.items():
        loaded.add(key, value)
    local = OrderedDict(entries)
    if (versions := getattr(state, "_metadata", None)) is not None:
        local._metadata = versions  # type: ignore[attr-defined]  # as torch's own state dicts have it
    return store.module.load_state_dict(local, strict=strict)


def _changes_states(model: nn.Module) -> bool:
    """Whether a hook or a method that is not torch's may change a state dict while it is loaded."""
    for module in model.modules():
        loading = type(module)._load_from_state_dict, type(module).load_state_dict
        own = any(not function.__module__.startswith("torch.nn.") for function in loading)
        hooks = module._load_state_dict_pre_hooks.values()
        if own or any(not type(getattr(h, "hook", h)).__module__.startswith("hetspmd.") for h in hooks):
            return True
    return False


def _gathered(store: Store, runtime: Runtime, device: torch.device, *, keep: bool) -> dict[int, torch.Tensor]:
    """Whole copies on ``device`` of all parameters and buffers, by ``id``, in the strides of the model."""
    copies: dict[int, torch.Tensor] = {}
    with torch.no_grad():
        for name, tensor in (*store.module.named_parameters(), *store.module.named_buffers()):
            if id(tensor) in copies:
                continue
            whole = store.whole_of(runtime, name, tensor.detach())
            if not keep:
                continue
            values = _laid_out(whole, store.strides_of(name), device)
            if isinstance(tensor, nn.Parameter):
                values = parameter_like(values, tensor)
            copies[id(tensor)] = values
    return copies


def _laid_out(whole: torch.Tensor, strides: tuple[int, ...] | None, device: torch.device) -> torch.Tensor:
    """A copy on ``device`` in these strides, if they leave no gaps and no element is another's."""
    if strides is None or strides == whole.stride():
        return whole.to(device, copy=True)
    target = torch.empty_strided(whole.shape, strides, dtype=whole.dtype, device=device)
    dense = torch.empty_like(target, memory_format=torch.preserve_format).stride() == strides
    return target.copy_(whole) if dense else whole.to(device, copy=True)


@contextmanager
def _in_place(model: nn.Module, tensors: Mapping[int, torch.Tensor]) -> Iterator[None]:
    """Within the context ``tensors`` are in the place of the parameters and buffers with these ``id``."""
    saved: list[tuple[dict[str, Any], dict[str, Any]]] = []
    try:
        for module in model.modules():
            for slots in (module._parameters, module._buffers):
                saved.append((slots, dict(slots)))
                slots.update({n: tensors[id(t)] for n, t in slots.items() if t is not None})  # type: ignore[misc]  # nn.Module's two dicts
        yield
    finally:
        for slots, before in saved:
            slots.update(before)
