"""An optimizer's state as one device has it: gathered from the shards, and cut into shards again.

An elementwise optimizer keeps, for a parameter, tensors of the parameter's shape (moments), tensors of one number
(the count of steps) and plain values. The first lie in the same shards as the parameter, the others are the same on
every rank. What is none of these cannot be gathered of a parameter in shards, and is refused by name; of one that
every active rank stores whole it is whole there, too (Adafactor's means of rows, what LBFGS has seen). An idle rank
has nothing to remember of those.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from hetspmd.dist.doings import Loaded
from hetspmd.errors import OptimizerError
from hetspmd.placement import is_sharded
from hetspmd.run.elementwise import ELEMENTWISE
from hetspmd.run.loaded_states import LoadedStates, unlike_states
from hetspmd.run.parameter_registry import ParameterPlace, ShardedModule, optimizer_parameters, places

if TYPE_CHECKING:
    from hetspmd.lower import LocalTensor

_OWN: ContextVar[bool] = ContextVar("hetspmd_own_optimizer_state", default=False)
"""Whether ``optimizer.state_dict()`` is called from here, where shards are what is wanted."""


@dataclass(frozen=True)
class _Entry:
    """What a rank tells the others of one entry of a parameter's state.

    ``alike``: it is a tensor of the local parameter's shape; ``one``: it is a single number or no tensor, and
    ``value`` has it. A tensor of one number may be both.
    """

    alike: bool
    one: bool
    shape: tuple[int, ...]
    dtype: torch.dtype | None
    value: Any


def full_optimizer_state_dict(
    hap: ShardedModule, optimizer: torch.optim.Optimizer, *, rank0_only: bool = False
) -> dict[str, Any]:
    """The state dict of the single-device optimizer, in whole tensors on the CPU. Every rank must call this.

    It has the form of ``optimizer.state_dict()``. A single-device optimizer over the same parameters in the
    same order loads it, and so does :func:`load_full_optimizer_state_dict` on any cluster. Whole state that
    was loaded since the last step is cut to shards first.

    Args:
        hap: The HAP module.
        optimizer: It may also hold parameters of other HAP modules, and parameters of none, whose state is
            this rank's.
        rank0_only: The other ranks get an empty dict.

    Raises:
        OptimizerError: The optimizer has no parameters of ``hap``, or holds state that has neither the
            parameter's shape nor one element, or whole state that is not the same on every rank. Raised on
            every rank.
    """
    registry = _known(hap, optimizer)
    hap.meet("full_optimizer_state_dict()")
    with own_state():
        local = optimizer.state_dict()
    local = {**local, "state": _cut_on_all(hap, optimizer, registry, local["state"])}
    keep = not rank0_only or hap.rank == 0
    state: dict[Any, Any] = {}
    listed = optimizer_parameters(optimizer)
    by_module: dict[int, tuple[ShardedModule, dict[int, str]]] = {}
    for index, parameter in enumerate(listed):
        place = registry.get(id(parameter))
        if place is not None:
            by_module.setdefault(id(place.module), (place.module, {}))[1][index] = place.name
    for module, names in by_module.values():
        state.update(_gathered(module, names, local["state"], listed, type(optimizer).__name__, keep=keep))
    for key, value in local["state"].items():
        if not isinstance(key, int) or id(listed[key]) not in registry:
            state[key] = _on_cpu(value)
    if not keep:
        return {}
    order = {key: i for i, key in enumerate(local["state"])}
    ordered = sorted(state, key=lambda key: (order.get(key, len(order)), str(key)))
    groups = [_on_cpu(group) for group in local["param_groups"]]
    rest = {k: _on_cpu(v) for k, v in local.items() if k not in ("state", "param_groups")}
    return {"state": {key: state[key] for key in ordered}, "param_groups": groups, **rest}


def load_full_optimizer_state_dict(
    hap: ShardedModule, optimizer: torch.optim.Optimizer, state_dict: Mapping[str, Any]
) -> None:
    """Load a single-device optimizer's state dict into this rank's shards, without communication.

    Every rank must load the same state: what the ranks have loaded is compared at the next step, where
    ParameterMismatchError is raised if it is not. Nothing is changed where an error is raised.

    Args:
        hap: The HAP module.
        optimizer: An optimizer over its parameters.
        state_dict: From :func:`full_optimizer_state_dict` on any cluster, or from ``optimizer.state_dict()``
            on one device, with the parameters in the same order.

    Raises:
        OptimizerError: The optimizer has no parameters of ``hap``, or a tensor has another shape; the message
            names the parameter.
        ValueError: The parameter groups differ, as in ``Optimizer.load_state_dict``.
    """
    registry = _known(hap, optimizer)
    listed = optimizer_parameters(optimizer)
    told = _Told(optimizer)
    saved = [index for group in state_dict["param_groups"] for index in group["params"]]
    state: dict[Any, Any] = dict(state_dict["state"])
    for index, parameter in zip(saved, listed, strict=False):  # torch compares their numbers
        place = registry.get(id(parameter))
        if place is not None and index in state:
            told.add(place, state[index])
            layout = place.module.parameter_shards().get(place.name)
            if _is_of_a_whole(optimizer, state[index], layout):
                state[index] = copy.deepcopy(state[index])  # an idle rank drops it at the next step
                continue
            state[index] = {
                key: _part(value, layout, parameter, key, place.name, optimizer)
                for key, value in state[index].items()
            }
    optimizer.load_state_dict({**state_dict, "state": state})
    told.say()


class _Told:
    """What is loaded into an optimizer is said to the other ranks: no rank has what another one loads."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._kind = type(optimizer).__name__
        self._loaded: dict[int, tuple[ShardedModule, Loaded]] = {}

    def add(self, place: ParameterPlace, entries: Mapping[str, Any]) -> None:
        """Whole state of a parameter."""
        _, loaded = self._loaded.setdefault(id(place.module), (place.module, Loaded(self._kind)))
        for key, value in entries.items():
            loaded.add(f"{key} of {place.name}", value)

    def say(self) -> None:
        """It is loaded."""
        for module, loaded in self._loaded.values():
            if loaded.keys:
                module.did(loaded.doing())


