"""An example with more or fewer rows: which dims of its inputs have them, and the example with as many as wanted.

Rows are units of the logical axes of dim 0 of the inputs (:attr:`hetspmd.rules.theory.Theory.batch_axes`); every
dim of an input on such an axis grows with them, wherever it is nested. Inputs may have other things in dim 0
(positions, a mask over pairs of tokens), and where an op cannot be divided along the batch there is no such axis.
So several sets of dims are tried, those of most inputs first, and the first counts with which the model makes the
same calls for twice the rows (:func:`hetspmd.cost.measured_steps.identity`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hetspmd.cluster.step_curves import RowDim
from hetspmd.cost.measured_steps import identity, rows_of
from hetspmd.errors import BatchSizeError
from hetspmd.rules.theory import Theory, derive
from hetspmd.trace.compat.trees import flatten, unflatten
from hetspmd.trace.trace import trace

Batch = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments."""


@dataclass(frozen=True)
class RowPlaces:
    """Where a batch has rows.

    identity  of the model's step, whatever the rows
    rows      of each dim that grows with the rows: its input, the dim, and the elements of a row
    leaves    the place of each of these inputs among the batch's leaves
    """

    identity: str
    rows: tuple[RowDim, ...]
    leaves: tuple[int, ...]

    def resized(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], rows: int) -> Batch:
        """The batch with so many rows: its own, over and over. Tensors on the meta device become zeros."""
        leaves, spec = flatten((args, dict(kwargs)))
        for leaf, (_, dim, each) in zip(self.leaves, self.rows, strict=True):
            leaves[leaf] = _repeated(leaves[leaf], dim, each, rows)
        filled = [
            torch.zeros_like(leaf, device="cpu") if isinstance(leaf, torch.Tensor) and leaf.is_meta else leaf
            for leaf in leaves
        ]
        args, kwargs = unflatten(filled, spec)
        return args, dict(kwargs)


def _repeated(tensor: torch.Tensor, dim: int, each: int, rows: int) -> torch.Tensor:
    first = torch.arange(rows, device=tensor.device) % (tensor.shape[dim] // each)
    index = first[:, None] * each + torch.arange(each, device=tensor.device)
    return tensor.detach().index_select(dim, index.flatten())


def find_rows(name: str, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> RowPlaces:
    """Where the example of the model ``name`` has rows.

    Raises BatchSizeError for a model that computes something else for more rows, or refuses them, with the reason.
    """
    leaves, spec = flatten((args, dict(kwargs)))
    tensors = [n for n, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor) and leaf.ndim]
    if tensors and all(
        leaves[n].shape[0] == 1 for n in tensors
    ):  # of one row nothing says what grows with it
        for n in tensors:
            leaves[n] = _repeated(leaves[n], 0, 1, 2)
        args, kwargs = unflatten(leaves, spec)
    theory = derive(trace(model, args, kwargs), quiet=True)
    why = "no input has a dim 0 that grows with the rows"
    for rows, places in _candidates(theory):
        count = rows_of(theory.graph, rows)
        own = identity(theory.graph, rows)
        if count is None or own is None:
            continue
        found = RowPlaces(own, rows, places)
        what = f"{2 * count} rows of {', '.join(dict.fromkeys(path for path, _, _ in rows))}"
        try:
            more = trace(model, *found.resized(args, kwargs, 2 * count))
        except Exception as error:  # the model's own code may raise anything
            why = f"with {what} it raises {type(error).__name__}: {' '.join(str(error).split())}"
            continue
        if identity(more, rows) == own:
            return found
        why = f"with {what} it computes something else than with {count}"
    raise BatchSizeError(
        f"{name}: the model cannot be given more or fewer rows: {why}. Let build() return a model that takes any "
        "number of rows, or leave its steps out with --no-steps"
    )


def _candidates(theory: Theory) -> list[tuple[tuple[RowDim, ...], tuple[int, ...]]]:
    """Dims that may grow with the rows, and the places of their inputs among the leaves. First those on logical
    axes of dim 0, of as many units, then of one group; then dim 0 of inputs of one extent, where ops stand in the
    way of axes."""
    graph, axes = theory.graph, theory.axes
    inputs = [i for i in graph.inputs if graph.tensors[i.tensor].shape and i.leaf >= 0]
    units: dict[int, set[int]] = {}
    groups: dict[int, set[int]] = {}
    extents: dict[int, list[tuple[RowDim, int]]] = {}
    for each in inputs:
        axis = axes.axis(each.tensor, 0)
        if axis is not None:
            units.setdefault(axis.units, set()).add(axis.group)
            groups.setdefault(axis.group, set()).add(axis.group)
        extents.setdefault(graph.tensors[each.tensor].shape[0], []).append(((each.path, 0, 1), each.leaf))

    def on_axes(of: set[int]) -> list[tuple[RowDim, int]]:
        found: list[tuple[RowDim, int]] = []
        for each in inputs:
            for dim, extent in enumerate(graph.tensors[each.tensor].shape):
                axis = axes.axis(each.tensor, dim)
                if axis is not None and axis.group in of:
                    found.append(((each.path, dim, extent // axis.units), each.leaf))
        return found

    def weight(of: list[tuple[RowDim, int]]) -> tuple[int, int]:
        heads = {leaf for (_, dim, _), leaf in of if dim == 0}
        nbytes = sum(graph.tensors[i.tensor].nbytes for i in inputs if i.leaf in heads)
        return len(heads), nbytes

    sets: list[list[tuple[RowDim, int]]] = []
    for several in ([*map(on_axes, units.values())], [*map(on_axes, groups.values())], [*extents.values()]):
        sets += sorted(several, key=weight, reverse=True)
    return [
        (tuple(rows for rows, _ in one), tuple(leaf for _, leaf in one))
        for n, one in enumerate(sets)
        if one not in sets[:n]
    ]
