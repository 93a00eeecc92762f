"""Batch norm in training, which the trace takes apart, put together again where a rank has the whole batch.

Its statistics are of the global batch. Where no collective stands between the sums and what reads them, and the
numbers that divide them are those of the elements here, one call computes it all: torch's own, as eager PyTorch's.
What else is read of the pieces (the running statistics read mean and variance) is taken from what that call gives.
Pieces in two dtypes (autocast) stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import fx

from hetspmd.lower.emit import ALSO, DTYPE, SHAPE, instructions, item

aten = torch.ops.aten

Erase = Callable[[fx.Node], None]
_KEPT = frozenset({"float32", "float64"})
"""Dtypes in which the sums have the dtype of what is summed, as in the pieces."""


class _Differs(Exception):
    """A graph that is not what is looked for."""


def join_batch_norms(graph: fx.Graph, erase: Erase) -> None:
    """Join the pieces of batch norms of ``graph`` in place; ``erase`` takes a node that nothing reads, and what it
    alone has read."""
    for match, anchor in ((_forward, aten.rsqrt.default), (_backward, aten.mul.Tensor)):
        for node in list(graph.nodes):
            if node.target is not anchor or not node.args:
                continue
            try:
                pieces = match(node)
            except _Differs:
                continue
            pieces.replace(graph, erase)


_ZEROS: Any = object()
"""An argument to be written: running statistics, one number per channel, which a call replaces wholly."""


@dataclass(frozen=True)
class _Match:
    """Pieces that a call does as one: each is read by others of them alone, but for those in ``instead``.

    ``instead`` has the results, the main one first, each with its place among the call's and a number by which
    that is to be multiplied (None: as it is).
    """

    target: Any
    args: tuple[Any, ...]
    channels: int
    pieces: tuple[fx.Node, ...]
    instead: dict[fx.Node, tuple[int, float | None]]

    def replace(self, graph: fx.Graph, erase: Erase) -> None:
        """Write the call behind the last of what it reads; nothing changes where a reader stands before that."""
        place = {node: i for i, node in enumerate(graph.nodes)}
        last = max((a for a in self.args if isinstance(a, fx.Node)), key=place.__getitem__)
        inside = {*self.pieces, *self.instead}
        read = {node: [u for u in node.users if u not in inside] for node in self.instead}
        if any(place[user] < place[last] for users in read.values() for user in users):
            return
        behind = last.next
        while behind.op == "placeholder":
            behind = behind.next
        main = next(iter(self.instead))

        def write(name: str, target: Any, *args: Any) -> fx.Node:
            return graph.create_node("call_function", target, args, {}, name=f"{main.name}_{name}")

        with graph.inserting_before(behind):
            args = [
                write("none", aten.new_zeros.default, self.args[0], [self.channels]) if a is _ZEROS else a
                for a in self.args
            ]
            call = write("batch_norm", self.target, *args)
            does = [i for n in sorted(inside, key=place.__getitem__) for i in instructions(n)]
            call.meta.update({"instruction": does[0], ALSO: tuple(does[1:])} if does else {})
            for node in (node for node, users in read.items() if users):
                index, factor = self.instead[node]
                result = write("batch_norm", item, call, index)
                if factor is not None:
                    result = write("scaled", aten.mul.Tensor, result, factor)
                if node.meta[SHAPE] != ((self.channels,) if index else node.meta[SHAPE]):
                    result = write("shaped", aten.reshape.default, result, list(node.meta[SHAPE]))
                result.meta.update({key: node.meta[key] for key in (SHAPE, DTYPE)})
                node.replace_all_uses_with(result, delete_user_cb=lambda user: user not in inside)
        for node in [node for node in self.instead if not node.users]:
            erase(node)


def _args(node: Any, target: Any) -> tuple[Any, ...]:
    """The arguments of a call of ``target``."""
    if not isinstance(node, fx.Node) or node.target is not target or node.kwargs:
        raise _Differs
    return node.args


def _same(*values: Any) -> None:
    if any(value is not values[0] for value in values[1:]):
        raise _Differs


def _require(condition: bool) -> None:
    if not condition:
        raise _Differs


def _only(node: fx.Node, users: Iterable[fx.Node]) -> None:
    """Nothing else reads it."""
    _require(set(node.users) <= set(users))


def _per_channel(node: Any, channels: int, pieces: list[fx.Node]) -> fx.Node:
    """What is reshaped to stand beside the data, one number per channel."""
    while isinstance(node, fx.Node):
        if node.meta.get(SHAPE) == (channels,):
            return node
        pieces.append(node)
        (node, _) = _args(node, aten.reshape.default)
    raise _Differs


def _data(node: fx.Node) -> tuple[int, int, list[int]]:
    """Of what is normed: channels, elements per channel here, and the dims that are summed over."""
    shape = node.meta.get(SHAPE)
    _require(shape is not None and len(shape) >= 2 and node.meta.get(DTYPE) in _KEPT)
    assert shape is not None
    channels = shape[1]
    _require(channels > 0)
    return channels, prod(shape) // channels, [d for d in range(len(shape)) if d != 1]


def _forward(rsqrt: fx.Node) -> _Match:
    """(x - mean) rsqrt(var + eps) [* weight] [+ bias], var the mean of (x - mean)^2."""
    added: Any = rsqrt.args[0]
    var, eps = _args(added, aten.add.Tensor)
    squares_sum, count = _args(var, aten.div.Tensor)
    squares, dims, keep = _args(squares_sum, aten.sum.dim_IntList)
    centred, again = _args(squares, aten.mul.Tensor)
    _same(centred, again)
    x, mean = _args(centred, aten.sub.Tensor)
    total, count_of_mean = _args(mean, aten.div.Tensor)
    summed, dims_of_mean, keep_of_mean = _args(total, aten.sum.dim_IntList)
    _same(x, summed)
    channels, here, over = _data(x)
    _require(here > 1 and count == count_of_mean == here and isinstance(eps, float))
    _require(keep is True and keep_of_mean is True and list(dims) == list(dims_of_mean) == over)
    normed: Any = next((user for user in centred.users if user is not squares), None)
    _require(tuple(_args(normed, aten.mul.Tensor)) == (centred, rsqrt))
    for node, users in (
        (added, {rsqrt}),
        (centred, {squares, normed}),
        (squares_sum, {var}),
        (squares, {squares_sum}),
        (total, {mean}),
    ):
        _only(node, users)
    _require(added.meta.get(DTYPE) == normed.meta.get(DTYPE) == x.meta.get(DTYPE))
    pieces = [total, mean, centred, squares, squares_sum, var, added, rsqrt, normed]
    out, weight = _affine(normed, aten.mul.Tensor, channels, pieces)
    out, bias = _affine(out, aten.add.Tensor, channels, pieces)
    args = (x, weight, bias, _ZEROS, _ZEROS, True, 1.0, eps)
    instead = {out: (0, None), rsqrt: (2, None), mean: (3, None), var: (4, (here - 1) / here)}
    return _Match(aten._native_batch_norm_legit_functional.default, args, channels, tuple(pieces), instead)


def _affine(
    node: fx.Node, target: Any, channels: int, pieces: list[fx.Node]
) -> tuple[fx.Node, fx.Node | None]:
    """The only reader of ``node`` and its operand, if that is one number per channel; otherwise the node itself."""
    if len(node.users) != 1:
        return node, None
    (user,) = node.users
    try:
        first, other = _args(user, target)
        _same(first, node)
        shaped: list[fx.Node] = []
        operand = _per_channel(other, channels, shaped)
        _require(other.meta.get(SHAPE) == (channels, *(1,) * (len(node.meta[SHAPE]) - 2)))
        _require(user.meta.get(DTYPE) == node.meta.get(DTYPE) == other.meta.get(DTYPE))
    except (_Differs, ValueError):
        return node, None
    pieces += [*reversed(shaped), user]
    return user, operand


def _backward(product: fx.Node) -> _Match:
    """((g - (x - mean) a) - b) c: a = sum(g (x - mean)) / n rstd^2, b = sum(g) / n, c = rstd [weight]."""
    without_mean, scale = _args(product, aten.mul.Tensor)
    projected, of_mean = _args(without_mean, aten.sub.Tensor)
    gradient, projection = _args(projected, aten.sub.Tensor)
    centred, slope = _args(projection, aten.mul.Tensor)
    x, shaped_mean = _args(centred, aten.sub.Tensor)
    channels, here, over = _data(x)
    pieces: list[fx.Node] = []
    mean = _per_channel(shaped_mean, channels, pieces)
    pieces.append(centred)
    average = _per_channel(of_mean, channels, pieces)
    total, part = _args(average, aten.mul.Tensor)
    slopes = _per_channel(slope, channels, pieces)
    share, squared = _args(slopes, aten.mul.Tensor)
    dot, part_of_dot = _args(share, aten.mul.Tensor)
    rstd, again = _args(squared, aten.mul.Tensor)
    _same(rstd, again)
    weight = None
    if isinstance(scale, fx.Node) and scale.target is aten.mul.Tensor:
        shaped_rstd, one = scale.args
        _require(isinstance(one, float) and one == 1.0)
        pieces.append(scale)
        _same(rstd, _per_channel(shaped_rstd, channels, pieces))
    else:
        scales = _per_channel(scale, channels, pieces)
        factor, weight = _args(scales, aten.mul.Tensor)
        _same(rstd, factor)
        _require(weight.meta.get(SHAPE) == (channels,) and weight.meta.get(DTYPE) == x.meta.get(DTYPE))
        pieces.append(scales)
    summed, dims = _args(total, aten.sum.dim_IntList)
    both, dims_of_dot = _args(dot, aten.sum.dim_IntList)
    _same(gradient, summed)
    _require(tuple(_args(both, aten.mul.Tensor)) == (gradient, centred))
    _require(list(dims) == list(dims_of_dot) == over and part == part_of_dot == 1.0 / here)
    _require(rstd.meta.get(SHAPE) == (channels,))
    _require(len({n.meta.get(DTYPE) for n in (gradient, x, mean, rstd, product)}) == 1)
    _require(gradient.meta.get(SHAPE) == x.meta.get(SHAPE))
    instead: dict[fx.Node, tuple[int, float | None]] = {product: (0, None)}
    of_weight = [user for user in dot.users if user is not share]
    for user in of_weight:
        _require(tuple(_args(user, aten.mul.Tensor)) == (dot, rstd))
        instead[user] = (1, None)
    instead[total] = (2, None)
    pieces += [total, dot, both, average, share, squared, slopes, projection, projected, without_mean]
    inside = {*pieces, *of_weight, product}
    for node in pieces:
        _require(node is total or set(node.users) <= inside)
    mask = [True, bool(of_weight), any(user not in inside for user in total.users)]
    args = (gradient, x, weight, None, None, mean, rstd, True, 0.0, mask)
    return _Match(aten.native_batch_norm_backward.default, args, channels, tuple(pieces), instead)
