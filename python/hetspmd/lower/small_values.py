"""Saved values that say as much in fewer bytes, for a compiler that computes elementwise ops on the way.

*Where the maxima of a pooling lie.* Torch says for each maximum where it lies in its plane, in eight bytes. A byte
is enough for where it lies in its window. Of an output at row ``i`` and column ``j``, element ``(a, b)`` of a
window of ``k`` columns lies in row ``i s - p + a d`` and column ``j s - p + b d`` of the plane, of strides ``s``,
paddings ``p`` and dilations ``d``; it is element ``a k + b`` of the window. Inductor has ops for that, whose bytes
lie in the order in which it goes through memory; windows that it does not compute itself are counted in by ATen's.

*Where a rectifier has cut.* The gradient of ``relu`` reads of its result only whether it is above the threshold.

*What a pooling was given.* Its gradient reads no more of that than the shape.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from hetspmd.lower.emit import DTYPE, SHAPE, item, take_saved
from hetspmd.trace.compat.compilers import pooling_by_offsets
from hetspmd.trace.values import torch_dtype

aten = torch.ops.aten

POOL = aten.max_pool2d_with_indices.default
LARGEST = 127
"""The last element of a window that a byte can name."""

LARGEST_OF_COMPILERS = 25
"""Elements of a window, up to which inductor computes a pooling itself."""


def reading_less(
    forward: fx.Graph, backward: fx.Graph, saved: list[fx.Node], device: torch.device
) -> list[fx.Node]:
    """The saved values, and masks that the backward takes instead of the results of rectifiers."""
    saved = list(saved)
    masks: dict[tuple[fx.Node, object], fx.Node] = {}
    for node in list(backward.nodes):
        if node.target is aten.threshold_backward.default:
            _masked(node, forward, saved, masks)
        elif node.target is aten.max_pool2d_with_indices_backward.default:
            _of_a_shape(node, device)
    for node in reversed(backward.nodes):
        if node.target is take_saved and not node.users:
            backward.erase_node(node)
    return saved


def _masked(
    node: fx.Node, forward: fx.Graph, saved: list[fx.Node], masks: dict[tuple[fx.Node, object], fx.Node]
) -> None:
    """Let the gradient of a rectifier read a mask."""
    gradient, take, threshold = node.args
    assert isinstance(take, fx.Node)
    place: Any = take.args[1] if take.target is take_saved else None
    if place is None or SHAPE not in (result := saved[place]).meta:
        return
    with node.graph.inserting_before(node):
        if (result, threshold) not in masks:
            masks[result, threshold] = node.graph.call_function(take_saved, (take.args[0], len(saved)))
            saved.append(_below(forward, result, threshold))
        mask = masks[result, threshold]
        filled = node.graph.call_function(aten.masked_fill.Scalar, (gradient, mask, 0))
    filled.meta.update(node.meta)
    node.replace_all_uses_with(filled)
    node.graph.erase_node(node)


def _of_a_shape(node: fx.Node, device: torch.device) -> None:
    """Let the gradient of a pooling read a number that is shown in the shape of the pooling's operand."""
    given: Any = node.args[1]
    if given.target is not take_saved or SHAPE not in given.meta:
        return
    kwargs: dict[str, Any] = {"dtype": torch_dtype(given.meta[DTYPE]), "device": device}
    with node.graph.inserting_before(node):
        number = node.graph.call_function(aten.zeros.default, ([],), kwargs)
        shown = node.graph.call_function(aten.expand.default, (number, list(given.meta[SHAPE])))
    node.args = (node.args[0], shown, *node.args[2:])


def _below(forward: fx.Graph, result: fx.Node, threshold: Any) -> fx.Node:
    """Where a result is not above a threshold."""
    with forward.inserting_after(result):
        mask = forward.call_function(aten.le.Scalar, (result, threshold))
    mask.meta.update({SHAPE: result.meta[SHAPE], DTYPE: "bool"})
    return mask


def in_windows(forward: fx.Graph, saved: list[fx.Node], device: torch.device) -> list[fx.Node]:
    """The saved values; those that are indices of a pooling are computed once more, from elements of windows."""
    return [_through_windows(forward, node, device) if _is_indices(node) else node for node in saved]


