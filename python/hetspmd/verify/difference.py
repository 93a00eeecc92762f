"""How far tensors of two computations are apart.

The error of a tensor is ``max |a - b| / max(max |b|, tiny)``, with b the single device's, i.e. relative to the
tensor's largest magnitude; a tensor is only as good as its worst element. Where b is below ``noise`` times the
largest magnitude among the tensors of its kind, the error is relative to that largest magnitude instead.
"""

from __future__ import annotations

import torch

Tensors = dict[str, torch.Tensor]


def largest_error(got: Tensors, want: Tensors, noise: float = 0.0) -> tuple[float, str]:
    """The largest relative error among tensors of one kind, and the name of the tensor that has it.

    Infinite where a tensor is missing, has another shape, or is not a number where the other is one.
    """
    if set(got) != set(want):
        return float("inf"), ", ".join(sorted(set(got) ^ set(want)))
    peak = max((magnitude(t) for t in want.values()), default=0.0)
    largest, where = 0.0, ""
    for name in sorted(want):
        a, b = got[name].detach(), want[name].detach()
        if a.shape != b.shape:
            return float("inf"), name
        size = magnitude(b)
        scale = size if size > noise * peak else peak
        most = largest_difference(a, b)
        error = most if most == 0.0 else most / scale if scale > 0.0 else float("inf")
        if not error <= largest:
            largest, where = error if error == error else float("inf"), name
    return largest, where


def largest_difference(a: torch.Tensor, b: torch.Tensor) -> float:
    """The largest difference of two elements; NaN is equal to NaN, and an infinity to itself."""
    if not b.numel():
        return 0.0
    difference = (numbers(a) - numbers(b)).abs()
    difference = torch.where(a == b, 0.0, difference)
    difference = torch.where(a.isnan() & b.isnan(), 0.0, difference)
    return float(difference.max())


def magnitude(tensor: torch.Tensor) -> float:
    """The largest finite magnitude of an element."""
    finite = numbers(tensor.detach())
    finite = finite[finite.isfinite()]
    return float(finite.abs().max()) if finite.numel() else 0.0


def numbers(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in the widest dtype of its kind."""
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)
