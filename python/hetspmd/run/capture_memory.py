"""Where captures read and write: which memory stays, who still needs it, and what is copied from and to it.

:mod:`hetspmd.run.captured_regions` says why.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from hetspmd.run.capturer import Capture

T = TypeVar("T")


@dataclass(eq=False)
class Place:
    """Where a tensor is read. ``known`` is one that lies there, of those that are there as long as the capture."""

    index: int
    address: int
    shape: torch.Size
    strides: tuple[int, ...]
    known: torch.Tensor | None

    @classmethod
    def of(cls, index: int, tensor: torch.Tensor, *, stays: bool) -> Place:
        """Where ``tensor`` lies. Unless it ``stays`` it is not held: parameters may move."""
        known = tensor if stays else None
        return cls(index, tensor.data_ptr(), tensor.shape, tensor.stride(), known)

    def has(self, value: Any) -> bool:
        """Whether a value lies there."""
        return (
            isinstance(value, torch.Tensor)
            and value.data_ptr() == self.address
            and value.shape == self.shape
            and value.stride() == self.strides
        )


@dataclass(eq=False)
class CapturedStretch:
    """A stretch that was captured. ``read``: what is read where it lies; ``copied``: where what is copied first
    goes; ``others``: what is no tensor."""

    capture: Capture
    read: list[Place]
    copied: list[tuple[int, torch.Tensor]]
    others: list[tuple[int, Any]]

    def run(self, values: Sequence[Any]) -> Any:
        """The outputs; None where the values are not as they were."""
        for place in self.read:
            value = values[place.index]
            if value is not place.known and not place.has(value):
                return None
        if any(values[index] is not other for index, other in self.others):
            return None
        if not all(_alike(values[index], to) for index, to in self.copied):
            return None
        for index, to in self.copied:
            to.copy_(values[index])
        self.capture.replay()
        return self.capture.outputs


class Variant:
    """What was captured for one set of places of parameters and buffers."""

    def __init__(self, tensors: Iterable[torch.Tensor], pool: Any) -> None:
        self.pool = pool
        """Where what is captured lies."""
        self.captured: dict[int, CapturedStretch] = {}
        """By the number of the stretch."""
        self.inputs: list[torch.Tensor] = []
        self.kept: dict[int, torch.Tensor] = {}
        self.steps = 0
        self.held: weakref.ref[Held] | None = None
        self._given = {_memory(t) for t in tensors} - {0}
        self._own: set[int] = set()

    def own(self, tensors: Iterable[Any]) -> None:
        """These are memory of the captures, and stay as long as they."""
        self._own.update(memory for t in tensors if (memory := _memory(t)))

    def owns(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is memory of the captures."""
        return _memory(tensor) in self._own

    def is_read_there(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is read where it lies."""
        return self.owns(tensor) or _memory(tensor) in self._given

    def is_held(self) -> bool:
        """Whether what the last step has saved is still needed."""
        held = None if self.held is None else self.held()
        return held is not None and not held.over


class Held:
    """A step that runs captured, from its forward until what it has saved is not needed any more."""

    def __init__(self, variant: Variant) -> None:
        self.variant, self.over, self.warms = variant, False, False

    def release(self) -> None:
        """Nothing of the step is needed any more."""
        self.over = True

    def inputs(self, given: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The batch, copied to where the captures read it."""
        to = self.variant.inputs
        if not to:
            with ordinary():
                to += [torch.empty_like(t, requires_grad=False) for t in given]
            self.variant.own(to)
        if not all(map(_alike, given, to)):
            return list(given)  # the stretches that read them will see it
        for place, value in zip(to, given, strict=True):
            place.copy_(value)
        return list(to)

    def keep(self, number: int, value: torch.Tensor) -> torch.Tensor:
        """The value, which captures read again and again in this step, where it stays: there, or copied there."""
        if self.variant.is_read_there(value):
            return value
        to = self.variant.kept.get(number)
        if to is None:
            with ordinary():
                to = self.variant.kept[number] = torch.empty_like(value, requires_grad=False)
            self.variant.own([to])
        return to.copy_(value) if _alike(value, to) else value

    def owns(self, tensor: torch.Tensor) -> bool:
        """Whether the next step overwrites a tensor."""
        return self.variant.owns(tensor)

    def copies(self, tensors: Sequence[T]) -> list[T]:
        """The tensors (or None), with copies of those that the next step overwrites."""
        results: list[Any] = list(tensors)
        there = [i for i, tensor in enumerate(results) if tensor is not None and self.owns(tensor)]
        overwritten = [results[i] for i in there]
        for i in there:
            results[i] = torch.empty_like(results[i])
        if there:
            torch._foreach_copy_([results[i] for i in there], overwritten)
        return results


def _alike(value: Any, to: torch.Tensor) -> bool:
    """Whether a value can be copied element by element."""
    return isinstance(value, torch.Tensor) and value.shape == to.shape and value.dtype == to.dtype


def _memory(tensor: Any) -> int:
    """The address of the memory of a tensor; 0 where there is none."""
    return tensor.untyped_storage().data_ptr() if isinstance(tensor, torch.Tensor) else 0


def without_views(outputs: Any) -> Any:
    """The same memory. Autograd refuses a view that is older than a change of what it is a view of, as those of
    parameters are after the first step."""
    if isinstance(outputs, (tuple, list)):
        return tuple([without_views(output) for output in outputs])
    return outputs.detach() if isinstance(outputs, torch.Tensor) else outputs


@contextmanager
def ordinary() -> Iterator[None]:
    """Tensors that are made are ordinary ones, with no place in autograd's graph, whatever surrounds this."""
    with torch.inference_mode(False), torch.no_grad():
        yield
