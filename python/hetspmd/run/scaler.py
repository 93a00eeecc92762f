"""Loss scaling (float16) where gradients lie in shards.

A scaler skips a step in which a gradient is not finite. A rank sees its own shards only, so that one would skip
what another takes, and the ranks would part. Here all ranks share what each has found, and by what it has scaled:
two numbers per rank in every step. From the first HAP module on, torch's own scaler does so too.

A step in micro-batches computes gradients in the forward, before the loss is scaled. :class:`ExpectedScale` tells
by what it will be: the scale of the scaler that has stepped the module's parameters, or else of the one that there
is. What comes in is compared with it, and the gradients that are handed out are right for any.
"""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import torch

from hetspmd.errors import CollectiveMismatchError, GradientError
from hetspmd.run.parameter_registry import (
    Owned,
    ShardedModule,
    grouped,
    optimizer_parameters,
    owned_parameters,
    places,
)

Found = dict[torch.device, torch.Tensor]
"""Whether a gradient on each device is not finite."""

_LOCK = threading.Lock()
_REACHED: list[Any] = []
"""torch's own method, once it was replaced."""
_OF_MODULES: weakref.WeakKeyDictionary[Any, weakref.ref[torch.amp.GradScaler]] = weakref.WeakKeyDictionary()
"""The scaler that has unscaled a HAP module's gradients last."""


class GradScaler(torch.amp.GradScaler):
    """:class:`torch.amp.GradScaler` for the parameters of a HAP module, made and used in the same way.

    Every rank must make one with the same arguments.

    Raises:
        GradientError: In the first ``unscale_`` or ``step``, where the optimizer has parameters of no HAP
            module.
        CollectiveMismatchError: On every rank, where the ranks have scaled by different numbers.
    """

    def _unscale_grads_(self, optimizer: torch.optim.Optimizer, *args: Any) -> Found:
        owned_parameters(optimizer_parameters(optimizer))
        flags: Found = super()._unscale_grads_(optimizer, *args)
        return flags


def reach_torch_scaler() -> None:
    """Let ``torch.amp.GradScaler`` share over the ranks what it finds in gradients of HAP modules."""
    with _LOCK:
        if _REACHED:
            return
        _REACHED.append(torch.amp.GradScaler._unscale_grads_)

        def unscale(
            self: torch.amp.GradScaler,
            optimizer: torch.optim.Optimizer,
            inv_scale: torch.Tensor,
            found_inf: torch.Tensor,
            allow_fp16: bool,
        ) -> Found:
            flags: Found = _REACHED[0](self, optimizer, inv_scale, found_inf, allow_fp16)
            registry = places()
            mine = [(p, registry[id(p)]) for p in optimizer_parameters(optimizer) if id(p) in registry]
            for _, place in mine:
                _OF_MODULES[place.module] = weakref.ref(self)
            return _shared(flags, grouped(mine), inv_scale)

        torch.amp.GradScaler._unscale_grads_ = unscale  # type: ignore[method-assign]  # on purpose


class ExpectedScale:
    """By what the loss of a HAP module will be scaled."""

    def __init__(self, module: ShardedModule) -> None:
        self._module, self._known = weakref.ref(module), False
        self._found: weakref.ref[torch.amp.GradScaler] | None = None
        self._searched = False

    def expected(self, device: torch.device) -> torch.Tensor:
        """The scale, a scalar; 1 where no scaler is known. Without a wait for the device."""
        scaler = self._scaler()
        self._known = scaler is not None
        one = torch.ones((), device=device)
        if scaler is None:
            return one
        scale: torch.Tensor = scaler.scale(one)
        return scale

    def check(self, tangent: torch.Tensor) -> None:
        """Raises GradientError where the loss was scaled up and no scaler was known."""
        if not self._known and float(tangent) > 1:
            raise GradientError(
                f"the loss was multiplied by {float(tangent):g}, but a step in micro-batches had computed "
                "gradients in float16 before that, and small ones may have become zero; scale the loss by a "
                "torch.amp.GradScaler that is made before the first step, or use bfloat16"
            )

    def _scaler(self) -> torch.amp.GradScaler | None:
        module = self._module()
        known = self._found if module is None else _OF_MODULES.get(module, self._found)
        if known is None and not self._searched:
            self._searched = True
            every = (s for s in gc.get_objects() if issubclass(type(s), torch.amp.GradScaler))
            known = self._found = next((weakref.ref(s) for s in every if s.is_enabled()), None)
        return None if known is None else known()


def _shared(flags_of: Found, parts: list[Owned], inv_scale: torch.Tensor) -> Found:
    """What any rank has found. Raises CollectiveMismatchError, on every rank, unless all have the same scale."""
    for part in parts:
        if part.communicator.world == 1:
            continue
        own = torch.zeros(2, dtype=torch.float32, device=part.device)
        for flag in flags_of.values():
            own[0] += flag.to(part.device)
        own[1] = inv_scale.to(part.device)
        everyone = part.share("a GradScaler's unscale_ or step", tuple(sorted(part.names)), own)
        flags, scales = everyone.view(-1, 2).unbind(1)
        if bool((scales != scales[0]).any()):
            listed = ", ".join(
                f"{scale:g} on rank {r}" for r, scale in enumerate(scales.reciprocal().tolist())
            )
            raise CollectiveMismatchError(
                f"a GradScaler has another scale on some ranks: {listed}. Make it with the same arguments on every "
                "rank, and load the same state_dict()"
            )
        shared = (flags.sum() > 0).to(torch.float32)
        flags_of[part.device] = torch.maximum(flags_of.get(part.device, shared), shared.reshape(()))
    return flags_of
