"""Batch norm with ``momentum=None``: running statistics as averages over all batches so far.

torch reads the number of batches as a number of Python, which differs from step to step, so that a trace would end
there. Within :func:`cumulative_averages` it stays a tensor: the factor is ``1 / num_batches_tracked``, and

    running = (1 - factor) * running + factor * statistics of the batch

is computed by ops of the graph, as torch's kernel computes it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from types import CodeType, FrameType
from typing import Any, Final

import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

_FORWARD: Final[CodeType] = nn.BatchNorm1d.forward.__code__
"""The forward of all of torch's batch norms."""
_NONE: Final = object()


def cumulative_averages(model: nn.Module) -> AbstractContextManager[Any]:
    """Within the context, the model's batch norms with ``momentum=None`` count batches in the graph."""
    counting = (m for m in model.modules() if getattr(m, "num_batches_tracked", None) is not None)
    return _Cumulative() if any(getattr(m, "momentum", _NONE) is None for m in counting) else nullcontext()


class _Cumulative(TorchFunctionMode):
    """Holds the number of batches of a batch norm between its being read and the call that needs it, which is the
    next one of torch's in that forward."""

    def __init__(self) -> None:
        super().__init__()
        self._count: torch.Tensor | None = None

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        keywords = kwargs or {}
        if func is torch.Tensor.__float__ and _caller(sys._getframe(1)).f_code is _FORWARD:
            self._count = args[0]
            return 1.0  # so that the momentum is 1, and the statistics are those of the batch alone
        if func is F.batch_norm and self._count is not None:
            count, self._count = self._count, None
            return _averaged(count, *args, **keywords)
        return func(*args, **keywords)


def _averaged(
    count: torch.Tensor,
    x: torch.Tensor,
    running_mean: torch.Tensor,
    running_var: torch.Tensor,
    *,
    training: bool,
    momentum: float,
    **others: Any,
) -> torch.Tensor:
    """What batch norm returns in training; the running statistics are then averages over ``count`` batches."""
    statistics = torch.zeros_like(running_mean), torch.zeros_like(running_var)
    y = F.batch_norm(x, *statistics, training=training, momentum=momentum, **others)
    with torch.no_grad():
        factor = 1.0 / count.to(torch.float64)
        for running, of_batch in zip((running_mean, running_var), statistics, strict=True):
            running.copy_((1.0 - factor) * running + factor * of_batch)
    return y


def _caller(frame: FrameType) -> FrameType:
    """The frame that has called a function of torch's, past other modes."""
    while frame.f_code.co_name == "__torch_function__" and frame.f_back is not None:
        frame = frame.f_back
    return frame
