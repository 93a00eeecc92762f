"""Exact rewrites of a local graph, so that it costs what eager PyTorch costs where nothing is sharded between.

Each is a pass of its own (:mod:`hetspmd.lower.passes`): it is given a whole graph, whose output is written, and
changes that graph. It looks at what stands there: a collective between two instructions, or a value that something
else reads too, leaves them as they are.

- What only renames what a call gives (``alias``) goes.
- The two gradients of a convolution, taken of the same tensors one after the other, are one call.
- The pieces of a batch norm are one call (:mod:`hetspmd.lower.batch_norm`).
- One number per row, times a tensor that is zero but for one place per row, is written to that place (the gradient
  of a cross entropy's mean).
- An elementwise op writes to its operand if that is a fresh tensor which nothing reads afterwards, as eager modules
  do (``relu_``) and autograd does where it sums gradients.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from hetspmd.lower import batch_norm
from hetspmd.lower.aliases import allocates, allocates_each
from hetspmd.lower.emit import ALSO, DTYPE, SHAPE, VALUE, instructions, item
from hetspmd.trace.compat.tensors import is_op

aten = torch.ops.aten

_IN_PLACE = {
    aten.relu.default: aten.relu_.default,
    aten.add.Tensor: aten.add_.Tensor,
    aten.sub.Tensor: aten.sub_.Tensor,
    aten.mul.Tensor: aten.mul_.Tensor,
    aten.div.Tensor: aten.div_.Tensor,
    aten.addcmul.default: aten.addcmul_.default,
    aten.scatter.value: aten.scatter_.value,
    aten.scatter.src: aten.scatter_.src,
}
_OUT_OF_PLACE = {op: whole for whole, op in _IN_PLACE.items()}
_COMMUTE = frozenset({aten.add.Tensor, aten.mul.Tensor})


def drop_aliases(graph: fx.Graph) -> None:
    """Erase what only renames what a call gives."""
    for node in _calls(graph, aten.alias.default):
        _renamed(node)


def join_convolutions(graph: fx.Graph) -> None:
    """Compute both gradients of a convolution by one call."""
    for node in _calls(graph, aten.convolution_backward.default):
        _both_gradients(graph, node)


def scatter_rows(graph: fx.Graph) -> None:
    """Write one number per row to its place, where it is multiplied by a tensor that is zero elsewhere."""
    for node in _calls(graph, aten.mul.Tensor):
        _scattered(graph, node)


def join_batch_norms(graph: fx.Graph) -> None:
    """Compute the pieces of a batch norm by one call (:mod:`hetspmd.lower.batch_norm`)."""
    batch_norm.join_batch_norms(graph, _erase)


def out_of_place(target: Any) -> Any:
    """What an elementwise op was before it was told to write to its operand; anything else is itself."""
    return _OUT_OF_PLACE.get(target, target)


def _calls(graph: fx.Graph, target: Any) -> Iterator[fx.Node]:
    """The calls of ``target``. One that is erased meanwhile has None for every node among its arguments."""
    return (node for node in list(graph.nodes) if node.target is target)


def _replace(node: fx.Node, by: Any) -> None:
    """Let what reads ``node`` read ``by``, and erase what is then not read."""
    node.replace_all_uses_with(by)
    _erase(node)


def _erase(node: fx.Node) -> None:
    if node.users or node.op != "call_function":
        return
    operands = node.all_input_nodes
    node.graph.erase_node(node)
    for operand in operands:
        if is_op(operand.target) or operand.target is item:
            _erase(operand)


def _does_also(node: fx.Node, other: fx.Node) -> None:
    """Say that a call does the instructions of another as well, which goes."""
    node.meta[ALSO] = (*node.meta.get(ALSO, ()), *instructions(other))


def _renamed(node: fx.Node) -> None:
    """Another name of what a call gives; names of what is given to the graph stay: each instruction has a call."""
    (source,) = node.args
    if isinstance(source, fx.Node) and source.op == "call_function":
        _does_also(source, node)
        _replace(node, source)


def _instead(old: fx.Node, target: Any, args: tuple[Any, ...]) -> fx.Node:
    """A call that computes what ``old`` does, with a name that tells where it comes from."""
    node = old.graph.create_node("call_function", target, args, {}, name=f"{old.name}_fused")
    node.meta.update(old.meta)
    return node


def _both_gradients(graph: fx.Graph, first: fx.Node) -> None:
    """A convolution's gradients of input and weight, with nothing between them."""
    other = {(True, False, False): 1, (False, True, False): 0}.get(tuple(first.args[-1]))  # type: ignore[arg-type]  # a mask
    second = first.next
    while second.target is item and second.args[0] is first:
        second = second.next
    if other is None or second.target is not first.target or second.args[:-1] != first.args[:-1]:
        return
    if second.kwargs != first.kwargs or list(second.args[-1]) != [other == 0, other == 1, False]:  # type: ignore[arg-type]  # a mask
        return
    first.args = (*first.args[:-1], [True, True, False])
    _does_also(first, second)
    for part in [user for user in second.users if user.target is item]:
        part.args = (first, part.args[1])
    _erase(second)