def cut_whole_state(optimizer: torch.optim.Optimizer, registry: Mapping[int, ParameterPlace]) -> LoadedStates:
    """Cut to this rank's shards what state of sharded parameters is whole, in place; what that was.

    So it is of an optimizer that was made, stepped or loaded as on one device. Raises OptimizerError for state of
    another shape.
    """
    whole = LoadedStates()
    for parameter, entries in list(optimizer.state.items()):
        if not isinstance(parameter, torch.Tensor) or not isinstance(entries, dict):
            continue
        place = registry.get(id(parameter))
        layout = None if place is None else place.module.parameter_shards().get(place.name)
        if layout is not None and layout.region is not None and _is_of_a_whole(optimizer, entries, layout):
            del optimizer.state[parameter]  # an idle rank has nothing of it
            continue
        entries.update(_cut(entries, parameter, place, optimizer, whole))
    return whole


def _cut(
    entries: Mapping[str, Any],
    parameter: torch.Tensor,
    place: ParameterPlace | None,
    optimizer: torch.optim.Optimizer,
    whole: LoadedStates,
) -> dict[str, Any]:
    """This rank's parts of those entries that are whole, which are added to ``whole``. Raises OptimizerError for
    one of another shape."""
    layout = None if place is None else place.module.parameter_shards().get(place.name)
    if place is None or layout is None or layout.region is None:
        return {}
    if _is_of_a_whole(optimizer, entries, layout):
        return {}
    parts: dict[str, Any] = {}
    for key, value in entries.items():
        if not isinstance(value, torch.Tensor) or value.shape == parameter.shape:
            continue
        if value.numel() == 1 and (key == "step" or tuple(value.shape) != layout.shape):
            continue
        parts[key] = _part(value, layout, parameter, key, place.name, optimizer)
    whole.add(optimizer, place.name, {key: entries[key] for key in parts})
    return parts


def _cut_on_all(
    hap: ShardedModule,
    optimizer: torch.optim.Optimizer,
    registry: Mapping[int, ParameterPlace],
    state: Mapping[Any, Any],
) -> dict[Any, Any]:
    """The ``state`` of this rank's shards. The optimizer's own is left as it is: one that was never stepped has no
    hooks yet that would gather shards. Every rank raises what one of them raises."""
    cut_state, problem, whole = dict(state), "", LoadedStates()
    try:
        for index, parameter in enumerate(optimizer_parameters(optimizer)):
            if isinstance(entries := state.get(index), dict):
                place = registry.get(id(parameter))
                cut_state[index] = entries | _cut(entries, parameter, place, optimizer, whole)
    except OptimizerError as error:
        problem = str(error)
    problems, digests = zip(*hap.everyone.exchange((problem, whole.digests)), strict=True)
    first = next(filter(None, problems), "") or unlike_states(digests)
    if first:
        raise OptimizerError(first)
    return cut_state


@contextmanager
def own_state() -> Iterator[None]:
    """Within the context ``optimizer.state_dict()`` gives this rank's shards."""
    token = _OWN.set(True)
    try:
        yield
    finally:
        _OWN.reset(token)


def is_own() -> bool:
    """Whether :func:`own_state` surrounds the caller."""
    return _OWN.get()


def _known(hap: ShardedModule, optimizer: torch.optim.Optimizer) -> dict[int, ParameterPlace]:
    registry = places()
    if not any(id(p) in registry and registry[id(p)].module is hap for p in optimizer_parameters(optimizer)):
        raise OptimizerError(
            f"{type(optimizer).__name__} has no parameters of this HAP module; make it with hap.parameters(), "
            "after HAP(...) if the model was on the meta device"
        )
    return registry


