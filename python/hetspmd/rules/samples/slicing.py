"""Sample calls of :mod:`hetspmd.rules.ops.slicing`."""

from __future__ import annotations

import torch
from torch import Tensor

from hetspmd.rules.samples import Factory, Sample


def _x(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _calls(*pairs: tuple[tuple[int, ...], tuple[object, ...]]) -> Factory:
    """One call for each (shape of x, arguments after x)."""

    def make() -> list[Sample]:
        return [((_x(*shape), *rest), {}) for shape, rest in pairs]

    return make


def _scatters(*triples: tuple[tuple[int, ...], tuple[int, ...], tuple[object, ...]]) -> Factory:
    """One call for each (shape of x, shape of src, arguments after them)."""

    def make() -> list[Sample]:
        return [((_x(*a), _x(*b, seed=1), *rest), {}) for a, b, rest in triples]

    return make


def _slices() -> list[Sample]:
    return [
        ((_x(5, 4), 0, 1, 4), {}),
        ((_x(5, 4), 1), {}),
        ((_x(5, 6), 1, 0, 9223372036854775807, 2), {}),
        ((_x(5, 4), 0, 0, 5), {}),
        ((_x(5, 4), -1, -2), {}),
        ((_x(5, 4), 0, -5, 9223372036854775807), {}),
        ((_x(5, 6), 1, 1, 6, 2), {}),
        ((_x(5, 6), -1, 0, 5, 2), {}),
        ((_x(5, 6), 1, 0, -1, 2), {}),
        ((_x(5, 6), 1, -5, None, 2), {}),
        ((torch.arange(20).reshape(5, 4), 0, 1, 4), {}),
    ]


def _cats() -> list[Sample]:
    a, b = _x(5, 4), _x(5, 6, seed=1)
    return [
        (([a, b], 1), {}),
        (([a, a]), {}) if False else (([a, a],), {}),
        (([_x(5), _x(4, seed=1)],), {}),
        (([_x(0), a, _x(5, 2)], -1), {}),
        (([a, a > 0], 0), {}),
    ]


def _stacks() -> list[Sample]:
    a, b = _x(5, 4), _x(5, 4, seed=1)
    return [(([a, b],), {}), (([a, b, a], 1), {}), (([a, b], -1), {}), (([_x(), _x()],), {})]


_SELECT = _calls(((5, 4), (0, 2)), ((5, 4, 6), (1, -1)), ((5, 4), (-1, 0)), ((5,), (0, 1)))
_UNBIND = _calls(((5, 4), ()), ((5, 3, 4), (1,)), ((4, 5, 3), (-1,)))
_NARROW = _calls(((5, 4), (0, 1, 3)), ((5, 4), (-1, 0, 2)))
_SPLIT = _calls(((5, 4), (2,)), ((5, 4), (2, 1)), ((5, 4, 6), (4, -1)))
_SIZES = _calls(((5, 4), ([2, 3],)), ((5, 4, 6), ([1, 3, 2], -1)))
_CHUNK = _calls(((5, 4), (2,)), ((5, 4), (2, 1)))
_TRIANGLE = _calls(((5, 4), ()), ((5, 6), (1,)), ((4, 5, 6), (-2,)))
_DIAGONAL = _calls(((5, 5), ()), ((4, 5, 6), (1, 1, 2)), ((5, 4, 6), (-1, -1, 0)))
_PADDINGS = {
    1: ((5, 4, 6), ([1, 2],)),
    2: ((5, 4, 6, 5), ([1, 2, 0, 0],)),
    3: ((5, 3, 4, 5, 4), ([1, 1, 0, 1, 1, 0],)),
}


def _grown(shape: tuple[int, ...], pad: list[int]) -> tuple[int, ...]:
    grown = list(shape)
    for k, amount in enumerate(pad):
        grown[-1 - k // 2] += amount
    return tuple(grown)


def _edges() -> dict[str, Factory]:
    factories: dict[str, Factory] = {}
    for kind in ("reflection", "replication"):
        for k, (shape, (pad,)) in _PADDINGS.items():
            name = f"aten.{kind}_pad{k}d"
            factories[f"{name}.default"] = _calls((shape, (pad,)), (shape[1:], (pad,)))
            triples = [(_grown(s, pad), s, (pad,)) for s in (shape, shape[1:])]
            factories[f"{name}_backward.default"] = _scatters(*triples)
    return factories


SAMPLES: dict[str, Factory] = {
    "aten.select.int": _SELECT,
    "aten.select_copy.int": _SELECT,
    "aten.unbind.int": _UNBIND,
    "aten.unbind_copy.int": _UNBIND,
    "aten.select_backward.default": _calls(((4,), ([5, 4], 0, 2)), ((5, 6), ([5, 4, 6], 1, -1))),
    "aten.select_scatter.default": _scatters(((5, 4), (4,), (0, 2)), ((5, 4, 6), (5, 6), (1, -1))),
    "aten.slice.Tensor": _slices,
    "aten.slice_copy.Tensor": _slices,
    "aten.slice_scatter.default": _scatters(
        ((5, 4), (3, 4), (0, 1, 4)),
        ((5, 4), (5, 4), (1, 0, 9223372036854775807)),
        ((5, 4), (5, 2), (1, 0, 4, 2)),
    ),
    "aten.slice_backward.default": _calls(
        ((3, 4), ([5, 4], 0, 1, 4, 1)),
        ((5, 4), ([5, 4], 1, 0, 9223372036854775807, 1)),
        ((5, 2), ([5, 4], -1, 0, 4, 2)),
    ),
    "aten.narrow.default": _NARROW,
    "aten.narrow_copy.default": _NARROW,
    "aten.split.Tensor": _SPLIT,
    "aten.split_copy.Tensor": _SPLIT,
    "aten.unsafe_split.Tensor": _SPLIT,
    "aten.split_with_sizes.default": _SIZES,
    "aten.split_with_sizes_copy.default": _SIZES,
    "aten.unsafe_split_with_sizes.default": _SIZES,
    "aten.chunk.default": _CHUNK,
    "aten.unsafe_chunk.default": _CHUNK,
    "aten.cat.default": _cats,
    "aten.concat.default": _cats,
    "aten.stack.default": _stacks,
    "aten.flip.default": _calls(((5, 4), ([0],)), ((5, 4, 6), ([0, -1],))),
    "aten.rot90.default": _calls(
        ((5, 5, 4), ()),
        ((4, 5, 5), (2, [1, 2])),
        ((5, 4), (4, [0, 1])),
        ((5, 4), (-1, [0, 1])),
    ),
    "aten.roll.default": _calls(((5, 4), ([1], [0])), ((5, 4), ([2],)), ((5, 4, 6), ([1, -1], [0, -1]))),
    "aten.constant_pad_nd.default": _calls(
        ((5, 4), ([1, 2],)),
        ((5, 4), ([0, 0, 1, 0], 2.0)),
        ((5, 4, 6), ([-1, 1],)),
        ((5, 4), ([0, 0, 0, 0],)),
    ),
    **_edges(),
    "aten.tril.default": _TRIANGLE,
    "aten.triu.default": _TRIANGLE,
    "aten.diagonal.default": _DIAGONAL,
    "aten.diagonal_copy.default": _DIAGONAL,
    "aten.diagonal_backward.default": _calls(
        ((5,), ([5, 5], 0, 0, 1)), ((4, 5), ([4, 5, 6], 1, 1, 2)), ((4, 5), ([5, 4, 6], -1, -1, 0))
    ),
    "aten.diag_embed.default": _calls(
        ((5,), ()),
        ((4, 5), (1,)),
        ((4, 5), (0, 0, 2)),
        ((4, 6, 5), (0, -2, 1)),
    ),
    "aten.diagonal_scatter.default": _scatters(((5, 5), (5,), ()), ((4, 5, 6), (4, 5), (1, 1, 2))),
    "aten.trace.default": _calls(((5, 4), ()), ((4, 6), ())),
}
