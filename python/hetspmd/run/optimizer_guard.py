"""What an optimizer may do over parameters that lie in shards is looked at before its first step.

An optimizer that is elementwise steps shards as it steps the whole. torch's are known; any other is tried
(:mod:`hetspmd.run.elementwise`). One that mixes elements, or that cannot be tried, is refused on every rank. State
of whole parameters, of an optimizer that was stepped or loaded as on one device, is cut to shards.
"""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from hetspmd.dist.doings import step_of
from hetspmd.dist.parting import ranks_text
from hetspmd.errors import OptimizerError
from hetspmd.placement import is_sharded, sharded_dim
from hetspmd.run.elementwise import ELEMENTWISE, Untestable, is_elementwise, steps_nothing, trial_shape
from hetspmd.run.instances import instances
from hetspmd.run.loaded_states import LoadedStates, unlike_states
from hetspmd.run.optimizer_state import cut_whole_state, full_optimizer_state_dict, is_own
from hetspmd.run.outside_parameters import refuse_untrained
from hetspmd.run.parameter_registry import ParameterPlace, living, optimizer_parameters, places
from hetspmd.run.stepping import Call, begin, end
from hetspmd.trace.compat.bytecode import left_by_compilers

PASSING: Final = frozenset(("accelerate", "lightning", "lightning_fabric", "pytorch_lightning"))
"""Packages whose optimizers hold another one and only pass its steps on."""


@dataclass(frozen=True)
class _Look:
    """What there was when an optimizer was looked at: the sizes of its groups, and by ``id`` the HAP modules that
    lived and those whose parameters it held."""

    held: tuple[int, ...]
    alive: tuple[int, ...]
    modules: tuple[int, ...]


_LOCK = threading.Lock()
_HOOK: list[Any] = []
_ALLOWED: set[type] = set()
_CHECKED: weakref.WeakKeyDictionary[torch.optim.Optimizer, _Look] = weakref.WeakKeyDictionary()
"""The optimizers that were looked at."""
_HOOKED: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
"""Those whose state dicts are looked at."""


def allow_optimizer(kind: type) -> None:
    """Let optimizers of this class step shards, each rank its own, even if they may not be elementwise.

    It is meant for optimizers that cannot be tried on a small tensor, and for those whose results may differ
    from one device's. Every rank must call this.

    Args:
        kind: The optimizer's class.
    """
    _ALLOWED.add(kind)


def watch_optimizers() -> None:
    """Look at every optimizer before its first step, from the first call on."""
    with _LOCK:
        if not _HOOK:
            _HOOK.append(register_optimizer_step_pre_hook(_before_step))
            _HOOK.append(register_optimizer_step_post_hook(_after_step))


@left_by_compilers
def _after_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    end(optimizer)


