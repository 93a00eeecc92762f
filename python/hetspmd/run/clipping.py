"""torch's own clipping, over gradients that lie in shards.

``torch.nn.utils.clip_grad_norm_`` adds up what one rank holds, so that every rank would scale by another norm and
whole parameters would part. From the first HAP module on, torch's function takes the norm over all ranks where a
tensor belongs to a HAP module, and is as it was everywhere else. So are the libraries that call it (Accelerate,
Trainer, Lightning, timm).

The functions of :mod:`torch.nn.utils` are wrappers that call an inner function; that one is replaced in the wrapper
itself, so that names that were imported before are reached as well.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import torch
from torch import nn

from hetspmd.errors import GradientError, HetspmdError
from hetspmd.run.norms import combined_norm, gradients_of
from hetspmd.run.parameter_registry import ParameterPlace, grouped, living, places
from hetspmd.run.shards import gradient_of, marked

_LOCK = threading.Lock()
_REACHED: list[Callable[..., Any]] = []
"""The functions of torch that were changed."""


def reach_torch() -> None:
    """Let torch's functions know HAP modules, from the first call on."""
    with _LOCK:
        if not _REACHED:
            _replace_inner(nn.utils.clip_grad_norm_, _clip_grad_norm_)
            _replace_inner(nn.utils.get_total_norm, _get_total_norm)


def _replace_inner(function: Callable[..., Any], make: Callable[[Any], Callable[..., Any]]) -> None:
    """Let the wrapper ``function`` call ``make(inner)`` in the place of its inner function."""
    code, closure = getattr(function, "__code__", None), getattr(function, "__closure__", None)
    if code is None or closure is None or "func" not in code.co_freevars:
        raise HetspmdError(
            f"torch {torch.__version__} has another {function.__name__} than hetspmd knows, which would compute "
            "another norm on every rank; take a torch that hetspmd was tested with"
        )
    cell = closure[code.co_freevars.index("func")]
    cell.cell_contents = make(cell.cell_contents)
    _REACHED.append(function)


def _clip_grad_norm_(inner: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def clip_grad_norm_(
        parameters: torch.Tensor | Iterable[torch.Tensor],
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> torch.Tensor:
        rest = max_norm, norm_type, error_if_nonfinite, foreach
        if not _shared():
            return inner(parameters, *rest)
        tensors = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        mine, others = _divided(tensors, places())
        if not mine:
            return inner(tensors or parameters, *rest)
        gradients = [p.grad for p in others if p.grad is not None]
        parts = [gradients_of(part) for part in grouped(mine)]
        total = combined_norm(parts, gradients, norm_type, error_if_nonfinite, foreach, max_norm)
        nn.utils.clip_grads_with_norm_([*(p for p, _ in mine), *others], max_norm, total, foreach)
        return total

    return clip_grad_norm_


def _get_total_norm(inner: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def get_total_norm(
        tensors: torch.Tensor | Iterable[torch.Tensor],
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> torch.Tensor:
        rest = norm_type, error_if_nonfinite, foreach
        if not _shared():
            return inner(tensors, *rest)
        gradients = [gradient_of(t) for t in ([tensors] if isinstance(tensors, torch.Tensor) else tensors)]
        registry = places(gradients=True)
        mine, others = _divided(gradients, registry)
        _check_no_views(others, registry)
        if not mine:
            return inner(gradients, *rest)
        return combined_norm(grouped(mine), others, *rest)

    return get_total_norm


def _shared() -> bool:
    """Whether there is a HAP module of several ranks."""
    return any(module.everyone.world > 1 for module in living())


Places: TypeAlias = dict[int, ParameterPlace]
"""Where tensors belong, by what identifies them."""


def _divided(
    tensors: Sequence[torch.Tensor], registry: Places
) -> tuple[list[tuple[torch.Tensor, ParameterPlace]], list[torch.Tensor]]:
    """The tensors that belong to HAP modules of several ranks, and the others. What was computed element by element
    from a shard is a part as that is, and another name for a whole parameter or gradient is that."""
    mine: list[tuple[torch.Tensor, ParameterPlace]] = []
    others: list[torch.Tensor] = []
    unknown = any(id(tensor) not in registry for tensor in tensors)
    shards, whole = _lying(registry) if unknown else ({}, {})
    for tensor in tensors:
        place = registry.get(id(tensor))
        if place is None and (own := marked(tensor)) is not None:
            place = shards.get(id(own.whole))
            if place is None:
                raise own.refusal("the norm of what was computed from it", "read")
        elif place is None and type(tensor) is torch.Tensor:
            place = whole.get(_seen(tensor))
        if place is not None and place.module.everyone.world > 1:
            mine.append((tensor, place))
        else:
            others.append(tensor)
    return mine, others


def _lying(registry: Places) -> tuple[Places, dict[object, ParameterPlace]]:
    """The parameters by the marks that say that they are shards; and those that are whole, with their gradients, by
    the elements that they show."""
    shards: Places = {}
    whole: dict[object, ParameterPlace] = {}
    for place in registry.values():
        parameter = place.module.module.get_parameter(place.name)
        own = marked(parameter)
        if own is not None:
            shards[id(own)] = place
        else:
            found = (t for t in (parameter, parameter.grad) if t is not None)
            whole.update((_seen(tensor), place) for tensor in found)
    return shards, whole


def _seen(tensor: torch.Tensor) -> object:
    """What two names for the same elements have in common; None for what has none."""
    if tensor.layout != torch.strided or not tensor.numel():
        return None
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


def _check_no_views(tensors: Sequence[torch.Tensor], registry: Places) -> None:
    """Raise GradientError for some elements of a gradient or parameter of a HAP module.

    An idle rank, whose tensors have no memory, could not recognise it.
    """
    memory: dict[int, str] = {}
    for place in registry.values():
        if place.module.everyone.world > 1:
            parameter = place.module.module.get_parameter(place.name)
            for tensor in (parameter, parameter.grad):
                if tensor is not None and tensor.numel():
                    memory[tensor.untyped_storage().data_ptr()] = place.name
    for tensor in tensors:
        if type(tensor) is torch.Tensor and tensor.layout == torch.strided and tensor.numel():
            name = memory.get(tensor.untyped_storage().data_ptr())
            if name is not None:
                raise GradientError(
                    f"a tensor of shape {list(tensor.shape)} is a view of {name} or of its gradient, "
                    "of which this rank holds a part; give the gradient or parameter itself, or call "
                    "hetspmd.get_total_norm(model)"
                )
