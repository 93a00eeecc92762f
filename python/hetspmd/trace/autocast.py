"""Automatic mixed precision: under which ``torch.autocast`` a step is traced, and that its program is left alone.

Autocast decides in eager PyTorch, op by op, which dtype is computed in. A trace under it records the decisions as
ordinary conversions of the forward. The backward is traced without it: users call ``loss.backward()`` outside the
context, and each gradient op runs in the dtype of what its forward op saved. A program that holds the decisions
must not be cast again, so local graphs run with autocast off, whatever surrounds them.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn

from hetspmd.trace.fake import model_device, trace_device
from hetspmd.trace.values import dtype_name


def autocast_state(device_type: str) -> str:
    """The dtype that autocast computes in on this type of device (``bfloat16``), "" where it is off."""
    if not torch.is_autocast_enabled(device_type):
        return ""
    return dtype_name(torch.get_autocast_dtype(device_type))


def without_autocast(device_type: str) -> AbstractContextManager[object]:
    """A context in which autocast is off on this type of device."""
    if not torch.is_autocast_enabled(device_type):
        return nullcontext()
    return torch.autocast(device_type, enabled=False)


def autocast_for(model: nn.Module, dtype: str | None) -> AbstractContextManager[object]:
    """The ``torch.autocast`` in a dtype on the device that the model is traced on; nothing for None."""
    return autocast_on(trace_device(model_device(model)).type, dtype)


def autocast_on(device_type: str, dtype: str | None) -> AbstractContextManager[object]:
    """The ``torch.autocast`` in a dtype on a type of device; nothing for None."""
    return nullcontext() if dtype is None else torch.autocast(device_type, dtype=getattr(torch, dtype))