def _gathered(
    module: ShardedModule,
    names: Mapping[int, str],
    state: Mapping[Any, Any],
    listed: list[torch.Tensor],
    kind: str,
    *,
    keep: bool,
) -> dict[int, dict[str, Any]]:
    """The whole state of the parameters of one module by their place in the optimizer, a ``kind``."""
    own = {index: _told(state.get(index, {}), listed[index], kind, names[index]) for index in names}
    everyone: list[dict[int, tuple[bool, dict[str, _Entry]]]] = module.everyone.exchange(own)
    states: dict[int, dict[str, Any]] = {}
    whole_of: dict[tuple[int, str], Any] = {}
    for index, name in names.items():
        layout = module.parameter_shards().get(name)
        undivided = layout is None or not is_sharded(layout.form)
        for key, entry in everyone[module.source][index][1].items():
            told = [(empty, entries.get(key)) for empty, entries in (rank[index] for rank in everyone)]
            if _is_one(key, told):
                whole = _on_cpu(entry.value)  # ranks in one process are told the same tensor
            elif undivided and not entry.alike:
                whole = whole_of[index, key] = _on_cpu(state.get(index, {}).get(key))
            else:
                _check_alike(told, f"{key!r} of {kind} for {name}")
                value = state.get(index, {}).get(key)
                if value is None:
                    value = torch.empty(listed[index].shape, dtype=entry.dtype)
                part = {name: value.to(module.device)}
                whole = module.gather(part, within="full_optimizer_state_dict()")[name]
                whole = whole.to("cpu", copy=True) if keep else None
            states.setdefault(index, {})[key] = whole
    if whole_of and module.plan.idle:  # idle ranks have none
        told_whole = module.everyone.exchange(whole_of if module.rank == module.source else {})[module.source]
        for (index, key), value in told_whole.items():
            states[index][key] = value
    return states


def _is_of_a_whole(
    optimizer: torch.optim.Optimizer, entries: Mapping[str, Any], layout: LocalTensor | None
) -> bool:
    """Whether these are entries of a parameter that is stored whole, by an optimizer that is not elementwise: some
    may have any shape."""
    if type(optimizer) in ELEMENTWISE or layout is None or is_sharded(layout.form):
        return False
    return any(
        _has_tensors(value)
        and not (
            isinstance(value, torch.Tensor) and (value.numel() == 1 or tuple(value.shape) == layout.shape)
        )
        for value in entries.values()
    )


def _told(
    entries: Mapping[str, Any], parameter: torch.Tensor, kind: str, name: str
) -> tuple[bool, dict[str, _Entry]]:
    """Whether the rank has no element of the parameter, and its state."""
    told = {}
    for key, value in entries.items():
        if isinstance(value, torch.Tensor):
            one = value.numel() == 1
            shape = tuple(value.shape)
            told[key] = _Entry(
                value.shape == parameter.shape, one, shape, value.dtype, _on_cpu(value) if one else None
            )
        else:
            told[key] = _Entry(False, not _has_tensors(value), (), None, value)
    return parameter.numel() == 0, told


def _is_one(key: str, told: list[tuple[bool, _Entry | None]]) -> bool:
    """Whether an entry is the same on every rank: one number, or no tensor."""
    entries = [entry for _, entry in told if entry is not None]
    if not all(entry.one for entry in entries):
        return False
    return key == "step" or any(not entry.alike for entry in entries)


def _check_alike(told: list[tuple[bool, _Entry | None]], what: str) -> None:
    for rank, (empty, entry) in enumerate(told):
        if entry is None and not empty:
            raise OptimizerError(
                f"rank {rank} has no {what}; every rank must step the optimizer in the same steps"
            )
        if entry is not None and not entry.alike:
            raise OptimizerError(
                f"{what} is neither of the parameter's shape nor one number: on rank {rank} it is of shape "
                f"{list(entry.shape)}, so that it is not known which part of it a shard is"
            )


def _part(
    value: Any,
    layout: LocalTensor | None,
    parameter: torch.Tensor,
    key: str,
    name: str,
    optimizer: torch.optim.Optimizer,
) -> Any:
    """This rank's part of an entry of whole state."""
    if not isinstance(value, torch.Tensor):
        return value
    shape = tuple(parameter.shape) if layout is None else layout.shape
    if tuple(value.shape) == shape and not (key == "step" and value.numel() == 1):
        return (value if layout is None else layout.slice(value)).clone()
    if value.numel() == 1:
        return value.clone()
    raise OptimizerError(
        f"{key!r} of {type(optimizer).__name__} for {name} is of shape {list(value.shape)}, the whole parameter of "
        f"{list(shape)}, this rank's part of {list(parameter.shape)}; save hetspmd.full_optimizer_state_dict(hap, "
        "optimizer), or the state of a single device, and load it with "
        "hetspmd.load_full_optimizer_state_dict(hap, optimizer, state); an optimizer that keeps other shapes needs "
        f"the parameter whole: constraints={{{name!r}: 'replicated'}}"
    )


def _has_tensors(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(_has_tensors(v) for v in value.values())
    if isinstance(value, (list, tuple, set)):
        return any(_has_tensors(v) for v in value)
    return isinstance(value, torch.Tensor)


def _on_cpu(value: Any) -> Any:
    """A copy with its tensors on the CPU."""
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {k: _on_cpu(v) for k, v in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_on_cpu(v) for v in value)
    return value
