"""What a local graph calls of the runtime that is its first input: the graph knows of no communicator.

:class:`~hetspmd.dist.runtime.Runtime` and, for the accelerators of machines,
:class:`~hetspmd.dist.machine_levels.MachineRuntime` are what a rank gives to its graphs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hetspmd.lower.attention import kernel_of


def start(
    runtime: Any, kind: str, tensor: torch.Tensor, *args: Any, spare: bool = False, behind: Sequence[Any] = ()
) -> Any:
    """Start a collective of this kind; ``args`` are the dims and extents that it needs. ``behind``: collectives
    that are to have completed before, so that what they hold is let go of."""
    for each in behind:
        each.arrive()
    return runtime.start(kind, tensor, *args, spare=spare)


def start_bucket(
    runtime: Any,
    kind: str,
    tensors: Sequence[torch.Tensor],
    args: Sequence[Any],
    *,
    behind: Sequence[Any] = (),
) -> Any:
    """Start several collectives of one kind as one; ``args`` are those of each, ``behind`` as of :func:`start`."""
    for each in behind:
        each.arrive()
    return runtime.start_bucket(kind, tensors, args)


def start_across(
    runtime: Any, kind: str, tensor: torch.Tensor, args: Sequence[Any], leg: Any, *, spare: bool = False
) -> Any:
    """Start a collective between machines; ``leg`` says how the tensor lies on the accelerators of one."""
    return runtime.start_across(kind, tensor, args, leg, spare=spare)


def start_bucket_across(
    runtime: Any, kind: str, tensors: Sequence[torch.Tensor], args: Sequence[Any], legs: Sequence[Any]
) -> Any:
    """Start several collectives of one kind between machines as one."""
    return runtime.start_bucket_across(kind, tensors, args, legs)


def expected_tangent(
    runtime: Any, shape: Sequence[int], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """The gradient that the loss is expected to get."""
    tangent: torch.Tensor = runtime.expected_tangent(shape, dtype, device)
    return tangent


def relative_tangent(runtime: Any, tangent: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """The gradient that the loss has got, by the expected one."""
    relative: torch.Tensor = runtime.relative_tangent(tangent, expected)
    return relative


def wait(pending: Any) -> torch.Tensor:
    """The result of a collective that was started."""
    result: torch.Tensor = pending.wait()
    return result


def take(bucket: Any, index: int) -> torch.Tensor:
    """The result of one collective of a bucket that was started."""
    result: torch.Tensor = bucket.take(index)
    return result


def within(runtime: Any) -> Any:
    """The runtime of the collectives inside a machine."""
    return runtime.inside


def draw(
    runtime: Any,
    instruction: int,
    shape: Sequence[int],
    regions: Sequence[Any],
    alike: bool,
    op: Any,
    args: Sequence[Any],
    kwargs: dict[str, Any],
) -> Any:
    """What a random op draws, in this rank's part of the tensor of this shape: ``regions`` are its slice and,
    across machines, the accelerator's slice of that, as far as there are any. ``alike``: others have the same
    slice."""
    return runtime.draw(instruction, shape, regions, alike, op, args, kwargs)


def noise(
    runtime: Any,
    instruction: int,
    shape: Sequence[int],
    regions: Sequence[Any],
    alike: bool,
    op: Any,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    dtype: torch.dtype,
) -> torch.Tensor:
    """The noise of what :func:`draw` would draw, of this dtype; None stands for tensors in ``args``."""
    drawn: torch.Tensor = runtime.noise(instruction, shape, regions, alike, op, args, kwargs, dtype)
    return drawn


def attend(runtime: Any, op: Any, args: tuple[Any, ...]) -> Any:
    """An attention with dropout, or its gradient, by the fused kernel of this rank; by ``op``, whose mask does not
    depend on who computes it, where ranks are compared with a single device."""
    return runtime.attend(kernel_of(str(op), args[0].device), op, args)
