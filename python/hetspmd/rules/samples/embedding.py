"""Samples of embeddings."""

from __future__ import annotations

from collections.abc import Callable

import torch

from hetspmd.rules.samples import Sample
from hetspmd.rules.sampling import integers, real

Samples = Callable[[], list[Sample]]


def _embedding() -> list[Sample]:
    weight = real(7, 5)
    return [
        ((weight, integers(7, 4, 3)), {}),
        ((weight, integers(7, 6), 2), {}),
        ((weight, integers(7)), {}),
        ((weight, integers(7, 4, 3).int()), {}),
    ]


def _embedding_backward() -> list[Sample]:
    return [
        ((real(4, 3, 5), integers(7, 4, 3), 7, -1, False), {}),
        ((real(4, 3, 5), integers(7, 4, 3), 7, 2, False), {}),
        ((real(6, 5), integers(4, 6), 7, -1, True), {}),
    ]


def _bag(mode: int) -> Sample:
    offsets = torch.tensor([0, 2, 2, 5])
    return (real(7, 5), integers(7, 8), offsets, False, mode, False, None, False, -1), {}


def _bags() -> list[Sample]:
    weighted, _ = _bag(0)
    return [_bag(0), _bag(1), _bag(2), ((*weighted[:6], real(8, seed=4), False, 3), {})]


def _bag_backward() -> list[Sample]:
    samples: list[Sample] = []
    for args, _ in _bags():
        weight, indices, _, _, mode, _, weights, _, padding = args
        _, offset2bag, bag_size, maxima = torch.ops.aten._embedding_bag.default(*args)
        grad = real(4, 5, seed=3)
        samples.append(
            ((grad, indices, offset2bag, bag_size, maxima, len(weight), False, mode, weights, padding), {})
        )
    return samples


def _bag_backward_by_offsets() -> list[Sample]:
    samples: list[Sample] = []
    for args, _ in _bags():
        weight, indices, offsets, _, mode, _, weights, _, padding = args
        _, offset2bag, bag_size, maxima = torch.ops.aten._embedding_bag.default(*args)
        operands = (real(4, 5, seed=3), indices, offsets, offset2bag, bag_size, maxima, len(weight))
        samples.append(((*operands, False, mode, False, weights, padding), {}))
    return samples


SAMPLES: dict[str, Samples] = {
    "aten.embedding.default": _embedding,
    "aten.embedding_dense_backward.default": _embedding_backward,
    "aten._embedding_bag.default": _bags,
    "aten._embedding_bag_forward_only.default": _bags,
    "aten._embedding_bag_dense_backward.default": _bag_backward,
    "aten._embedding_bag_backward.default": _bag_backward_by_offsets,
    "aten.one_hot.default": lambda: [((integers(7, 4, 3), 7), {}), ((integers(7, 4), -1), {})],
}
