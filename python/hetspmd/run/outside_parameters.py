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
from hetspmd.trace.host.places import Roots, text
from hetspmd.trace.host.untrained import untrained_places

_LOCK = threading.Lock()
_FOUND: Final[list[tuple[weakref.ref[torch.Tensor], str, weakref.ref[object]]]] = []
"""The tensors with their names, and by whom they were found; no one counts who is gone."""
_TIMES = [0]


def times_found() -> int:
    """A number that is another one after more was found."""
    return _TIMES[0]


def look_for_untrained(reads: tuple[Read, ...], roots: Roots, finder: object) -> None:
    """Remember what a plan's step reads and does not train, as long as ``finder`` lives."""
    values = [(roots.value(*place), text(*place)) for place in untrained_places(reads)]
    if not values:
        return
    with _LOCK:
        _FOUND[:] = [entry for entry in _FOUND if entry[0]() is not None and entry[2]() is not None]
        ids = {id(ref()) for ref, _, by in _FOUND if by() is finder}
        new = [(t, name) for t, name in values if isinstance(t, torch.Tensor) and id(t) not in ids]
        _FOUND.extend((weakref.ref(t), name, weakref.ref(finder)) for t, name in new)
        _TIMES[0] += len(new)


def refuse_untrained(optimizer: torch.optim.Optimizer, held: Iterable[torch.Tensor]) -> None:
    """Raise OptimizerError for an optimizer that holds such a tensor."""
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
