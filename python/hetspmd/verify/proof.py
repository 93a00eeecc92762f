"""Whether an example proves anything, and other values where it does not.

Equal numbers prove little where they are all zero: a batch of zeros, labels that are all ignored. They prove
nothing where they are NaN. :func:`proving` then draws values of its own of the same shapes and dtypes:
floating-point numbers from a normal or uniform distribution, integers from the range that the example shows,
and zeros and ones instead of integers and bools that are all the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from hetspmd.errors import ExampleError, HetspmdError
from hetspmd.trace.compat.trees import flatten, unflatten
from hetspmd.verify.precision import all_in
from hetspmd.verify.training_steps import TrainingCase, loss_of, trainable

_Draw = Callable[[torch.Tensor, torch.Generator], torch.Tensor]


def proving(setting: TrainingCase) -> tuple[TrainingCase, str, str]:
    """The setting, with other values if its own prove nothing; a note that says so; and why nothing is proved,
    "" where something is.

    Raises ExampleError if the model fails on the example.
    """
    why = _wanting(setting)
    if not why:
        return setting, "", ""
    for values in _drawn(setting):
        try:
            if not _wanting(values):
                return values, f"with the example {why}: other values were drawn for it", ""
        except HetspmdError:
            continue
    return setting, "", f"{why}, and with values that were drawn instead; give an example that has a gradient"


def _wanting(setting: TrainingCase) -> str:
    """Why the first step on one device proves nothing, "" if it does."""
    model = setting.copy()
    try:
        with torch.random.fork_rng(devices=()), all_in(setting.dtype):
            torch.manual_seed(setting.seed)
            value = loss_of(setting, model)
            if value.requires_grad:
                torch.autograd.backward(value)
    except HetspmdError:
        raise
    except Exception as error:
        name = str(setting.dtype).removeprefix("torch.")
        raise ExampleError(
            f"{type(model).__name__} fails on the example in {name}: {type(error).__name__}: {error}; try "
            "dtype='float32' (--dtype float32), or model(batch) on one device first"
        ) from error
    if not bool(value.isfinite()):
        return f"the loss is {float(value.detach())}"
    gradients = [p.grad for p in trainable(model) if p.grad is not None]
    if any(not bool(g.isfinite().all()) for g in gradients):
        return "some gradients are not finite"
    if trainable(model) and not any(bool((g != 0).any()) for g in gradients):
        return "all gradients are zero"
    return ""


def _drawn(setting: TrainingCase) -> Iterator[TrainingCase]:
    leaves, spec = flatten((setting.args, dict(setting.kwargs)))
    for same in (False, True):
        for floats in (_normal, _uniform):
            generator = torch.Generator().manual_seed(setting.seed)
            values = [_other(leaf, floats, generator, same) for leaf in leaves]
            args, kwargs = unflatten(values, spec)
            yield replace(setting, args=args, kwargs=kwargs)


def _other(leaf: Any, floats: _Draw, generator: torch.Generator, same: bool) -> Any:
    """Another value; ``same``: also of integers and bools that are all the same."""
    if not isinstance(leaf, torch.Tensor) or not leaf.numel():
        return leaf
    if leaf.is_floating_point() or leaf.is_complex():
        return floats(leaf, generator)
    low, high = int(leaf.min()), int(leaf.max())
    if low == high:
        if not same:
            return leaf
        low, high = 0, 1
    return torch.randint(low, high + 1, leaf.shape, generator=generator).to(leaf.dtype)


def _normal(leaf: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    return torch.randn(leaf.shape, generator=generator, dtype=leaf.dtype)


def _uniform(leaf: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    return torch.rand(leaf.shape, generator=generator, dtype=leaf.dtype)
