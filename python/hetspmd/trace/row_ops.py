"""Ops that do not mind in which order the rows of a dim come, with what else has the dim in a call of theirs.

If the elements along the dim change places in all tensors that have it, alike, then they do so in the results, and
nothing else changes, but for the order in which a sum is rounded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Final

import torch

from hetspmd.errors import TraceError
from hetspmd.trace.graph import Graph, Instruction
from hetspmd.trace.values import torch_op
from hetspmd.trace.view_runs import order_of

Member = tuple[int, int]
"""(tensor id, dim)."""
Shape = tuple[int, ...]
Places = list[int | None]
"""By position, the inputs first and then the outputs: the dim of each tensor that is the same rows, or None."""

_COPIES: Final = frozenset(
    f"aten.{name}.default" for name in ("alias", "clone", "detach", "_to_copy", "expand")
)
_FILLED: Final = frozenset(f"aten.{name}.default" for name in ("zeros", "ones", "full"))
_FILLED_LIKE: Final = frozenset(f"aten.{name}_like.default" for name in ("zeros", "ones", "full", "empty"))
_ELEMENTWISE: Final = _COPIES | _FILLED | _FILLED_LIKE | {"aten.native_dropout_backward.default"}
"""Beside those that torch says are pointwise."""
_SUMS: Final = frozenset({"aten.sum.dim_IntList", "aten.sum.default", "aten.mean.dim", "aten.mean.default"})
_ALONG: Final = {
    "aten._softmax.default": 1, "aten._log_softmax.default": 1, "aten._safe_softmax.default": 1,
    "aten._softmax_backward_data.default": 2, "aten._log_softmax_backward_data.default": 2,
    "aten.gather.default": 1, "aten.scatter.value": 1, "aten.scatter.src": 1, "aten.scatter_add.default": 1,
    "aten.slice.Tensor": 1, "aten.slice_backward.default": 2, "aten.cat.default": 1,
    "aten.split.Tensor": 2, "aten.split_with_sizes.default": 2,
}  # fmt: skip
"""Ops of tensors with equally many dims that do the same at each index beside those of one dim, and the position of
the argument that says of which."""
_REMOVED: Final = {"aten.select.int": 1, "aten.unbind.int": 1, "aten.select_backward.default": 2}
"""Ops whose results, or whose input, are without one dim, and the position of the argument that says which."""


def same_rows(graph: Graph, instruction: Instruction, tensor: int, dim: int) -> list[Member] | None:
    """What else in an instruction has the rows of ``dim`` of a tensor that it reads or makes. None where it is not
    known that their order does not matter."""
    tensors = (*instruction.inputs, *instruction.outputs)
    shapes = [() if t < 0 else graph.tensors[t].shape for t in tensors]
    tied: set[Member] = set()
    for position in [p for p, t in enumerate(tensors) if t == tensor]:
        places = row_dims(instruction, shapes, position, dim)
        if places is None:
            return None
        tied |= {(t, d) for t, d in zip(tensors, places, strict=True) if d is not None and t >= 0}
    return sorted(tied)


def row_dims(instruction: Instruction, shapes: Sequence[Shape], position: int, dim: int) -> Places | None:
    """By position, of inputs and then outputs of these shapes: the dims that have the rows of ``dim`` of the one at
    ``position``. None where it is not known that their order does not matter."""
    op = instruction.op
    order = order_of(instruction, len(shapes[0]))
    if order is not None:
        source = dim if position == 0 else order[dim]
        return [source, order.index(source)]
    if op in _ELEMENTWISE or _is_pointwise(op):
        return _broadcast(shapes, len(shapes[position]) - dim, shapes[position][dim])
    if op in _SUMS:
        return _sum(instruction, shapes, position, dim)
    if op in _ALONG:
        given = instruction.args[_ALONG[op] :][:1] or (0,)
        beside = given[0] % len(shapes[0]) != dim and len({shape[dim : dim + 1] for shape in shapes}) == 1
        return [dim] * len(shapes) if beside else None
    if op in _REMOVED:
        return _removed(instruction, shapes, position, dim)
    special = _SPECIAL.get(op)
    return None if special is None else special(shapes, position, dim)


@cache
def _is_pointwise(op: str) -> bool:
    try:
        overload = torch_op(op)
    except (TraceError, ValueError):
        return False
    tags = overload.tags
    return torch.Tag.pointwise in tags and torch.Tag.nondeterministic_seeded not in tags


def _broadcast(shapes: Sequence[Shape], back: int, extent: int) -> Places | None:
    """The dim ``back`` from the end, in the tensors that have it and do not repeat along it."""
    if extent == 1:
        return None
    dims = [len(shape) - back for shape in shapes]
    return [d if d >= 0 and shape[d] == extent else None for d, shape in zip(dims, shapes, strict=True)]


def _sum(instruction: Instruction, shapes: Sequence[Shape], position: int, dim: int) -> Places | None:
    ndim = len(shapes[0])
    given: Any = instruction.args[1] if instruction.op.count("dim") and len(instruction.args) > 1 else None
    summed = {d % ndim for d in given or range(ndim)}
    kept = len(shapes[1]) == ndim
    left = [d for d in range(ndim) if kept or d not in summed]
    source = dim if position == 0 else left[dim]
    return [source, None if source in summed else left.index(source)]


def _removed(instruction: Instruction, shapes: Sequence[Shape], position: int, dim: int) -> Places | None:
    longest = max(map(len, shapes))
    given = instruction.args[_REMOVED[instruction.op] :][:1] or (0,)
    gone = given[0] % longest
    whole = dim if len(shapes[position]) == longest else dim + (dim >= gone)
    return None if whole == gone else [whole if len(s) == longest else whole - (whole > gone) for s in shapes]


def _product(shapes: Sequence[Shape], position: int, dim: int) -> Places:
    """Of ``a @ b``: rows of a, columns of b, or the index that is summed."""
    if position == 2:
        return [0, None, 0] if dim == 0 else [None, 1, 1]
    if (position, dim) == (0, 0):
        return [0, None, 0]
    return [None, 1, 1] if (position, dim) == (1, 1) else [1, 0, None]


def _added_product(shapes: Sequence[Shape], position: int, dim: int) -> Places:
    """Of ``c + a @ b``, where c is as the product, or repeats."""
    if position == 0:
        dim, position = dim + 2 - len(shapes[0]), 3
    places = _product(shapes[1:], position - 1, dim)
    rows = places[2]
    at = -1 if rows is None else rows + len(shapes[0]) - 2
    own = at if at >= 0 and rows is not None and shapes[0][at] == shapes[3][rows] else None
    return [own, *places]


def _norm(shapes: Sequence[Shape], position: int, dim: int) -> Places | None:
    """Of a layer's norm: x, weight and bias give the result, mean and 1 / deviation of each row."""
    outputs = shapes[-3:]
    if outputs[1][dim : dim + 1] != outputs[0][dim : dim + 1] or 1 <= position < len(shapes) - 3:
        return None
    return [dim, *[None] * (len(shapes) - 4), dim, dim, dim]


def _norm_backward(shapes: Sequence[Shape], position: int, dim: int) -> Places | None:
    """Of the gradient, x, mean and 1 / deviation, with weight and bias: the gradients of x, weight and bias."""
    given = len(shapes) - 3
    if shapes[2][dim : dim + 1] != shapes[1][dim : dim + 1] or not (position < 4 or position == given):
        return None
    return [dim] * 4 + [None] * (given - 4) + [dim, None, None]


def _embedding(shapes: Sequence[Shape], position: int, dim: int) -> Places | None:
    """Of rows of a table by their indices."""
    return [None, dim, dim] if position == 1 or (position == 2 and dim < len(shapes[1])) else None


def _embedding_backward(shapes: Sequence[Shape], position: int, dim: int) -> Places | None:
    return [dim, dim, None] if position < 2 and dim < len(shapes[1]) else None


_SPECIAL: Final[dict[str, Callable[[Sequence[Shape], int, int], Places | None]]] = {
    "aten.mm.default": _product,
    "aten.addmm.default": _added_product,
    "aten.native_layer_norm.default": _norm,
    "aten.native_layer_norm_backward.default": _norm_backward,
    "aten.embedding.default": _embedding,
    "aten.embedding_dense_backward.default": _embedding_backward,
}
