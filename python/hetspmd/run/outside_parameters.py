"""What the steps of HAP modules read outside of their models and would train on one device.

A plan has no gradient for it, so that an optimizer which holds it would step nothing, or by a part of its gradient.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable
from typing import Final

import torch

from hetspmd.errors import OptimizerError
from hetspmd.trace.host.facts import Read
from hetspmd.trace.host.places import Roots
from hetspmd.trace.host.untrained import untrained_leaves

_LOCK = threading.Lock()
_FOUND: Final[list[tuple[weakref.ref[torch.Tensor], str, weakref.ref[object]]]] = []
"""The tensors with their names, and by whom they were found; no one counts who is gone."""


def look_for_untrained(reads: tuple[Read, ...], roots: Roots, finder: object) -> None:
    """Remember what a plan's step reads and does not train, as long as ``finder`` lives."""
    values = list(untrained_leaves(reads, roots))
    if not values:
        return
    with _LOCK:
        _FOUND[:] = [entry for entry in _FOUND if entry[0]() is not None and entry[2]() is not None]
        ids = {id(ref()) for ref, _, by in _FOUND if by() is finder}
        new = [(tensor, name) for tensor, name in values if id(tensor) not in ids]
        _FOUND.extend((weakref.ref(tensor), name, weakref.ref(finder)) for tensor, name in new)


def refuse_untrained(optimizer: torch.optim.Optimizer, held: Iterable[torch.Tensor]) -> None:
    """Raise OptimizerError for an optimizer that holds such a tensor and would step it now: one that was frozen may
    be thawed, and a plan serve that was made before."""
    if not _FOUND:
        return
    with _LOCK:
        alive = [(ref(), name) for ref, name, by in _FOUND if by() is not None]
    names = {id(tensor): name for tensor, name in alive if tensor is not None}
    for tensor in held:
        if tensor.requires_grad and (name := names.get(id(tensor))) is not None:
            raise OptimizerError(
                f"{type(optimizer).__name__} holds {name} {list(tensor.shape)}, which the step of a HAP module "
                "reads and which is no parameter of its model: a plan computes no gradient for it, so that it "
                "would not be trained as on one device. Make it a part of the model before HAP(...), as a module "
                "or nn.Parameter, and read it there; or, where another loop alone trains it, let it be frozen "
                "around HAP(...) and hap(...): requires_grad_(False)"
            )
