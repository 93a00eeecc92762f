"""What a rank does to its parameters between two steps, in a few numbers that all ranks have in common.

The shards of a parameter have no copies that could be compared. A learning rate that differs, a state dict that
one rank alone has loaded, or a rank that forgets ``zero_grad()`` would go unseen where everything lies in shards.
So each rank says at its next step what it did since the last one (:mod:`hetspmd.dist.roll`).
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Final
from zlib import crc32

import torch

from hetspmd.dist.digest import digest, join

_SAMPLED: Final = 64
"""Elements of a tensor that is loaded whose digest is compared."""

_LEFT_OUT: Final = frozenset(("params", "param_names", "foreach", "fused", "capturable", "differentiable"))
"""What of a group of parameters does not count, or may differ from device to device."""


@dataclass(frozen=True)
class Doing:
    """``what`` was done; ``number`` is a digest of all that must be the same on every rank; ``details`` says it in
    words, by name."""

    what: str
    number: int
    details: Callable[[], dict[str, str]]

    def told(self) -> list[Any]:
        """All of it, of what JSON knows."""
        return [self.what, self.number, self.details()]


def step_of(optimizer: torch.optim.Optimizer, *, alike: bool = True) -> Doing:
    """A step of this optimizer, with the numbers in its groups (learning rates, betas, weight decay) where they are
    ``alike`` on all ranks. One that is none of elements may keep there what it has computed of its shards."""
    pairs = list(_numbers(optimizer)) if alike else []
    words = array("d", (number for _, number in pairs)).tobytes()
    name = type(optimizer).__name__
    return Doing(f"a step of {name}", crc32(words, crc32(name.encode())), partial(_spoken, pairs))


def _spoken(pairs: list[tuple[str, float]]) -> dict[str, str]:
    return {name: repr(number) for name, number in pairs}


def _numbers(optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, float]]:
    """The numbers in the groups of an optimizer, with names."""
    groups = optimizer.param_groups
    for index, group in enumerate(groups):
        suffix = f" of group {index}" if len(groups) > 1 else ""
        for key, value in group.items():
            if key in _LEFT_OUT:
                continue
            kind = type(value)
            if kind is float or kind is int or kind is bool:
                yield key + suffix, float(value)
            elif kind is tuple or kind is list:
                for place, member in enumerate(value):
                    if type(member) in (float, int):
                        yield f"{key}[{place}]{suffix}", float(member)
            elif kind is torch.Tensor and value.device.type == "cpu" and value.numel() == 1:
                yield key + suffix, float(value)


def backward_onto(gradient: bool) -> Doing:
    """A backward that adds to gradients, or makes the first."""
    what = "a backward that adds to gradients that are there" if gradient else "a backward"
    return Doing(what, int(gradient), dict)


class Loaded:
    """A state dict that is loaded, tensor by tensor; ``of`` what, if not of the model."""

    def __init__(self, of: str = "") -> None:
        self._what = f"load_state_dict of {of}" if of else "load_state_dict"
        self._digests: dict[str, int] = {}

    @property
    def keys(self) -> list[str]:
        """What was loaded."""
        return list(self._digests)

    @property
    def digests(self) -> dict[str, int]:
        """Of what was loaded, by name."""
        return dict(self._digests)

    def add(self, key: str, whole: Any) -> None:
        """``whole`` is what the state dict has for ``key``."""
        if isinstance(whole, torch.Tensor) and whole.layout == torch.strided and not whole.is_meta:
            flat = whole.detach().reshape(-1)
            every = max(1, flat.numel() // _SAMPLED)
            self._digests[key] = int(digest(flat[::every].contiguous().cpu())) if flat.numel() else 0

    def doing(self) -> Doing:
        """Said of it at the next step."""
        digests = dict(sorted(self._digests.items()))
        number = join((*(crc32(key.encode()) for key in digests), *digests.values()))
        return Doing(
            self._what, number, lambda: {k: f"{v % (1 << 64):016x}" for k, v in digests.items()}
        )