@left_by_compilers
def _before_step(
    optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Call | None:
    _look(optimizer)
    modules = _CHECKED[optimizer].modules
    if modules:
        doing = step_of(optimizer, alike=type(optimizer) not in _ALLOWED)
        for module in living():
            if id(module) in modules:
                module.did(doing)
    return begin(optimizer, args, kwargs)


def _look(optimizer: torch.optim.Optimizer) -> None:
    refuse_untrained(optimizer, optimizer_parameters(optimizer))
    held = tuple(len(group["params"]) for group in optimizer.param_groups)
    alive = tuple(id(module) for module in living())
    last = _CHECKED.get(optimizer)
    if last is not None and (last.held, last.alive) == (held, alive):
        return
    registry = {key: place for key, place in places().items() if place.module.everyone.world > 1}
    mine = [registry[id(p)] for p in optimizer_parameters(optimizer) if id(p) in registry]
    modules = tuple({id(place.module): None for place in mine})
    if mine and (last is None or (last.held, last.modules) != (held, modules)):
        _check(optimizer, registry, mine)
    elif alive and any(p.is_meta for p in optimizer_parameters(optimizer)):
        raise OptimizerError(
            f"{type(optimizer).__name__} holds parameters on the meta device, in whose place HAP(...) has made "
            f"others; make it after HAP(...): {type(optimizer).__name__}(hap.parameters(), ...)"
        )
    _CHECKED[optimizer] = _Look(held, alive, modules)


def _check(
    optimizer: torch.optim.Optimizer, known: Mapping[int, ParameterPlace], mine: list[ParameterPlace]
) -> None:
    """Raise OptimizerError, on every rank alike, if the optimizer cannot step these parameters."""
    problem, whole = "", LoadedStates()
    try:
        for one in (optimizer, *_wrappers(optimizer)):
            problem = problem or _problem(one, optimizer.param_groups, known)
        whole = cut_whole_state(optimizer, known)
    except OptimizerError as error:
        problem = problem or str(error)
    for module in {id(place.module): place.module for place in mine}.values():
        module.meet(f"the first step of this {type(optimizer).__name__}")
        problems, digests = zip(*module.everyone.exchange((problem, whole.digests)), strict=True)
        first = next(filter(None, (problem, *problems)), "") or unlike_states(digests)
        if first:
            raise OptimizerError(first)
    if optimizer not in _HOOKED and any(place.in_parts for place in mine):
        _HOOKED.add(optimizer)
        # A wrapper without torch's __init__ (Lookahead) has no hooks; what it holds gets them when it steps.
        with suppress(AttributeError):
            optimizer.register_state_dict_pre_hook(_refuse_shards)
            optimizer.register_state_dict_post_hook(_gather)
            optimizer.register_load_state_dict_post_hook(_look_again)


def _refuse_shards(optimizer: torch.optim.Optimizer) -> None:
    if not is_own() and any(p.in_parts and not p.module.gather_state for p in _places(optimizer)):
        raise OptimizerError(
            f"{type(optimizer).__name__}.state_dict() would be of this rank's shards alone; call, on every rank, "
            "hetspmd.full_optimizer_state_dict(hap, optimizer), which has the state of the single device; "
            "HAP(..., gather_state=True) lets state_dict() do so"
        )


def _gather(optimizer: torch.optim.Optimizer, _state: dict[str, Any]) -> dict[str, Any] | None:
    """The state of the single device in the place of this rank's shards."""
    parts = () if is_own() else [place for place in _places(optimizer) if place.in_parts]
    return full_optimizer_state_dict(parts[0].module, optimizer) if parts else None


def _places(optimizer: torch.optim.Optimizer) -> list[ParameterPlace]:
    registry = places()
    return [registry[id(p)] for p in optimizer_parameters(optimizer) if id(p) in registry]


def _look_again(optimizer: torch.optim.Optimizer) -> None:
    _CHECKED.pop(optimizer, None)


def _problem(
    optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]], known: Mapping[int, ParameterPlace]
) -> str:
    """Why the optimizer cannot step the parameters that lie in shards, "" if it can."""
    kind = type(optimizer)
    if kind in ELEMENTWISE or kind in _ALLOWED:
        return ""
    tried: set[Any] = set()
    for group in groups:
        options = tuple((k, _class_of(v)) for k, v in group.items() if k not in ("params", "param_names"))
        for parameter in group["params"]:
            place = known.get(id(parameter))
            layout = None if place is None else place.module.parameter_shards().get(place.name)
            if place is None or layout is None or not parameter.requires_grad:
                continue
            shape = trial_shape(layout.shape)
            dim = sharded_dim(layout.form) if is_sharded(layout.form) else None
            if (dim is None and not place.module.plan.idle) or (options, shape, dim) in tried:
                continue
            tried.add((options, shape, dim))
            what = f"{kind.__name__} over {place.name} {list(layout.shape)}"
            try:
                if dim is None:
                    steps_nothing(optimizer, group, parameter, shape)
                elif not is_elementwise(optimizer, group, parameter, shape, dim):
                    return (
                        f"{what}, of which every rank holds a shard of dim {dim}, is not elementwise (or it draws "
                        f"random numbers): it would train another model than on one device. {_mend(kind)}"
                    )
            except Untestable as error:
                if dim is None:
                    return (
                        f"{what}, of which {ranks_text(place.module.plan.idle)} hold nothing, since their devices "
                        f"are idle in this plan: {kind.__name__} cannot step a parameter of no elements ({error}). "
                        "Leave those devices out of the cluster and start so many processes fewer, or take an "
                        "elementwise optimizer (SGD, Adam, AdamW, RMSprop, Adagrad, ...)"
                    )
                return (
                    f"{what}, of which ranks hold shards, cannot be tried on a small tensor ({error}), so that "
                    f"it is not known whether it is elementwise. {_mend(kind)}"
                )
    return ""


def _mend(kind: type) -> str:
    return (
        "Take an elementwise one (SGD, Adam, AdamW, RMSprop, Adagrad, ...), or store what it steps whole, with "
        "HAP(..., constraints={'*': 'replicated'}); "
        f"hetspmd.allow_optimizer({kind.__name__}) lets every rank step its shards as they are"
    )


def _class_of(value: Any) -> Any:
    """What of an option may matter for whether the optimizer is elementwise."""
    if isinstance(value, float):
        return value != 0.0
    if isinstance(value, (list, tuple)):
        return tuple(_class_of(v) for v in value)
    return value if isinstance(value, (bool, int, str, type(None))) else type(value).__name__


def _wrappers(optimizer: torch.optim.Optimizer) -> Iterator[torch.optim.Optimizer]:
    """Optimizers that hold this one and step it (SAM, Lookahead), though not those that pass calls on."""
    kinds = _holding_kinds()
    for one in instances(*kinds) if kinds else ():
        if one is not optimizer and any(held is optimizer for held in gc.get_referents(one, vars(one))):
            yield one


def _holding_kinds() -> list[type]:
    """The classes whose optimizers may hold another one: torch's own hold none, and PASSING need no look."""
    news, found = [torch.optim.Optimizer], []
    while news:
        for kind in type.__subclasses__(news.pop()):
            news.append(kind)
            package, _, part = kind.__module__.partition(".")
            if package not in PASSING and (package, part.partition(".")[0]) != ("torch", "optim"):
                found.append(kind)
    return found
