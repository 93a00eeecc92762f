"""Sample calls of :mod:`hetspmd.rules.ops.order`."""

from __future__ import annotations

import torch
from torch import Tensor

from hetspmd.rules.samples import Factory, Sample


def _x(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def _plain(*rest: tuple[object, ...], **options: object) -> Factory:
    """One call of x [5, 4, 6] for each tuple of further arguments."""

    def make() -> list[Sample]:
        return [((_x(5, 4, 6), *arguments), dict(options)) for arguments in rest]

    return make


SAMPLES: dict[str, Factory] = {
    "aten.topk.default": _plain((2,), (3, 0), (2, 1, False)),
    "aten.sort.default": _plain((), (0, True)),
    "aten.sort.stable": _plain((), stable=True, dim=1),
    "aten.argsort.default": _plain((), (0,)),
    "aten.argsort.stable": _plain((), stable=True, dim=0),
    "aten.msort.default": _plain(()),
    "aten.kthvalue.default": _plain((2,), (3, 0), (2, 1, True)),
    "aten.median.dim": _plain((0,), (1, True), (-1,)),
    "aten.nanmedian.dim": _plain((0,), (1, True)),
    "aten.mode.default": _plain((), (0,), (1, True)),
    "aten.median.default": _plain(()),
    "aten.nanmedian.default": _plain(()),
    "aten._unique.default": _plain(()),
    "aten._unique2.default": _plain(()),
    "aten.unique_dim.default": _plain((0,)),
    "aten.unique_consecutive.default": _plain(()),
}
