"""Warns of what forward leaves on the model where it is this rank's rows alone.

``self.last = h.detach()`` is put there after each step, as on one device. Where the program divides ``h`` along
dim 0 it has this rank's rows, so that whatever is computed from it (a norm, a plot) is of a part of the batch.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch

from hetspmd.errors import KeptRowsWarning
from hetspmd.trace.graph import Graph
from hetspmd.trace.host.places import text
from hetspmd.trace.host.templates import from_text


class KeptRows:
    """What a graph leaves behind, of which the whole shapes are compared with what is there in the first step.

    ``own`` is the number of the model's own outputs. ``told`` are places that were warned of; None: warn of none.
    """

    def __init__(self, graph: Graph, own: int, told: set[str] | None) -> None:
        tensors = [output.tensor for output in graph.outputs[own:]]
        self._own, self._told, self._writes = own, told, graph.host.writes
        self._shapes = [None if t is None else tuple(graph.tensors[t].shape) for t in tensors]
        self._looks = told is not None and bool(self._shapes)

    def look(self, outputs: Sequence[torch.Tensor | None]) -> None:
        """Warn once of each place that has this rank's rows; ``outputs`` are all of the step's, by position."""
        if not self._looks or self._told is None:
            return
        self._looks = False
        parts = {
            number
            for number, (shape, output) in enumerate(zip(self._shapes, outputs[self._own :], strict=False))
            if output is not None and shape is not None and tuple(output.shape) != shape
        }
        places = [text(w.root, w.path) for w in self._writes if parts & _numbers(w.value)]
        new = [place for place in dict.fromkeys(places) if place not in self._told]
        if new:
            self._told.update(new)
            one = len(new) == 1
            warnings.warn(
                f"{', '.join(new)}, which forward leaves on the model, {'has' if one else 'have'} this rank's rows "
                "of the batch alone, since the program divides it: what is computed from it (a norm, a mean, a "
                "plot) is of a part of the batch. Write HAP(..., gather_outputs=True) for the whole of it on every "
                "rank",
                KeptRowsWarning,
                stacklevel=2,
            )


def _numbers(value: str) -> set[int]:
    """Which tensors, by their numbers, are in the template of a value."""
    numbers: set[int] = set()

    def tensor(number: int) -> torch.Tensor:
        numbers.add(number)
        return torch.zeros(())

    if value:
        from_text(value, tensor)
    return numbers