def _scattered(graph: fx.Graph, product: fx.Node) -> None:
    """``scatter(zeros, d, index, v) * row``, with one index and one number per row."""
    for filled, row in (product.args, product.args[::-1]):
        if not isinstance(filled, fx.Node) or not isinstance(row, fx.Node):
            continue
        if filled.target is not aten.scatter.value or len(filled.args) != 4 or len(filled.users) != 1:
            continue
        zeros, dim, index, value = filled.args
        if not (isinstance(zeros, fx.Node) and isinstance(index, fx.Node)) or zeros.target not in _ZEROS:
            continue
        shape, meta = index.meta.get(SHAPE), product.meta
        extents = list(meta.get(SHAPE, ()))
        if not extents or not isinstance(dim, int):
            continue
        extents[dim] = 1
        if shape != tuple(extents) or row.meta.get(SHAPE) != shape:
            continue
        if not meta.get(DTYPE) == zeros.meta.get(DTYPE) == row.meta.get(DTYPE):
            continue
        with graph.inserting_before(product):
            numbers = _instead(filled, aten.mul.Tensor, (row, value))
            numbers.meta[SHAPE] = shape
            numbers.meta.pop(VALUE, None)
            scatter = _instead(product, aten.scatter.src, (zeros, dim, index, numbers))
        _replace(product, scatter)
        return


_ZEROS = frozenset({aten.zeros_like.default, aten.zeros.default})


def write_in_place(graph: fx.Graph) -> None:
    """Let elementwise ops write to an operand that is fresh and that nothing reads afterwards."""
    place = {node: i for i, node in enumerate(graph.nodes)}
    for node in list(graph.nodes):
        target = _IN_PLACE.get(node.target)
        if target is None:
            continue
        orders = [node.args]
        if node.target in _COMMUTE and len(node.args) == 2 and not node.kwargs:
            orders.append(node.args[::-1])
        for args in orders:
            if _may_write(node, args[0], args[1:], place):
                node.target, node.args = target, args
                break


def _may_write(node: fx.Node, operand: Any, others: tuple[Any, ...], place: dict[fx.Node, int]) -> bool:
    """Whether ``operand`` is of the result's type, fresh, read by nothing behind ``node``, and seen by no view."""
    if not isinstance(operand, fx.Node) or operand in others or not _made(operand):
        return False
    for key in (SHAPE, DTYPE):
        if key not in operand.meta or operand.meta[key] != node.meta.get(key):
            return False
    return all(user is node or (place[user] < place[node] and _apart(user)) for user in operand.users)


def _made(node: fx.Node) -> bool:
    """Whether a tensor is memory that an op has made here, or that such memory was written to in place."""
    return allocates_each(node) or node.target in _OUT_OF_PLACE


def _apart(reader: fx.Node) -> bool:
    """Whether what ``reader`` gives is not a view of what it reads."""
    return allocates(reader) or reader.target in _OUT_OF_PLACE
