"""Factors from places: for ops whose dims change number, order or unit between inputs and outputs.

Where all tensors of a call can name their dims, :mod:`hetspmd.rules.terms` says the same in fewer words.
:class:`Factors` collects the factors of one call. A place is written as a dim (``2`` means ``Cut(2)``), a
``Cut``, ``SUM`` or ``None``; tensors that are not named are whole. Dims of extent 0 or 1 are never cut, and a
bool tensor is never a sum, so such factors are left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

from hetspmd.errors import RuleError
from hetspmd.rules.rule import SUM, Call, Cut, Factor, Place

Where: TypeAlias = int | Place


class Factors:
    """The factors of ``call``, in the order in which they were added."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self._factors: list[Factor] = []

    def add(self, name: str, inputs: Mapping[int, Where], outputs: Mapping[int, Where]) -> None:
        """Add a factor; its size follows from its cuts. Raises RuleError where they disagree."""
        call = self._call
        ins = tuple(_place(inputs.get(i)) for i in range(len(call.inputs)))
        outs = tuple(_place(outputs.get(i)) for i in range(len(call.outputs)))
        sizes: list[int] = []
        for place, type_ in zip((*ins, *outs), (*call.inputs, *call.outputs), strict=True):
            if type_ is None:
                if place is not None:
                    raise RuleError(f"{call.op}: factor {name} lies in an output that is None")
            elif place is SUM:
                if type_.dtype == "bool":
                    return
            elif isinstance(place, Cut):
                extent = type_.shape[place.dim]
                if place.unit < 1 or extent % place.unit:
                    raise RuleError(f"{call.op}: factor {name}: {extent} elements in units of {place.unit}")
                sizes.append(extent // place.unit)
        if len(set(sizes)) != 1:
            raise RuleError(f"{call.op}: factor {name} has sizes {sizes}")
        if sizes[0] > 1:
            self._factors.append(Factor(name, sizes[0], ins, outs))

    def done(self) -> tuple[Factor, ...]:
        """What was added."""
        return tuple(self._factors)


def _place(where: Where) -> Place:
    return Cut(where) if isinstance(where, int) else where
