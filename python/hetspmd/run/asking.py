"""Who takes a parameter that lies in shards into the hand: an optimizer's step, hetspmd, or other code.

An optimizer's step (which is looked at by itself, :mod:`hetspmd.run.optimizer_guard`) and hetspmd are served: for
them a shard is a tensor like any other. Other code takes it for the whole parameter.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, Final

import torch

OF_HETSPMD: Final = str(Path(__file__).parents[1]) + os.sep
OF_TORCH: Final = str(Path(torch.__file__).parent) + os.sep
_SERVED: Final = (
    OF_HETSPMD,
    *(
        str(Path(OF_TORCH) / part)
        for part in ("optim", "testing", "_tensor_str.py", "_dynamo", "_inductor", "_subclasses")
    ),
)


class _Steps(threading.local):
    """How many steps of optimizers this thread is in, one within the other, and the shards that are plain
    parameters as long, with their classes."""

    def __init__(self) -> None:
        self.depth = 0
        self.shards: list[tuple[torch.Tensor, type]] = []

    def plain(self, parameters: Iterable[torch.Tensor]) -> None:
        for parameter in parameters:
            kind = type(parameter)
            plain = getattr(kind, "plain_class", None)
            if plain is not None:
                self.shards.append((parameter, kind))
                parameter.__class__ = plain

    def over(self) -> None:
        self.depth = 0
        for parameter, kind in self.shards:
            parameter.__class__ = kind
        self.shards = []


_STEPS: Final = _Steps()


def begin_step(parameters: Iterable[torch.Tensor]) -> None:
    """Say that an optimizer's step begins in this thread, for which its parameters are plain ones."""
    if _STEPS.depth and not _is_within_a_step():
        no_step()  # it failed
    _STEPS.depth += 1
    _STEPS.plain(parameters)


def end_step() -> None:
    """Say that the innermost step is over."""
    if _STEPS.depth <= 1:
        no_step()
    else:
        _STEPS.depth -= 1


def no_step() -> None:
    """Say that no optimizer steps in this thread, whatever has ended its step."""
    if _STEPS.depth:
        _STEPS.over()


def is_stepping() -> bool:
    """Whether an optimizer steps in this thread."""
    return _STEPS.depth > 0


@contextmanager
def outside_steps() -> Iterator[None]:
    """Within the context no optimizer steps in this thread; those that did go on afterwards, unless it fails."""
    depth, shards = _STEPS.depth, [parameter for parameter, _ in _STEPS.shards]
    no_step()
    yield
    _STEPS.depth = depth
    _STEPS.plain(shards)


def is_asked_by_user(frame: FrameType | None) -> bool:
    """Whether it is neither hetspmd nor an optimizer's step that asks in ``frame``."""
    if _STEPS.depth:
        return False
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(_SERVED):
            return False
        if not file.startswith(OF_TORCH):
            break
        frame = frame.f_back
    passed = set()
    while frame is not None:
        if _is_a_step(frame):
            closure = frame.f_locals.get("closure")
            return getattr(closure, "__code__", None) in passed
        passed.add(frame.f_code)
        frame = frame.f_back
    return True


def _is_within_a_step() -> bool:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if _is_a_step(frame):
            return True
        frame = frame.f_back
    return False


def _is_a_step(frame: FrameType) -> bool:
    own: Any = frame.f_locals.get("self") if frame.f_code.co_name == "step" else None
    return isinstance(own, torch.optim.Optimizer)
