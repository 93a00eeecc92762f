"""Sample calls of :mod:`hetspmd.rules.ops.conv`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hetspmd.rules.samples import Factory, Sample


def _x(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@dataclass(frozen=True)
class _Case:
    x: tuple[int, ...]
    w: tuple[int, ...]
    bias: bool = False
    stride: int = 1
    padding: int = 0
    dilation: int = 1
    transposed: bool = False
    output_padding: int = 0
    groups: int = 1

    def call(self) -> Sample:
        k = len(self.x) - 2
        channels = self.w[1] * self.groups if self.transposed else self.w[0]
        bias = _x((channels,), 2) if self.bias else None
        lists = ([v] * k for v in (self.stride, self.padding, self.dilation))
        options = (*lists, self.transposed, [self.output_padding] * k, self.groups)
        return (_x(self.x, 0), _x(self.w, 1), bias, *options), {}

    def backward(self, *mask: bool) -> Sample:
        (x, w, bias, *options), _ = self.call()
        y = torch.ops.aten.convolution.default(x, w, bias, *options)
        return (_x(tuple(y.shape), 3), x, w, [y.shape[1]], *options, list(mask)), {}


_CASES = (
    _Case((5, 4, 6), (7, 4, 3), bias=True),
    _Case((4, 4, 5, 6), (6, 4, 3, 3), padding=1),
    _Case((4, 6, 5, 5), (6, 2, 3, 3), bias=True, stride=2, padding=1, groups=3),
    _Case((4, 5, 6, 6), (5, 1, 3, 3), groups=5),
    _Case((4, 4, 5, 5), (4, 6, 3, 3), bias=True, stride=2, padding=1, transposed=True, output_padding=1),
    _Case((4, 4, 5, 5), (4, 3, 2, 2), transposed=True, groups=2),
    _Case((4, 3, 6, 4), (5, 3, 2, 2), bias=True, stride=2),
    _Case((4, 3, 4, 5), (3, 4, 2, 2), stride=2, transposed=True),
    _Case((4, 3, 4, 5), (4, 3, 1, 1), stride=1),
    _Case((4, 3, 6, 6), (4, 3, 2, 2), dilation=2),
    _Case((2, 3, 4, 4, 5), (4, 3, 2, 2, 2), bias=True),
)

SAMPLES: dict[str, Factory] = {
    "aten.convolution.default": lambda: [case.call() for case in _CASES],
    "aten.convolution_backward.default": lambda: [
        *(
            case.backward(*mask)
            for case in _CASES[:8]
            for mask in (
                (True, False, False),
                (False, True, False),
                (False, False, True),
                (True, True, True),
            )
        ),
        *(case.backward(True, True, False) for case in _CASES[8:]),
    ],
}
