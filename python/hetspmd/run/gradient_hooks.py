"""Hooks on the gradients of parameters that lie in shards.

autograd gives a hook on a parameter the gradient that this rank has, a shard. A hook is written for the whole
gradient, so that every rank gathers it, calls the hook and keeps its part of what comes back. That takes one
all-gather in every backward, of which a GradientHookWarning tells, unless :func:`on_full_gradient` asked for it.
Hooks that run after a gradient was accumulated see the parameter itself, with the shard of its gradient: they are
told so.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from hetspmd.errors import GradientError, GradientHookWarning
from hetspmd.placement import is_sharded
from hetspmd.run.parameter_registry import ShardedModule, places
from hetspmd.trace.compat.tensors import as_plain

if TYPE_CHECKING:
    from hetspmd.trace.graph import Parameter

Hook = Callable[[torch.Tensor], torch.Tensor | None]
"""What ``Tensor.register_hook`` takes: it may return another gradient."""

_TOLD: weakref.WeakKeyDictionary[ShardedModule, set[tuple[str, int]]] = weakref.WeakKeyDictionary()
"""The hooks after accumulation, by parameter and key, that a warning told of."""


def on_full_gradient(hap: ShardedModule, parameter: str | torch.Tensor, hook: Hook) -> RemovableHandle:
    """Call ``hook`` with the whole gradient of a parameter in every backward, on every rank. Every rank must
    call this.

    Each call of the hook takes one all-gather of the gradient.

    Args:
        hap: The HAP module.
        parameter: Its name in the model, or the parameter itself.
        hook: Takes the gradient, of the whole parameter's shape. A tensor that it returns takes the
            gradient's place, as with ``Tensor.register_hook``; every rank keeps its part of it.

    Returns:
        A handle whose ``remove()`` ends the calls.

    Raises:
        GradientError: The parameter is not one of ``hap``.
    """
    if isinstance(parameter, str):
        named = dict(hap.module.named_parameters(remove_duplicate=False))
        name = parameter
        tensor: torch.Tensor | None = named.get(parameter)
    else:
        place = places().get(id(parameter))
        name, tensor = (place.name, parameter) if place is not None and place.module is hap else ("", None)
    if tensor is None:
        what = repr(parameter) if isinstance(parameter, str) else f"of shape {list(parameter.shape)}"
        raise GradientError(f"the HAP module has no parameter {what}; give a name of hap.module's parameters")
    hap.run_lowered()  # so that gradients come in the same order on idle ranks
    handle: RemovableHandle = tensor.register_hook(_OnWhole(hap, name, hook))  # type: ignore[no-untyped-call]  # torch's
    return handle


class _OnWhole:
    """A hook that is given the whole gradient."""

    def __init__(self, hap: ShardedModule, name: str, hook: Hook) -> None:
        self._hap, self._name, self._hook = weakref.ref(hap), name, hook

    def __call__(self, gradient: torch.Tensor) -> torch.Tensor | None:
        hap = self._hap()
        if hap is None:
            return self._hook(gradient)
        whole = hap.gather({self._name: gradient}, within="a backward")[self._name]
        layout = hap.parameter_shards().get(self._name)
        version = whole._version
        answer = self._hook(whole)
        if answer is None:
            if whole._version == version:
                return None
            answer = whole  # it was changed in place
        if tuple(answer.shape) != tuple(whole.shape):
            raise GradientError(
                f"the hook {_where(self._hook)} on {self._name} was given the whole gradient, of "
                f"{list(whole.shape)}, and returned one of {list(answer.shape)}; it must know nothing of shards"
            )
        return (answer if layout is None else layout.slice(answer)).to(gradient.dtype).contiguous()


def whole_hooks(
    hap: ShardedModule, graph_parameters: Sequence[Parameter], parameters: Sequence[torch.Tensor]
) -> tuple[str, ...]:
    """The hooks for which a backward gathers gradients, in words; every rank must have the same."""
    with as_plain():
        hooked = [
            (k, p._backward_hooks)
            for k, p in zip(graph_parameters, parameters, strict=True)
            if p._backward_hooks
        ]
    if not hooked:
        return ()
    words, shards = [], hap.parameter_shards()
    for info, hooks in hooked:
        layout = shards.get(info.name)
        divided = layout is not None and is_sharded(layout.form)
        count = sum(divided or isinstance(hook, _OnWhole) for hook in hooks.values())
        if count:
            words.append(f"{count} hook{'s' * (count > 1)} on the gradient of {info.name}")
    return tuple(words)


def give_whole(
    module: weakref.ref[ShardedModule],
    graph_parameters: Sequence[Parameter],
    parameters: Sequence[torch.Tensor],
) -> None:
    """Let hooks on sharded parameters see whole gradients, before a backward reaches them."""
    if (owner := module()) is not None:
        owner.meet_hooks(whole_hooks(owner, graph_parameters, parameters))
    for info, parameter in zip(graph_parameters, parameters, strict=True):
        before: dict[int, Any] | None = parameter._backward_hooks
        after: dict[int, Any] | None = parameter._post_accumulate_grad_hooks
        if not before and not after:
            continue
        hap, name = module(), info.name
        layout = None if hap is None else hap.parameter_shards().get(name)
        if hap is None or layout is None or not is_sharded(layout.form):
            continue
        what = f"on {name} {list(layout.shape)}, which lies in shards of dim {layout.form - 2},"
        for key, hook in list((before or {}).items()):
            if not isinstance(hook, _OnWhole):
                (before or {})[key] = _OnWhole(hap, name, hook)
                warnings.warn(
                    f"the hook {_where(hook)} {what} is given the whole gradient, which takes an all-gather in "
                    f"every backward; hetspmd.on_full_gradient(hap, {name!r}, hook) asks for it",
                    GradientHookWarning,
                    stacklevel=2,
                )
        for key, hook in list((after or {}).items()):
            told = _TOLD.setdefault(hap, set())
            if (name, key) not in told:
                told.add((name, key))
                warnings.warn(
                    f"the hook {_where(hook)} {what} sees this rank's shard of .grad alone. That is right if it "
                    "works element by element, as an optimizer's step does; a hook of the whole gradient is made "
                    f"with hetspmd.on_full_gradient(hap, {name!r}, hook)",
                    GradientHookWarning,
                    stacklevel=2,
                )


def tell_module_hooks(model: nn.Module) -> None:
    """Warn of hooks on the backward of modules, which run while the step is traced and not in a step."""
    for name, module in model.named_modules():
        for hook in (*module._backward_hooks.values(), *module._backward_pre_hooks.values()):
            warnings.warn(
                f"the backward hook {_where(hook)} of module {name or 'the model'} is called once, when the step "
                "is traced, with tensors without values. The gradients that it returns are part of the plan; what "
                "else it does (a log, a counter) is lost. hetspmd.on_full_gradient(hap, 'weight', hook) runs in "
                "every backward",
                GradientHookWarning,
                stacklevel=3,
            )


def _where(hook: Any) -> str:
    code = getattr(hook, "__code__", None)
    name = getattr(hook, "__qualname__", type(hook).__qualname__)
    return name if code is None else f"{name} at {code.co_filename}:{code.co_firstlineno}"
