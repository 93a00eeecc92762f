"""What a graph says of the Python that ran beside it. Torch-free, stored in plan files."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Read:
    """A value that the forward read and that is no tensor op's: another value may make another graph.

    ``root`` and ``path`` say where it lies (:mod:`hetspmd.trace.host.places`), ``value`` is its fingerprint.
    """

    root: str
    path: tuple[str, ...]
    value: str


@dataclass(frozen=True, slots=True)
class Write:
    """A value that the forward leaves behind, to be put there after each step.

    ``value`` is a template (:func:`hetspmd.trace.host.templates.to_text`) whose tensors are outputs of the graph
    beyond the model's own, or constants (``Graph.left_behind``). ``removed``: the attribute is deleted
    instead.
    """

    root: str
    path: tuple[str, ...]
    value: str
    removed: bool = False


@dataclass(frozen=True, slots=True)
class Counter:
    """A number that every step increases by ``step``, and nothing else depends on."""

    root: str
    path: tuple[str, ...]
    step: int | float


@dataclass(frozen=True, slots=True)
class Number:
    """A number of the model that is an input of the graph: ``tensor`` is its id, ``kind`` int or float."""

    root: str
    path: tuple[str, ...]
    kind: str
    tensor: int


@dataclass(frozen=True, slots=True)
class Host:
    """All of it, of one graph. ``kept`` says of each output beyond the model's own whether it is part of
    autograd's graph.

    ``draws`` is where Python code drew random numbers, or asked the system for random bytes; "" if it did not.
    """

    reads: tuple[Read, ...] = ()
    writes: tuple[Write, ...] = ()
    counters: tuple[Counter, ...] = ()
    numbers: tuple[Number, ...] = ()
    kept: tuple[bool, ...] = ()
    draws: str = ""
