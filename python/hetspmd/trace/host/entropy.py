"""Random numbers that a forward's Python draws: from ``random``, numpy, torch's default and other generators.

A draw is seen by the state that it leaves. The states are put back after each run of the Python, so that a
trace draws nothing as seen from outside, however often it runs the model.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from hetspmd.trace.compat.tensors import outside_modes

State = tuple[tuple[str, tuple[str, ...]], Any]
"""The place of a generator, and its state."""


@dataclass(frozen=True, slots=True)
class RandomSource:
    """A generator: its name, where it lies (one that belongs to no object: under "draws"), how its state is
    read and set."""

    name: str
    place: tuple[str, tuple[str, ...]]
    read: Callable[[], Any]
    set: Callable[[Any], object]


def global_sources() -> list[RandomSource]:
    """The generators that belong to no object. CUDA's counts only where CUDA was initialised, which this
    does not."""
    sources = [
        RandomSource("Python's random", ("draws", ("python",)), random.getstate, random.setstate),
        RandomSource(
            "torch's default generator", ("draws", ("torch",)), torch.get_rng_state, torch.set_rng_state
        ),
    ]
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch's
        sources.append(
            RandomSource(
                "CUDA's generator", ("draws", ("cuda",)), torch.cuda.get_rng_state, torch.cuda.set_rng_state
            )
        )
    numpy = sys.modules.get("numpy.random")
    if numpy is not None:
        sources.append(
            RandomSource("numpy's random", ("draws", ("numpy",)), numpy.get_state, numpy.set_state)
        )
    return sources


def source_of(value: object, root: str, path: tuple[str, ...]) -> RandomSource | None:
    """The generator that an object is, None if it is none."""
    name, place = f"the generator {''.join(path).removeprefix('.')}", (root, path)
    if isinstance(value, random.Random):
        return RandomSource(name, place, value.getstate, value.setstate)
    if isinstance(value, torch.Generator):
        return RandomSource(name, place, value.get_state, value.set_state)
    numpy = sys.modules.get("numpy.random")
    if numpy is None:
        return None
    if isinstance(value, numpy.RandomState):
        return RandomSource(name, place, value.get_state, value.set_state)
    bits = value.bit_generator if isinstance(value, numpy.Generator) else value
    if isinstance(bits, numpy.BitGenerator):
        return RandomSource(name, place, lambda: bits.state, lambda state: setattr(bits, "state", state))
    return None


def same_state(a: Any, b: Any) -> bool:
    """Whether two states of one generator are equal."""
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same_state(a[k], b[k]) for k in a)
    if isinstance(a, (tuple, list)):
        return len(a) == len(b) and (a == b if _plain(a) else all(map(same_state, a, b)))
    if hasattr(a, "tobytes"):
        return bool((a == b).all())
    return bool(a == b)


def _plain(state: Any) -> bool:
    return all(isinstance(s, (int, float, str, tuple, type(None))) for s in state)


class Draws:
    """The states of generators since they were first met."""

    def __init__(self) -> None:
        self._states: list[tuple[RandomSource, Any]] = []
        self._known: set[int] = set()
        for source in global_sources():
            self._states.append((source, source.read()))

    def watch(self, value: object, root: str, path: tuple[str, ...]) -> bool:
        """Watch an object from now on, if it is a generator."""
        if id(value) in self._known:
            return True
        source = source_of(value, root, path)
        if source is None:
            return False
        self._known.add(id(value))
        with outside_modes():
            self._states.append((source, source.read()))
        return True

    def changed(self) -> list[RandomSource]:
        """The generators that are not in the state they were in."""
        with outside_modes():
            return [source for source, state in self._states if not same_state(source.read(), state)]

    def states(self) -> list[State]:
        """The present states."""
        with outside_modes():
            return [(source.place, source.read()) for source, _ in self._states]

    def rewind(self) -> None:
        """Put all states back."""
        with outside_modes():
            for source, state in self._states:
                if not same_state(source.read(), state):
                    source.set(state)


def advance(states: list[State], value: Callable[[str, tuple[str, ...]], object]) -> None:
    """Put generators into these states; ``value`` finds one by its place."""
    sources = {source.place: source for source in global_sources()}
    for place, state in states:
        source = sources.get(place) or source_of(value(*place), *place)
        if source is not None and not same_state(source.read(), state):
            source.set(state)
