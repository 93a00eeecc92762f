"""Parts from which computed rules are put together.

:class:`Factors` collects the factors of one call. A place is written as a dim (``2`` means ``Cut(2)``), a
``Cut``, ``SUM`` or ``None``; tensors that are not named are whole. Dims of extent 0 or 1 are never cut, and a
bool tensor is never a sum, so such factors are left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

import torch

from hetspmd.errors import RuleError
from hetspmd.rules.rule import SUM, Call, Cut, Factor, Local, LocalCall, Place
from hetspmd.trace.graph import DEVICE, DType

Where: TypeAlias = int | Place


class Factors:
    """The factors of ``call``, in the order in which they were added."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self._found: list[Factor] = []

    def add(self, name: str, inputs: Mapping[int, Where], outputs: Mapping[int, Where]) -> None:
        """Add a factor by its places; its size follows from its cuts. Raises RuleError where they disagree."""
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
            self._found.append(Factor(name, sizes[0], ins, outs))

    def done(self) -> tuple[Factor, ...]:
        """What was added."""
        return tuple(self._found)


def _place(where: Where) -> Place:
    return Cut(where) if isinstance(where, int) else where


def norm(dim: int, ndim: int) -> int:
    """The dim counted from the front; a scalar counts as one-dimensional, as it does in torch."""
    return dim + max(ndim, 1) if dim < 0 else dim


def linear(call: Call, *groups: tuple[int, ...]) -> tuple[frozenset[int], ...]:
    """The linear sets of ``call`` that dtypes allow: no bool, and no rounding to an integer."""
    outs = [t.dtype for t in call.outputs if t is not None]
    if "bool" in outs:
        return ()
    kept = []
    for group in groups:
        ins = [call.inputs[i].dtype for i in group]
        rounds = any(_is_float(i) and not _is_float(o) for i in ins for o in outs)
        if group and "bool" not in ins and not rounds:
            kept.append(frozenset(group))
    return tuple(kept)


def _is_float(dtype: str) -> bool:
    return dtype.startswith(("float", "bfloat", "complex"))


def zeros_call(local: Local) -> LocalCall:
    """The call of a device without units: zeros of the local output shapes, None where the op gives None."""
    types = local.call.outputs
    shapes = tuple(None if t is None else s for s, t in zip(local.output_shapes, types, strict=True))
    dtypes = tuple(None if t is None else DType(t.dtype) for t in types)
    return zeros_or_none, (shapes, dtypes, DEVICE), {}


def zeros_or_none(
    shapes: list[list[int] | None], dtypes: list[torch.dtype | None], device: torch.device
) -> tuple[torch.Tensor | None, ...]:
    """Zeros of each shape; None for a shape that is None."""
    return tuple(
        None if s is None else torch.zeros(s, dtype=d, device=device)
        for s, d in zip(shapes, dtypes, strict=True)
    )
