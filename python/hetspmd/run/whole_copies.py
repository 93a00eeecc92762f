"""Warns of whole copies of parameters of which every rank holds one row.

An average of weights (EMA) or a target network that was made before ``HAP(...)`` holds whole tensors. What moves it
are shards, and torch refuses most of them by their sizes; but one row broadcasts to the whole without a word.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from hetspmd.errors import BroadcastWarning
from hetspmd.lower.program import LocalTensor
from hetspmd.run.instances import instances

__all__ = ["warn_of_copies"]


def warn_of_copies(model: nn.Module, layouts: Mapping[str, LocalTensor]) -> None:
    """Warn where a tensor of the process equals a parameter that is about to be cut into single rows.

    ``layouts`` are those of the parameters by name. A parameter of the model itself that stays whole counts too.
    """
    parameters = dict(model.named_parameters())
    single = {
        n: p for n, p in parameters.items() if n in layouts and _one_row_each(layouts[n]) and not p.is_meta
    }
    if not single:
        return
    excepted = {id(p) for name, p in parameters.items() if name in single}
    for thing in instances(torch.Tensor):
        if type(thing) not in (torch.Tensor, nn.Parameter) or id(thing) in excepted:
            continue
        for name, p in single.items():
            if _alike(thing, p) and thing.data_ptr() != p.data_ptr() and torch.equal(thing, p):
                warnings.warn(
                    f"every rank holds one row of parameter {name} {list(p.shape)}, and a whole copy of it exists "
                    "(an average of weights, a target network?): torch broadcasts the row to the copy, so that an "
                    "average of the two is wrong without an error. Make the copy of the HAP module, "
                    "copy.deepcopy(hap), which lies in the same shards",
                    BroadcastWarning,
                    stacklevel=3,
                )
                return


def _alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    def kind(t: torch.Tensor) -> tuple[Any, ...]:
        return t.layout, t.shape, t.dtype, t.device

    return kind(one) == kind(other)


def _one_row_each(layout: LocalTensor) -> bool:
    return len(layout.extents) > 1 and all(extent == 1 for extent in layout.extents)
