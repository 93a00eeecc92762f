"""The model's Python once, on tensors without data, for what only running it tells."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from hetspmd.trace.compat.tensors import fake_mode
from hetspmd.trace.compat.trees import flatten, unflatten
from hetspmd.trace.cumulative import cumulative_averages
from hetspmd.trace.fake import fake_like, fake_parameters, model_device, trace_device
from hetspmd.trace.host.watch import HostWatch
from hetspmd.trace.slots import Slots


def trial(
    model: nn.Module, called: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> None:
    """Call the model, or the loss function with it, without data, so that the containers that it returns are known
    (:mod:`hetspmd.trace.containers`)."""
    mode, place = fake_mode(), trace_device(model_device(model))
    leaves, spec = flatten((args, dict(kwargs)))
    fakes = [
        fake_like(mode, leaf.detach(), place) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves
    ]
    positional, named = unflatten(fakes, spec)
    watch = HostWatch(model, randomness="freeze")
    fake = fake_parameters(model, mode, place, gradients=False)
    with fake, Slots(model).restored(), cumulative_averages(model), watch.tracing(), mode, torch.no_grad():
        flatten(watch.run(partial(called, *positional, **named)))
