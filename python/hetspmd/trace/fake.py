"""The model with fake parameters: shapes and dtypes without data, so that any size can be traced."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from hetspmd.errors import DeviceError
from hetspmd.trace.compat.tensors import FakeTensorMode


def model_device(model: nn.Module) -> torch.device:
    """The device of all parameters and buffers (cpu if there are none).

    Raises DeviceError if they lie on more than one.
    """
    first: dict[torch.device, str] = {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        first.setdefault(tensor.device, name)
    if len(first) > 1:
        places = ", ".join(f"{name} on {device}" for device, name in first.items())
        raise DeviceError(
            f"the model lies on several devices ({places}); move it to one with model.to(device)"
        )
    return next(iter(first), torch.device("cpu"))


def trace_device(device: torch.device) -> torch.device:
    """Where fake tensors pretend to be: a model on the meta device is traced as on the CPU."""
    return torch.device("cpu") if device.type == "meta" else device


def fake_like(mode: FakeTensorMode, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A fake tensor of the same shape, strides and dtype."""
    with mode:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)


@contextmanager
def fake_parameters(
    model: nn.Module, mode: FakeTensorMode, device: torch.device, *, gradients: bool
) -> Iterator[None]:
    """Within the context, every parameter and buffer of the model is fake; tied ones stay tied.

    ``gradients``: keep ``requires_grad``; otherwise nothing requires a gradient.
    """
    memo: dict[int, torch.Tensor] = {}
    saved: list[tuple[dict[str, torch.Tensor | None], str, torch.Tensor]] = []

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in memo:
            stand_in = fake_like(mode, tensor.detach(), device)
            if isinstance(tensor, nn.Parameter):
                stand_in = nn.Parameter(stand_in, requires_grad=gradients and tensor.requires_grad)
            memo[id(tensor)] = stand_in
        return memo[id(tensor)]

    try:
        for module in model.modules():
            for slots in (module._parameters, module._buffers):
                for name, tensor in list(slots.items()):
                    if tensor is not None:
                        saved.append((slots, name, tensor))  # type: ignore[arg-type]  # nn.Module's two dicts
                        slots[name] = fake(tensor)  # type: ignore[assignment]  # nn.Module's two dicts
        yield
    finally:
        for slots_, name, tensor in saved:
            slots_[name] = tensor
