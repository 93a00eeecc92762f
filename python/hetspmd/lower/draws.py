"""Random ops of what is compiled: their noise is a call by itself, and what they make of it are ops.

A compiler takes no call of the runtime, so that each dropout would end what is compiled together. Of most
random ops the noise depends on no values (:mod:`hetspmd.program.noise`): it is drawn by
:func:`~hetspmd.lower.calls.noise`, in the order in which the ops themselves would draw, so that the numbers are
the same. What is computed of it are ATen ops, in the order of :mod:`hetspmd.program.noise`, and a step saves
what is least to hold of them (:mod:`hetspmd.lower.saves`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import fx

from hetspmd.lower import calls
from hetspmd.lower.emit import DTYPE, SHAPE, item
from hetspmd.program.noise import NOISE
from hetspmd.trace.values import dtype_name, torch_dtype

aten = torch.ops.aten

Write = Callable[..., fx.Node]
"""Writes what an op makes of its noise: it is given what writes a call, the noise, the dtype of the result, and
the op's arguments."""
Call = Callable[..., fx.Node]


def write_noise(graph: fx.Graph) -> None:
    """Write random ops of a local graph, in place, as noise and ops where shapes say what they draw."""
    for node in [node for node in graph.nodes if node.target is calls.draw]:
        op, args, kwargs = node.args[5:8]
        if (write := _WRITERS.get(str(op))) is None:
            continue
        results = {user.args[1]: user for user in node.users if user.target is item} or {0: node}
        if (made := results.get(0)) is None or DTYPE not in made.meta or not _draws(str(op), args, kwargs):
            continue
        dtype = torch_dtype(made.meta[DTYPE])
        drawn = kwargs.get("dtype") or NOISE[str(op)].dtype or dtype
        with graph.inserting_before(node):
            noise = _noise(graph, node, made, drawn)
            value = write(_calling(graph, made), noise, dtype, *args, **kwargs)
        for place, old in results.items():
            new = value if place == 0 else noise
            new.meta.update(old.meta)
            old.replace_all_uses_with(new)
        for old in (*(user for user in results.values() if user is not node), node):
            graph.erase_node(old)


def _draws(op: str, args: Any, kwargs: Any) -> bool:
    """Whether an op draws: dropout in evaluation does not."""
    return (
        op != "aten.native_dropout.default"
        or (args[2] if len(args) > 2 else kwargs.get("train")) is not False
    )


def _noise(graph: fx.Graph, node: fx.Node, made: fx.Node, dtype: torch.dtype) -> fx.Node:
    """The call that draws the noise of a random op, of which it is given all arguments but tensors."""
    *where, op, args, kwargs = node.args
    plain: Any = fx.map_arg(args, lambda _: None)
    noise = graph.call_function(calls.noise, (*where, op, plain, fx.map_arg(kwargs, lambda _: None), dtype))
    noise.meta.update({key: value for key, value in node.meta.items() if key == "instruction"})
    noise.meta.update({SHAPE: made.meta[SHAPE], DTYPE: dtype_name(dtype)})
    return noise


def _calling(graph: fx.Graph, made: fx.Node) -> Call:
    """What writes a call whose result has the shape of what an op makes."""

    def call(target: Any, *args: Any, dtype: torch.dtype | None = None, **kwargs: Any) -> fx.Node:
        node = graph.call_function(target, args, kwargs)
        node.meta[SHAPE] = made.meta[SHAPE]
        node.meta[DTYPE] = made.meta[DTYPE] if dtype is None else dtype_name(dtype)
        return node

    return call


def _dropout(call: Call, mask: fx.Node, _: torch.dtype, x: fx.Node, p: float, train: bool | None) -> fx.Node:
    kept = call(aten.mul.Tensor, x, mask)
    return call(aten.mul.Tensor, kept, 0.0 if p == 1 else 1.0 / (1.0 - p))


def _same(_call: Call, noise: fx.Node, _: torch.dtype, *_args: Any, **_kwargs: Any) -> fx.Node:
    return noise


def _bernoulli(
    call: Call, noise: fx.Node, dtype: torch.dtype, x: Any, p: Any = None, **_kwargs: Any
) -> fx.Node:
    chance = x if p is None else p
    less = aten.lt.Tensor if isinstance(chance, fx.Node) else aten.lt.Scalar
    return _cast(call, call(less, noise, chance, dtype=torch.bool), dtype)


def _uniform(
    call: Call, noise: fx.Node, _: torch.dtype, x: Any, low: float = 0.0, high: float = 1.0, **_kwargs: Any
) -> fx.Node:
    return call(aten.add.Tensor, call(aten.mul.Tensor, noise, high - low), low)


def _normal(
    call: Call, noise: fx.Node, _: torch.dtype, x: Any, mean: float = 0.0, std: float = 1.0, **_kwargs: Any
) -> fx.Node:
    return call(aten.add.Tensor, call(aten.mul.Tensor, noise, std), mean)


def _cast(call: Call, value: fx.Node, dtype: torch.dtype) -> fx.Node:
    made = call(aten._to_copy.default, value)
    made.kwargs = {"dtype": dtype}
    return made


_WRITERS: Final[dict[str, Write]] = {
    "aten.native_dropout.default": _dropout,
    "aten.bernoulli.default": _bernoulli,
    "aten.bernoulli.p": _bernoulli,
    "aten.bernoulli.Tensor": _bernoulli,
    "aten.rand.default": _same,
    "aten.rand_like.default": _same,
    "aten.randn.default": _same,
    "aten.randn_like.default": _same,
    "aten.uniform.default": _uniform,
    "aten.normal_functional.default": _normal,
}
"""For each random op whose noise is drawn by a generator always."""
