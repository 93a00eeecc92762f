"""Sample calls of :mod:`hetspmd.rules.ops.distance`."""

from __future__ import annotations

import torch

from hetspmd.rules.samples import Factory, Sample


def _x(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _forward() -> list[Sample]:
    return [
        ((_x(5, 3), _x(4, 3, seed=1), 2.0, None), {}),
        ((_x(4, 5, 3), _x(4, 6, 3, seed=1), 1.0, None), {}),
        ((_x(4, 5, 3), _x(1, 6, 3, seed=1), 3.0, None), {}),
    ]


def _backward() -> list[Sample]:
    calls: list[Sample] = []
    for args, _ in _forward()[:2]:
        distances = torch.ops.aten._cdist_forward.default(*args)
        grad = _x(*distances.shape, seed=2)
        calls.append(((grad, args[0], args[1], args[2], distances), {}))
    return calls


SAMPLES: dict[str, Factory] = {
    "aten._cdist_forward.default": _forward,
    "aten._cdist_backward.default": _backward,
}
