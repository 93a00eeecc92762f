"""To which HAP module a tensor belongs, for functions that are given parameters or gradients."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import nn

from hetspmd.dist.communicator import Communicator
from hetspmd.dist.doings import Doing
from hetspmd.dist.uncaught import before_the_end
from hetspmd.errors import GradientError
from hetspmd.placement import is_sharded
from hetspmd.run.mismatch import explain

if TYPE_CHECKING:
    from hetspmd.lower.local_program import LocalTensor
    from hetspmd.plan.plan import Plan
    from hetspmd.trace.losses import Loss


class ShardedModule(Protocol):
    """What :class:`hetspmd.run.module.HAP` is to functions that are given its parameters or gradients."""

    device: torch.device
    gather_state: bool

    @property
    def module(self) -> nn.Module:
        """The wrapped model."""

    @property
    def plan(self) -> Plan:
        """The plan that was made first."""

    @property
    def loss_function(self) -> Loss | None:
        """What was given as ``loss``, as a function."""

    @property
    def rank(self) -> int:
        """This rank in the cluster."""

    @property
    def source(self) -> int:
        """The first active rank."""

    @property
    def everyone(self) -> Communicator:
        """All ranks of the cluster."""

    def counts(self, name: str) -> bool:
        """Whether this rank's part of a parameter is to be counted in a sum over all ranks."""

    def parameter_shards(self) -> dict[str, LocalTensor]:
        """Name to layout of every parameter."""

    def gather(self, named: Mapping[str, torch.Tensor], *, within: str = "") -> dict[str, torch.Tensor]:
        """The whole tensors of which these are this rank's parts; ``within`` a call that the ranks have met in."""

    def full_state_dict(self) -> dict[str, Any]:
        """The single-device model's state dict."""

    def meet(self, what: str) -> None:
        """Go on when all ranks do the same."""

    def did(self, doing: Doing) -> None:
        """Say at the next step what this rank does now."""

    def meet_hooks(self, hooks: tuple[str, ...]) -> None:
        """Go on when all ranks know that a backward calls these hooks."""

    def share(self, what: str, arguments: tuple[str, ...], own: torch.Tensor) -> torch.Tensor:
        """Every rank's ``own``, 8 bytes, when all ranks do the same."""

    def run_lowered(self) -> None:
        """Run the lowered graphs from now on."""


_WRAPPED: list[weakref.ref[ShardedModule]] = []
"""The HAP modules that exist, in the order in which they were made."""

_LOCK = threading.Lock()


class ParameterPlace(NamedTuple):
    """The HAP module of a parameter, and the parameter's name in the wrapped model."""

    module: ShardedModule
    name: str

    @property
    def in_parts(self) -> bool:
        """Whether some rank does not hold the whole parameter; the same on every rank, whatever this one holds."""
        layout = self.module.parameter_shards().get(self.name)
        if layout is None or self.module.everyone.world == 1:
            return False
        return is_sharded(layout.form) or bool(self.module.plan.idle)


@dataclass(frozen=True)
class Owned:
    """Tensors that lie as parameters of one HAP module do: ``tensors`` in the order given.

    ``names`` are those of the parameters that were given, also of those that have no gradient.

    ``shares[i]``: this rank's part of the i-th is no other rank's (a shard; or a whole one, on the first active
    rank). ``communicator`` joins all ranks, idle ones too. ``share`` tells them what this rank does and with
    which arguments, and gives what each of them shares in it.
    """

    tensors: Sequence[torch.Tensor]
    shares: Sequence[bool]
    communicator: Communicator
    device: torch.device
    share: Callable[[str, tuple[str, ...], torch.Tensor], torch.Tensor]
    names: Sequence[str]

    def counted(self) -> list[torch.Tensor]:
        """Those that this rank counts, so that over all ranks every element is counted once."""
        return [t for t, mine in zip(self.tensors, self.shares, strict=True) if mine]


def remember(module: ShardedModule) -> None:
    """Let :func:`owned_parameters` find the module, as long as it lives, and errors about its shards' sizes be
    explained."""
    before_the_end(explain)
    with _LOCK:
        _WRAPPED[:] = [ref for ref in _WRAPPED if ref() is not None]
        _WRAPPED.append(weakref.ref(module))


def living() -> list[ShardedModule]:
    """The HAP modules that exist, in the order in which they were made."""
    return [module for ref in list(_WRAPPED) if (module := ref()) is not None]


def places(*, gradients: bool = False) -> dict[int, ParameterPlace]:
    """Where each parameter of every HAP module belongs, by ``id``; with ``gradients`` their gradients too."""
    registry: dict[int, ParameterPlace] = {}
    for module in living():
        for name, parameter in module.module.named_parameters():
            registry[id(parameter)] = ParameterPlace(module, name)
            if gradients and parameter.grad is not None:
                registry[id(parameter.grad)] = ParameterPlace(module, name)
    return registry


def grouped(tensors: Iterable[tuple[torch.Tensor, ParameterPlace]]) -> list[Owned]:
    """Tensors by HAP module, in the order in which the modules first appear."""
    groups: dict[int, tuple[ShardedModule, list[tuple[torch.Tensor, bool, str]]]] = {}
    for tensor, (module, name) in tensors:
        entry = groups.setdefault(id(module), (module, []))
        entry[1].append((tensor, module.counts(name), name))
    return [
        Owned(
            [t for t, *_ in members],
            [mine for _, mine, _ in members],
            module.everyone,
            module.device,
            module.share,
            [name for *_, name in members],
        )
        for module, members in groups.values()
    ]


def optimizer_parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """What an optimizer steps, of all its groups."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def owned_parameters(parameters: Iterable[torch.Tensor]) -> list[Owned]:
    """The parameters by HAP module, in the order in which the modules first appear.

    Raises GradientError for no parameters at all, and for one that belongs to no HAP module.
    """
    registry = places()
    pairs: list[tuple[torch.Tensor, ParameterPlace]] = []
    for parameter in parameters:
        place = registry.get(id(parameter))
        if place is None:
            raise GradientError(
                f"a parameter of shape {list(parameter.shape)} belongs to no HAP module, so that it is not known "
                "which ranks hold what of it; give the HAP module or its parameters, and use torch's own function "
                "for the others"
            )
        pairs.append((parameter, place))
    if not pairs:
        raise GradientError("there are no parameters; give a HAP module or its parameters")
    return grouped(pairs)
