"""To which HAP module a parameter belongs, for functions that take parameters as an optimizer holds them."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from hetspmd.errors import GradientError
from hetspmd.run.communicator import Communicator

if TYPE_CHECKING:
    from hetspmd.run.module import HAP

_WRAPPED: list[weakref.ref[HAP]] = []
"""The HAP modules that exist, in the order in which they were made."""


@dataclass(frozen=True)
class Owned:
    """Parameters of one HAP module: ``parameters`` in the order given, and whose elements this rank counts.

    ``shares[i]``: this rank's part of the i-th is no other rank's (a shard; or a whole one, on the first active
    rank). ``communicator`` joins all ranks, idle ones too.
    """

    parameters: Sequence[torch.Tensor]
    shares: Sequence[bool]
    communicator: Communicator
    device: torch.device

    def counted(self) -> list[torch.Tensor]:
        """Those that this rank counts, so that over all ranks every element is counted once."""
        return [p for p, mine in zip(self.parameters, self.shares, strict=True) if mine]


def remember(module: HAP) -> None:
    """Let :func:`owners` find the module, as long as it lives."""
    _WRAPPED[:] = [ref for ref in _WRAPPED if ref() is not None]
    _WRAPPED.append(weakref.ref(module))


def owners(parameters: Iterable[torch.Tensor]) -> list[Owned]:
    """The parameters by HAP module, in the order in which the modules first appear.

    Raises GradientError for no parameters at all, and for one that belongs to no HAP module.
    """
    alive = [module for ref in list(_WRAPPED) if (module := ref()) is not None]
    places = {id(p): (module, name) for module in alive for name, p in module.module.named_parameters()}
    groups: dict[int, tuple[HAP, list[tuple[torch.Tensor, bool]]]] = {}
    for parameter in parameters:
        place = places.get(id(parameter))
        if place is None:
            raise GradientError(
                f"a parameter of shape {list(parameter.shape)} belongs to no HAP module, so that it is not known "
                "which ranks hold what of it; give the HAP module or its parameters, and use torch's own function "
                "for the others"
            )
        module, name = place
        entry = groups.setdefault(id(module), (module, []))
        entry[1].append((parameter, module.counts(name)))
    if not groups:
        raise GradientError("there are no parameters; give a HAP module or its parameters")
    return [
        Owned([p for p, _ in found], [mine for _, mine in found], module.everyone, module.device)
        for module, found in groups.values()
    ]
