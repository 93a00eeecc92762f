"""A capturer for CPUs, for tests: as strict as CUDA graphs are.

It records the ATen ops of a call and repeats them on the same memory, and no Python of the call. As on a GPU

- nothing is computed while a call is captured: what it writes to is put back, and its results hold rubbish;
- what the host would have to look at (a value, a shape that depends on values) cannot be captured;
- random numbers come of the generators that were named, anew in each repetition;
- each repetition overwrites the outputs. All other memory of the capture holds rubbish afterwards, since on a GPU
  another capture would have used it;
- so do the outputs of the captures that were made later into the same pool, which may lie there on a GPU.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from hetspmd.dist.random import may_draw
from hetspmd.run.capturer import Capture, CaptureError, Capturer
from hetspmd.trace.compat.tensors import OpOverload, TorchDispatchMode, memory_of
from hetspmd.trace.compat.trees import flatten

T = TypeVar("T")

_UNREADABLE = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
_RUBBISH = 85
"""Of integers; floats are NaN."""


class SimulatedCapturer(Capturer):
    """Records ops on CPUs. ``captures`` and ``replays`` count them."""

    device_type = "cpu"

    def __init__(self) -> None:
        self.captures = self.replays = 0

    def warm_up(self, call: Callable[[], T]) -> T:
        return call()

    def pool(self) -> Any:
        return list[weakref.ref[_Outputs]]()

    def capture(self, call: Callable[[], Any], generators: Sequence[torch.Generator], pool: Any) -> Capture:
        states = [generator.get_state() for generator in generators]
        recorder = _Recorder(generators)
        try:
            with recorder:
                outputs = call()
        finally:
            recorder.undo()
            for generator, state in zip(generators, states, strict=True):
                generator.set_state(state)
        kept = {memory_of(t) for t in _tensors(outputs)}
        made = list(recorder.made.values())
        passing = [t for t in made if memory_of(t) not in kept]
        _spoil(made)
        self.captures += 1
        own = _Outputs([t for t in made if memory_of(t) in kept])
        pool.append(weakref.ref(own))
        place = len(pool)

        def replay() -> None:
            assert own is pool[place - 1]()
            for later in pool[place:]:
                _spoil([] if (there := later()) is None else there.tensors)
            _spoil(made)
            for op in recorder.ops:
                op.repeat()
            _spoil(passing)
            self.replays += 1

        return Capture(outputs, replay)


@dataclass
class _Outputs:
    """What a capture has made and returned."""

    tensors: list[torch.Tensor]


@dataclass
class _Op:
    """An op that was recorded; ``results`` are those with memory of their own, None for others."""

    function: OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: list[torch.Tensor | None]

    def repeat(self) -> None:
        found = _leaves(self.function(*self.args, **self.kwargs))
        for result, value in zip(self.results, found, strict=True):
            if result is not None:
                result.copy_(value)


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's is untyped
    def __init__(self, generators: Sequence[torch.Generator]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's is untyped
        self.ops: list[_Op] = []
        self.made: dict[int, torch.Tensor] = {}
        self._seeds = {
            g.initial_seed() for g in generators
        }  # ops are given other objects for the same generators
        self._before: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._known: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if any(tag in func.tags for tag in _UNREADABLE) and not _has_numbers(func, args):
            raise CaptureError(f"{func} looks at values, and nothing is computed while calls are captured")
        drawn = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Generator)]
        if any(g.initial_seed() not in self._seeds for g in drawn) or (
            not drawn and may_draw(func, args, kwargs)
        ):
            raise CaptureError(f"{func} draws from a generator that was not named")
        given = list(_tensors((args, kwargs)))
        self._known.update(map(memory_of, given))
        for tensor in _written(func, args, kwargs):
            memory = memory_of(tensor)
            if memory not in self.made and memory not in self._before:
                whole = tensor.new_empty(0).set_(tensor.untyped_storage())
                self._before[memory] = whole, whole.clone()
        results = func(*args, **kwargs)
        own: list[torch.Tensor | None] = []
        for leaf in _leaves(results):
            fresh = isinstance(leaf, torch.Tensor) and memory_of(leaf) not in self._known
            own.append(leaf if fresh else None)
            if fresh:
                self.made[memory_of(leaf)] = leaf
                self._known.add(memory_of(leaf))
        self.ops.append(_Op(func, args, kwargs, own))
        return results

    def undo(self) -> None:
        """Put back what was written to."""
        for tensor, before in self._before.values():
            tensor.copy_(before)
        self._before.clear()


def _has_numbers(func: OpOverload, args: tuple[Any, ...]) -> bool:
    """Whether an op that indexes is given indices, not masks."""
    masks = torch.bool, torch.uint8
    return func is torch.ops.aten.index.Tensor and all(t.dtype not in masks for t in _tensors(args[1]))


def _leaves(values: Any) -> list[Any]:
    found: list[Any] = flatten(values)[0]
    return found


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    return (leaf for leaf in _leaves(values) if isinstance(leaf, torch.Tensor))


def _written(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[torch.Tensor]:
    """What an op writes to."""
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            yield from _tensors(value)


def _spoil(tensors: Sequence[torch.Tensor]) -> None:
    for tensor in tensors:
        if tensor.is_floating_point() or tensor.is_complex():
            tensor.fill_(float("nan"))
        else:
            tensor.fill_(True if tensor.dtype == torch.bool else _RUBBISH)