def _is_indices(node: fx.Node) -> bool:
    if node.target is not item or node.args[1] != 1:
        return False
    pool = node.args[0]
    if not isinstance(pool, fx.Node) or pool.target is not POOL or not isinstance(pool.args[0], fx.Node):
        return False
    rows, columns = _pair(pool, 1, (0, 0))
    return SHAPE in node.meta and SHAPE in pool.args[0].meta and 0 < rows * columns <= LARGEST + 1


def _pair(pool: fx.Node, place: int, otherwise: tuple[int, int]) -> tuple[int, int]:
    """An argument of a pooling, of rows and of columns."""
    given: Any = pool.args[place] if place < len(pool.args) else ()
    if isinstance(given, int):
        return given, given
    values = [*given] * (2 if len(given) == 1 else 1)
    return (values[0], values[1]) if values else otherwise


def _through_windows(graph: fx.Graph, indices: fx.Node, device: torch.device) -> fx.Node:
    pool: Any = indices.args[0]
    size = _pair(pool, 1, (0, 0))
    stride, padding, dilation = _pair(pool, 2, size), _pair(pool, 3, (0, 0)), _pair(pool, 4, (1, 1))
    width, (outer, inner) = pool.args[0].meta[SHAPE][-1], indices.meta[SHAPE][-2:]

    if size[0] * size[1] <= LARGEST_OF_COMPILERS and (ops := pooling_by_offsets()):
        return _by_offsets(graph, indices, ops, (size, stride, padding, dilation))

    def call(op: Any, *args: Any, **kwargs: Any) -> fx.Node:
        return graph.call_function(op, args, kwargs)

    def whole(value: fx.Node, by: int) -> fx.Node:
        return call(aten.div.Tensor_mode, value, by, rounding_mode="floor")

    def begins(count: int, along: int) -> fx.Node:
        """Where each window begins along rows or columns."""
        places = call(aten.arange.default, count, dtype=torch.int64, device=device)
        scaled = call(aten.sub.Tensor, call(aten.mul.Tensor, places, stride[along]), padding[along])
        return call(aten.unsqueeze.default, scaled, 1) if along == 0 else scaled

    with graph.inserting_before(graph.output_node()):
        top, left = begins(outer, 0), begins(inner, 1)
        row = whole(indices, width)
        column = call(aten.sub.Tensor, indices, call(aten.mul.Tensor, row, width))
        down = whole(call(aten.sub.Tensor, row, top), dilation[0])
        right = whole(call(aten.sub.Tensor, column, left), dilation[1])
        element = call(aten.add.Tensor, call(aten.mul.Tensor, down, size[1]), right)
        byte = call(aten._to_copy.default, element, dtype=torch.int8)
        byte.meta.update({SHAPE: indices.meta[SHAPE], DTYPE: "int8"})
        element = call(aten._to_copy.default, byte, dtype=torch.int64)
        down = whole(element, size[1])
        right = call(aten.sub.Tensor, element, call(aten.mul.Tensor, down, size[1]))
        row = call(aten.add.Tensor, call(aten.mul.Tensor, down, dilation[0]), top)
        column = call(aten.add.Tensor, call(aten.mul.Tensor, right, dilation[1]), left)
        again = call(aten.add.Tensor, call(aten.mul.Tensor, row, width), column)
    again.meta.update({SHAPE: indices.meta[SHAPE], DTYPE: indices.meta[DTYPE]})
    return again


def _by_offsets(graph: fx.Graph, indices: fx.Node, ops: tuple[Any, Any], window: tuple[Any, ...]) -> fx.Node:
    """The same by the compiler's own ops: the pooling gives the elements of windows in the order in which it goes
    through memory."""
    pool: Any = indices.args[0]
    ceil = bool(pool.args[5]) if len(pool.args) > 5 else False
    size, stride, padding, dilation = map(list, window)
    with graph.inserting_before(pool):
        both = graph.call_function(ops[0], (pool.args[0], size, stride, padding, dilation, ceil))
        byte = graph.call_function(item, (both, 1))
        byte.meta.update({SHAPE: indices.meta[SHAPE], DTYPE: "int8"})
        plane = list(pool.args[0].meta[SHAPE][-2:])
        again = graph.call_function(ops[1], (byte, size, plane, stride, padding, dilation))
        again.meta.update(indices.meta)
    pool.replace_all_uses_with(both, delete_user_cb=lambda user: user is not indices and user.args[1] == 0)
    indices.replace_all_uses_with(again)
    graph.erase_node(indices)
    if not pool.users:
        graph.erase_node(pool)
    return again
