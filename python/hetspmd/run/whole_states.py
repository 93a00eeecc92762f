"""The methods of ``HAP`` that give and take whole tensors: state dicts, copies, gradients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hetspmd.dist.doings import Loaded
from hetspmd.errors import ShardError
from hetspmd.run.forwarding import without_prefix
from hetspmd.run.gathered import add_module, gathered_state
from hetspmd.run.state_hooks import (
    after_saving,
    before_saving,
    loaded_with_hooks,
    without_pre_hooks,
)
from hetspmd.run.whole import full_module, full_state_dict, load_full_state_dict

if TYPE_CHECKING:
    from hetspmd.dist.doings import Doing
    from hetspmd.dist.runtime import Runtime
    from hetspmd.run.store import Store


class WholeStates(nn.Module):
    """What :class:`hetspmd.run.module.HAP` does with the single-device model's state, in whole tensors."""

    module: nn.Module
    device: torch.device
    gather_state: bool
    _store: Store
    _runtime: Runtime

    if TYPE_CHECKING:  # HAP has them

        @property
        def rank(self) -> int: ...

        def meet(self, what: str) -> None: ...

        def did(self, doing: Doing) -> None: ...

    def full_state_dict(self, *, rank0_only: bool = False) -> dict[str, Any]:
        """The state dict of the single-device model, in whole tensors on the CPU. Every rank must call this.

        Args:
            rank0_only: The other ranks get an empty dict.
        """
        self.meet("full_state_dict()")
        with self._store.sentry.lifted():
            return full_state_dict(self._store, self._runtime, keep=not rank0_only or self.rank == 0)

    def full_module(self) -> nn.Module:
        """A whole single-device copy of the model on every rank. Every rank must call this.

        The copy is what the model was before it was wrapped, with the present values. It can be called,
        copied and saved, and so can its methods and parts be called. It does not follow the training.
        """
        self.meet("full_module()")
        with self._store.sentry.lifted():
            return full_module(self._store, self._runtime, self.device)

    def state_dict(
        self, *args: Any, destination: Any = None, prefix: str = "", keep_vars: bool = False
    ) -> Any:
        """:meth:`full_state_dict` where ``gather_state`` is set; refused otherwise, since parameters lie in
        shards.

        Hooks on this module are called.

        Raises:
            ShardError: ``gather_state`` is not set, or ``keep_vars`` asks for the parameters themselves.
        """
        if not self.gather_state:
            return super().state_dict(*args, destination=destination, prefix=prefix, keep_vars=keep_vars)
        old = dict(zip(("destination", "prefix", "keep_vars"), args, strict=False))  # torch's order
        destination, prefix = old.get("destination", destination), old.get("prefix", prefix)
        keep_vars = old.get("keep_vars", keep_vars)
        if keep_vars:
            raise ShardError(
                "state_dict(keep_vars=True) asks for the parameters themselves, which lie in shards. Leave it "
                "out for whole copies, or take hap.named_parameters() for this rank's parts"
            )
        before_saving(self, prefix)
        return after_saving(self, gathered_state(self, destination, prefix), prefix)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        for hook in self._load_state_dict_pre_hooks.values():
            hook(state_dict, prefix, *rest)
        add_module(self, state_dict, prefix)
        with without_pre_hooks(self):
            super()._load_from_state_dict(state_dict, prefix, *rest)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """:meth:`load_full_state_dict`, which here also takes keys that begin with ``module.``, as those of DDP
        do.
        """

        def load(state: Mapping[str, Any], strict: bool) -> Any:
            state = without_prefix(state, self.module)
            if not assign:
                return self.load_full_state_dict(state, strict=strict)
            return self.module.load_state_dict(state, strict=strict, assign=True)

        return loaded_with_hooks(self, state_dict, strict, load)

    def load_full_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> Any:
        """Load a single-device state dict into this rank's shards, without communication.

        A mapping that reads a tensor when it is asked for its key is asked once for each parameter, and at
        most one whole parameter is held at a time. Of ``torch.load(FILE, mmap=True)`` only the shards are
        read.

        Args:
            state_dict: Name to whole tensor.
            strict: Refuse missing and unexpected keys.

        Returns:
            Torch's report of missing and unexpected keys.

        Raises:
            RuntimeError: As ``Module.load_state_dict`` does, for keys or shapes that do not fit.
        """
        loaded = Loaded()
        report = load_full_state_dict(self._store, state_dict, loaded, strict=strict)
        self.did(loaded.doing())
        return report

    def full_tensors(self) -> dict[str, torch.Tensor]:
        """Whole copies of all parameters and buffers, by (first) name. Every rank must call this."""
        self.meet("full_tensors()")
        named: dict[str, torch.Tensor] = dict(self.module.named_parameters())
        named.update(self.module.named_buffers())
        return self.gather(named, within="full_tensors()")

    def full_gradients(self) -> dict[str, torch.Tensor]:
        """Whole copies of the gradients that exist, by the parameter's name. Every rank must call this."""
        self.meet("full_gradients()")
        named = {n: p.grad for n, p in self.module.named_parameters() if p.grad is not None}
        return self.gather(named, within="full_gradients()")

    def gather(self, named: Mapping[str, torch.Tensor], *, within: str = "") -> dict[str, torch.Tensor]:
        """Whole copies of tensors that lie as the parameters of these names do; every rank must call this.

        Args:
            named: Name of a parameter to a tensor that lies as it does.
            within: A call that the ranks have met in already, so that they need not meet again.
        """
        if not within:
            self.meet("gather()")
        return self._store.gather(self._runtime, named)
