"""Who else holds a model's parameters when it is wrapped: optimizers that have state, modules outside, another HAP.

Looking at every object of the process takes a tenth of a second, so that it is done only where a parameter has more
references than its own modules explain.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Mapping

import torch
from torch import nn

from hetspmd.errors import ShardError
from hetspmd.lower.local_program import LocalTensor
from hetspmd.run.instances import instances
from hetspmd.run.loaded_states import LoadedStates
from hetspmd.run.parameter_registry import living
from hetspmd.run.shards import marked


def check_unwrapped(model: nn.Module) -> None:
    """Raise ShardError if a HAP module has the model, or a part of it, already."""
    mine = {id(p): name for name, p in model.named_parameters()}
    for name, parameter in model.named_parameters():
        if (mark := marked(parameter)) is not None:
            raise ShardError(
                f"parameter {name} is a shard of another HAP module ({mark.name} there). One HAP serves every "
                "batch and mode, train() and eval(); for a second one build the model anew, or, on every rank: "
                "model = hap.full_module()"
            )
    for again in (False, True):
        shared = [mine[id(p)] for hap in living() for p in hap.module.parameters() if id(p) in mine]
        if not shared:
            return
        if not again:
            gc.collect()  # a module that was dropped may still be waiting for it
    raise ShardError(
        f"parameter {shared[0]} belongs to a HAP module already, which would be left with shards that its plan "
        "does not know. One HAP serves every batch and mode, train() and eval(); for a second one wrap a "
        "copy.deepcopy of the model, made before HAP(...)"
    )


class Holders:
    """Modules outside of the model that have parameters of it, with their names in the model by attribute, and
    optimizers that have some."""

    def __init__(self) -> None:
        self.modules: list[tuple[nn.Module, dict[str, str]]] = []
        self.optimizers: list[torch.optim.Optimizer] = []


def held_elsewhere(model: nn.Module) -> Holders:
    """Who holds parameters of the model besides its own modules."""
    holders = Holders()
    if not _more_references(model):
        return holders
    names = {id(p): name for name, p in model.named_parameters()}
    own = {id(module) for module in model.modules()}
    for thing in instances(nn.Module, torch.optim.Optimizer):
        if isinstance(thing, torch.optim.Optimizer):
            groups = getattr(thing, "param_groups", [])
            if any(id(p) in names for group in groups for p in group["params"]):
                holders.optimizers.append(thing)
        elif id(thing) not in own:
            slots = thing.__dict__.get("_parameters") or {}
            shared = {leaf: names[id(p)] for leaf, p in slots.items() if id(p) in names}
            if shared:
                holders.modules.append((thing, shared))
    return holders


def _more_references(model: nn.Module) -> bool:
    """Whether something besides the modules' own slots refers to a parameter."""
    alone = {"": nn.Parameter(torch.empty(0))}
    expected = sys.getrefcount(alone[""])
    slots = [
        (m._parameters, leaf) for m in model.modules() for leaf, p in m._parameters.items() if p is not None
    ]
    counted: dict[int, int] = {}
    for parameters, leaf in slots:
        counted[id(parameters[leaf])] = counted.get(id(parameters[leaf]), 0) + 1
    return any(
        sys.getrefcount(parameters[leaf]) > expected + counted[id(parameters[leaf])] - 1
        for parameters, leaf in slots
    )


def localize_state(
    optimizer: torch.optim.Optimizer, layouts: Mapping[int, tuple[str, LocalTensor]], states: LoadedStates
) -> None:
    """Leave this rank's part of what an optimizer remembers of parameters, by their ``id``, in whole shapes; all of
    it is added to ``states``."""
    for parameter, state in optimizer.state.items():
        name, layout = layouts.get(id(parameter), ("", None))
        if layout is None or not isinstance(state, dict):
            continue
        states.add(optimizer, name, state)
        if layout.region is None:
            continue
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and tuple(value.shape) == layout.shape and layout.shape:
                state[key] = layout.slice(value).to(parameter.device, copy=True).contiguous()
