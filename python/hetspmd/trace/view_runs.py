"""What a view does to dims: the shortest runs of dims of one shape that are runs of dims of the other."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from math import prod
from operator import mul
from typing import Final

from hetspmd.trace.graph import Instruction

RESHAPES: Final = frozenset({"aten.view.default", "aten._unsafe_view.default", "aten.reshape.default"})
"""Views whose second argument is the shape of the result."""
_SQUEEZES: Final = frozenset(f"aten.squeeze.{name}" for name in ("default", "dim", "dims"))
_VIEWS: Final = RESHAPES | _SQUEEZES | {"aten.unsqueeze.default"}
SWAPS: Final = frozenset({"aten.transpose.int", "aten.t.default", "aten.permute.default"})
"""Ops by which dims change places."""


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive dims of a view's input and of its output that hold the same elements in the same order, slowest
    dim first. Dims of extent 1 are in no run."""

    source: tuple[int, ...]
    target: tuple[int, ...]

    @property
    def keeps(self) -> bool:
        """Whether a dim stays as it is."""
        return len(self.source) == len(self.target) == 1


def view_runs(source: tuple[int, ...], target: tuple[int, ...]) -> list[Run]:
    """The shortest runs of a view from shape ``source`` to shape ``target``, which have as many elements."""
    if prod(source) == 0:
        return []
    ins = [d for d, extent in enumerate(source) if extent != 1]
    outs = [d for d, extent in enumerate(target) if extent != 1]
    runs = []
    i = j = 0
    while i < len(ins) and j < len(outs):
        first = i, j
        a, b = source[ins[i]], target[outs[j]]
        i, j = i + 1, j + 1
        while a != b:
            if a < b:
                a, i = a * source[ins[i]], i + 1
            else:
                b, j = b * target[outs[j]], j + 1
        runs.append(Run(tuple(ins[first[0] : i]), tuple(outs[first[1] : j])))
    return runs


def refined(shape: tuple[int, ...], by: tuple[int, ...]) -> tuple[int, ...]:
    """A shape with its dims split where a dim of another begins, to which a view leads: (7, 18, 8) by (42, 24) is
    (7, 6, 3, 8)."""
    begins = set(accumulate(by, mul))
    dims: list[int] = []
    start = 1
    for extent in shape:
        end, last = start * extent, start
        for begin in sorted(b for b in begins if start < b < end):
            if begin % last == 0 and end % begin == 0:
                dims.append(begin // last)
                last = begin
        dims.append(end // last)
        start = end
    return tuple(dims)


def is_view(op: str) -> bool:
    """Whether an op gives its input another shape, its elements in the same order."""
    return op in _VIEWS


def order_of(instruction: Instruction, ndim: int) -> tuple[int, ...] | None:
    """Of an instruction that lets dims change places: the dim of the input for each of the output. Else None."""
    if instruction.op not in SWAPS:
        return None
    order = list(range(ndim))
    if instruction.op == "aten.permute.default":
        return tuple(d % ndim for d in instruction.args[1])
    a, b = (0, 1) if instruction.op == "aten.t.default" else instruction.args[1:3]
    if ndim > 1:
        order[a], order[b] = order[b], order[a]
    return tuple(order)
