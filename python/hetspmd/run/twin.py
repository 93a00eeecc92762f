"""A second HAP module in the same shards: what ``copy.deepcopy(hap)`` is.

Every tensor of the copy lies as its original does, so that what is elementwise between the two (an exponential
moving average, a target network, stochastic weight averaging) is what it is on one device. The two have their
plans, communicators and random numbers in common; a copy sends nothing.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from hetspmd.run.beside import HostSide
from hetspmd.run.entry import Entry
from hetspmd.run.known_parameters import KnownParameters
from hetspmd.run.plan_cache import PlanCache
from hetspmd.run.shards import attributes, divided, mark, marked, parameter_like
from hetspmd.run.store import Slot, Store
from hetspmd.run.whole import copied


def twin_model(store: Store, memo: dict[int, Any]) -> nn.Module:
    """A deep copy of the wrapped model, shards included, with the sentry lifted."""
    tensors: dict[int, torch.Tensor] = {}
    for parameter in store.module.parameters():
        if marked(parameter) is not None:
            twin = parameter_like(parameter.detach().clone(), parameter)
            twin.__dict__.update(copy.deepcopy(attributes(parameter), memo))
            tensors[id(parameter)] = twin
    model = copied(store.module, tensors, memo)
    for name, parameter in model.named_parameters():
        layout = store.shards.get(name)
        if layout is not None and divided(layout):
            mark(parameter, name, layout)
    return model


def twin_attributes(
    attributes: Mapping[str, Any], own: Collection[str], memo: dict[int, Any]
) -> dict[str, Any]:
    """The attributes of the copy of a HAP module, of which ``own`` were made by HAP itself: they are shared.

    What others have set (hooks, a ``forward`` in front of HAP's, numbers) is copied as ``copy.deepcopy`` of any
    module copies it: methods of the module are then methods of the copy. ``memo`` knows the copies of the module
    and of the model.
    """
    return {name: value if name in own else copy.deepcopy(value, memo) for name, value in attributes.items()}


def twin_store(store: Store, model: nn.Module) -> Store:
    """The store of the copied ``model``."""
    twin = copy.copy(store)
    twin.module = model
    return twin


def twin_plans(plans: PlanCache, store: Store) -> PlanCache:
    """The same plans for the model whose ``store`` is given."""
    setting = replace(plans.setting, model=store.module)
    here = dict(zip(plans.setting.model.modules(), setting.model.modules(), strict=True))

    def moved(slots: list[Slot]) -> list[Slot]:
        return [(here[module], leaf) for module, leaf in slots]

    def entry(of: Entry) -> Entry:
        names, slots = [p.name for p in of.plan.graph.parameters], moved(of.parameters)
        parameters = KnownParameters(setting.model, names, slots, store.shards)
        served = twin.host.moved(of.served, plans.host.structure())
        return replace(
            of, parameters=slots, buffers=moved(of.buffers), known_parameters=parameters, served=served
        )

    twin = copy.copy(plans)
    twin.setting, twin.store, twin.host = setting, store, HostSide(setting)
    twin.entries = [entry(of) for of in plans.entries]
    return twin
