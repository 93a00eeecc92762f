"""Sample calls of :mod:`hetspmd.rules.ops.shape`."""

from __future__ import annotations

import torch
from torch import Tensor

from hetspmd.rules.samples import Factory, Sample


def _x(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def _calls(*pairs: tuple[tuple[int, ...], tuple[object, ...]]) -> Factory:
    """One call for each (shape of x, arguments after x)."""

    def make() -> list[Sample]:
        return [((_x(*shape), *rest), {}) for shape, rest in pairs]

    return make


_VIEW = _calls(
    ((4, 6), ([24],)),
    ((24,), ([4, 6],)),
    ((6, 4), ([8, 3],)),
    ((5, 6, 4), ([5, 2, 3, 4],)),
    ((2, 3, 1, 5), ([6, 5, 1],)),
    ((1, 6, 1), ([6],)),
    ((4, 1, 6), ([2, 2, 3, 2],)),
    ((5, 6), ([5, 6],)),
    ((1,), ([],)),
    ((5, 12), ([-1, 4],)),
)


def _view() -> list[Sample]:
    return [*_VIEW(), ((torch.arange(24).reshape(4, 6), [2, 12]), {}), ((_x(4, 6) > 0, [24]), {})]


def _view_dtype() -> list[Sample]:
    return [
        ((_x(4, 5), torch.int64), {}),
        ((_x(4, 5), torch.float32), {}),
        ((torch.ones(4, 6, dtype=torch.int32), torch.int64), {}),
    ]


def _complex() -> list[Sample]:
    return [((torch.complex(_x(4, 5), _x(4, 5)),), {})]


_SQUEEZE_DIM = _calls(((5, 1, 4), (1,)), ((5, 1, 4), (-2,)), ((5, 4), (1,)))
_SQUEEZE_DIMS = _calls(((5, 1, 4, 1), ([1, 3],)), ((5, 1, 4), ([0, 1],)))
_UNSQUEEZE = _calls(((5, 4), (0,)), ((5, 4), (-1,)), ((5, 4), (1,)))
_EXPAND = _calls(
    ((5, 1), ([5, 4],)),
    ((4,), ([5, 4],)),
    ((), ([4],)),
    ((5, 1, 4), ([5, 6, 4],)),
    ((5, 4), ([-1, 4],)),
    ((1, 4), ([6, 5, 4],)),
)
_PERMUTE = _calls(((5, 4, 6), ([2, 0, 1],)), ((5, 4), ([-1, 0],)))
_TRANSPOSE = _calls(((5, 4, 6), (0, 2)), ((5, 4), (-1, -2)))
_T = _calls(((5, 4), ()), ((5,), ()))
_REPEAT = _calls(((5, 4), ([1, 1],)), ((5, 4), ([2, 3, 1],)), ((5, 1), ([1, 4],)), ((4,), ([5, 2],)))
_UNFOLD = _calls(((6, 5), (0, 2, 2)), ((5, 6), (1, 3, 1)), ((6, 5), (0, 1, 3)), ((7, 4), (0, 2, 2)))
_STRIDED = _calls(
    ((4, 6), ([4, 6], [6, 1])),
    ((4, 6, 1, 1), ([4, 6, 1, 1], [6, 1, 6, 6])),
    ((24,), ([4, 6, 1], [6, 1, 1])),
    ((8, 3), ([4, 6], [6, 1], 0)),
    ((4, 6), ([4, 6], [1, 4])),
    ((4, 6), ([3, 2], [6, 2], 1)),
)

SAMPLES: dict[str, Factory] = {
    **{
        f"aten.{name}.default": _view
        for name in ("view", "_unsafe_view", "reshape", "_reshape_copy", "view_copy")
    },
    "aten._reshape_alias.default": _calls(((4, 6), ([2, 12], [12, 1]))),
    "aten.flatten.using_ints": _calls(((4, 2, 3), (1, 2)), ((4, 5), (0, -1))),
    "aten.unflatten.int": _calls(((4, 6), (1, [2, 3])), ((6, 5), (0, [-1, 2]))),
    "aten.ravel.default": _calls(((4, 6), ())),
    "aten.view.dtype": _view_dtype,
    "aten.view_copy.dtype": _view_dtype,
    "aten.view_as_real.default": _complex,
    "aten.view_as_real_copy.default": _complex,
    "aten.view_as_complex.default": _calls(((4, 5, 2), ())),
    "aten.view_as_complex_copy.default": _calls(((4, 5, 2), ())),
    "aten.squeeze.default": _calls(((5, 1, 4), ()), ((1, 1), ())),
    "aten.squeeze_copy.default": _calls(((5, 1, 4), ())),
    "aten.squeeze.dim": _SQUEEZE_DIM,
    "aten.squeeze_copy.dim": _SQUEEZE_DIM,
    "aten.squeeze.dims": _SQUEEZE_DIMS,
    "aten.squeeze_copy.dims": _SQUEEZE_DIMS,
    "aten.unsqueeze.default": _UNSQUEEZE,
    "aten.unsqueeze_copy.default": _UNSQUEEZE,
    "aten.expand.default": _EXPAND,
    "aten.expand_copy.default": _EXPAND,
    "aten.broadcast_to.default": _calls(((5, 1), ([5, 4],))),
    "aten.permute.default": _PERMUTE,
    "aten.permute_copy.default": _PERMUTE,
    "aten.transpose.int": _TRANSPOSE,
    "aten.transpose_copy.int": _TRANSPOSE,
    "aten.t.default": _T,
    "aten.t_copy.default": _T,
    "aten.numpy_T.default": _calls(((5, 4), ())),
    "aten.repeat.default": _REPEAT,
    "aten.tile.default": _calls(((5, 4), ([2],)), ((4,), ([5, 2],))),
    "aten.repeat_interleave.self_int": lambda: [
        ((_x(5, 4), 3, 0), {}),
        ((_x(5, 4), 2, -1), {}),
        ((_x(5, 4), 2), {}),
        ((_x(5, 4), 3, 0), {"output_size": 15}),
    ],
    "aten.as_strided.default": _STRIDED,
    "aten.as_strided_copy.default": _STRIDED,
    "aten.as_strided_scatter.default": lambda: [
        ((_x(4, 6), _x(3, 2), [3, 2], [6, 2], 1), {}),
        ((_x(24), _x(4, 6, 1), [4, 6, 1], [6, 1, 6]), {}),
        ((_x(4, 6), _x(8, 3), [8, 3], [3, 1]), {}),
    ],
    "aten.unfold.default": _UNFOLD,
    "aten.unfold_copy.default": _UNFOLD,
    "aten.unfold_backward.default": _calls(
        ((3, 5, 2), ([6, 5], 0, 2, 2)),
        ((5, 4, 3), ([5, 6], 1, 3, 1)),
        ((2, 5, 1), ([6, 5], 0, 1, 3)),
    ),
    "aten.im2col.default": _calls(
        ((4, 3, 5, 5), ([2, 2], [1, 1], [0, 0], [1, 1])),
        ((4, 5, 5), ([2, 3], [1, 1], [1, 1], [2, 1])),
    ),
    "aten.col2im.default": _calls(
        ((4, 12, 16), ([5, 5], [2, 2], [1, 1], [0, 0], [1, 1])),
        ((12, 16), ([5, 5], [2, 2], [1, 1], [0, 0], [1, 1])),
    ),
    "aten.pixel_shuffle.default": _calls(((4, 12, 3, 5), (2,)), ((12, 3, 5), (2,))),
    "aten.pixel_unshuffle.default": _calls(((4, 3, 6, 10), (2,))),
    "aten.channel_shuffle.default": _calls(((4, 6, 5, 4), (2,))),
    "aten.native_channel_shuffle.default": _calls(((4, 6, 5, 4), (3,))),
}
