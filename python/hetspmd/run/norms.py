"""Norms and clipping of gradients that lie in shards.

With G the gradients of the whole parameters, each tied one once,

    total = || (||g||_p for g in G) ||_p = (sum over all elements of |x|^p)^(1/p)        (max |x| for p = inf)

so that it is the p-norm of the ranks' own p-norms, if every element is counted by one rank: a shard by the rank
that holds it, a whole gradient by the first active rank, nothing by idle ranks. The ranks share one number each,
and every rank computes the same total from the same numbers in rank order, bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import reduce

import torch
from torch import nn

from hetspmd.errors import GradientError
from hetspmd.run.parameter_registry import Owned, owned_parameters

Parameters = nn.Module | torch.Tensor | Iterable[torch.Tensor]


def clip_grad_norm_(
    parameters: Parameters,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """Scale gradients in place so that their total norm is at most ``max_norm``, and return the norm before.

    This is :func:`torch.nn.utils.clip_grad_norm_` over the whole model: every rank gets the same total and
    scales its shards by the same factor. Every rank must call this.

    Args:
        parameters: A HAP module, or some of its parameters.
        max_norm: The greatest norm that is left as it is.
        norm_type: A positive number, or ``inf`` for the largest absolute value.
        error_if_nonfinite: Raise where the total is not finite.
        foreach: As of torch.

    Returns:
        The total norm of the whole gradients before they were scaled, a tensor of shape ``()``.

    Raises:
        RuntimeError: The total is not finite and ``error_if_nonfinite`` is set. Raised on every rank.
        GradientError: A parameter belongs to no HAP module.
        ValueError: ``norm_type`` is neither positive nor ``inf``.
    """
    tensors = _listed(parameters)
    total = _norm_of(tensors, norm_type, error_if_nonfinite, foreach, max_norm)
    nn.utils.clip_grads_with_norm_(tensors, max_norm, total, foreach)
    return total


def get_total_norm(
    parameters: Parameters,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """The norm of the whole gradients, the same on every rank. Every rank must call this; it changes nothing.

    Arguments, result and errors are those of :func:`clip_grad_norm_`.
    """
    return _norm_of(_listed(parameters), norm_type, error_if_nonfinite, foreach, None)


@torch.no_grad()
def _norm_of(
    parameters: list[torch.Tensor],
    norm_type: float,
    error_if_nonfinite: bool,
    foreach: bool | None,
    max_norm: float | None,
) -> torch.Tensor:
    parts = [gradients_of(part) for part in owned_parameters(parameters)]
    return combined_norm(parts, (), norm_type, error_if_nonfinite, foreach, max_norm)


def gradients_of(part: Owned) -> Owned:
    """The gradients that there are of parameters of one HAP module."""
    pairs = [(t.grad, mine) for t, mine in zip(part.tensors, part.shares, strict=True) if t.grad is not None]
    return replace(part, tensors=[g for g, _ in pairs], shares=[mine for _, mine in pairs])


def combined_norm(
    parts: Sequence[Owned],
    others: Sequence[torch.Tensor],
    norm_type: float,
    error_if_nonfinite: bool,
    foreach: bool | None,
    max_norm: float | None = None,
) -> torch.Tensor:
    """The norm over the whole tensors of ``parts`` and over ``others``, which every rank holds alike.

    Every rank must call this, with at least one part; a part may have no tensors. ``max_norm``: to what the caller
    is about to clip; it is compared between the ranks, as the other arguments are.
    """
    p = float(norm_type)
    if not p > 0.0:
        raise ValueError(f"norm_type is a positive number or inf, not {norm_type}")
    asked = [f"norm_type={p:g}", f"error_if_nonfinite={bool(error_if_nonfinite)}"]
    if max_norm is not None:
        asked.append(f"max_norm={float(max_norm):.6g}")
    if others:
        asked.append(f"tensors of no HAP module: {len(others)}")
    totals = [_total(part, p, foreach, asked) for part in parts]
    if others:
        rest: torch.Tensor = nn.utils.get_total_norm(others, p, False, foreach)
        totals.append(rest.to(totals[0].device, torch.float64))
    total = totals[0] if len(totals) == 1 else _norm(torch.stack([t.to(totals[0].device) for t in totals]), p)
    dtypes = [t.dtype.to_real() for t in (*(t for part in parts for t in part.tensors), *others)]
    total = total.to(reduce(torch.promote_types, dtypes) if dtypes else torch.get_default_dtype())
    if error_if_nonfinite and not torch.isfinite(total):
        raise RuntimeError(
            f"the total norm of order {p} of the gradients is {float(total)}, so that they cannot be clipped; "
            "error_if_nonfinite=False scales them by it all the same"
        )
    return total


def _listed(parameters: Parameters) -> list[torch.Tensor]:
    """Each tensor once."""
    if isinstance(parameters, nn.Module):
        parameters = parameters.parameters()
    elif isinstance(parameters, torch.Tensor):
        parameters = [parameters]
    return list({id(p): p for p in parameters}.values())


def _total(part: Owned, p: float, foreach: bool | None, asked: Sequence[str]) -> torch.Tensor:
    """The norm of the tensors of one HAP module, in float64; ``asked``: the arguments that all ranks must give."""
    counted = [t.detach() for t in part.counted() if t.numel()]
    if any(t.is_sparse for t in counted):
        raise GradientError("norms of sparse gradients are not supported; clip by value instead")
    counted = [t.abs() if t.is_complex() else t for t in counted]
    own = torch.zeros((), dtype=torch.float64, device=part.device)
    if counted:
        own = _norm(torch.stack(_norms(counted, p, foreach)), p)
    if part.communicator.world == 1:
        return own
    what = "the norm of all gradients (clip_grad_norm_, get_total_norm)"
    return _norm(part.share(what, (*asked, *sorted(part.names)), own.reshape(1)), p)


def _norms(tensors: list[torch.Tensor], p: float, foreach: bool | None) -> list[torch.Tensor]:
    """Norms in float64, computed in at least float32."""
    if foreach or (foreach is None and all(t.is_cuda and t.dtype == torch.float32 for t in tensors)):
        return [n.double() for n in torch._foreach_norm(tensors, p)]
    wide = (torch.promote_types(t.dtype, torch.float32) for t in tensors)
    return [torch.linalg.vector_norm(t, p, dtype=w).double() for t, w in zip(tensors, wide, strict=True)]


def _norm(norms: torch.Tensor, p: float) -> torch.Tensor:
    """The p-norm of a few float64 norms, scaled so that no power overflows before the result does."""
    peak = norms.max()
    if not math.isfinite(peak) or peak == 0.0:
        return peak  # NaN is the maximum where there is one
    rest: torch.Tensor = torch.linalg.vector_norm(norms / peak, p)
    return peak * rest
