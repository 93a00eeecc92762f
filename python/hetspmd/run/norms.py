"""Norms and clipping of gradients that lie in shards.

With G the gradients of the whole parameters, each tied one once,

    total = || (||g||_p for g in G) ||_p = (sum over all elements of |x|^p)^(1/p)        (max |x| for p = inf)

so that it is the p-norm of the ranks' own p-norms, if every element is counted by one rank: a shard by the rank
that holds it, a whole gradient by the first active rank, nothing by idle ranks. One all-gather of one number per
rank, and every rank computes the same total from the same numbers in rank order, bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import nn

from hetspmd.errors import GradientError
from hetspmd.run.owners import Owned, owners

Parameters = nn.Module | torch.Tensor | Iterable[torch.Tensor]


def clip_grad_norm_(
    parameters: Parameters, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:  # fmt: skip
    """Scale gradients in place so that their total norm is at most ``max_norm``; the norm before.

    As :func:`torch.nn.utils.clip_grad_norm_` on one device: every rank gets the total over the whole model and
    scales its shards by the same factor. Every rank must call this. ``parameters`` is a HAP module, or some of
    its parameters. ``norm_type`` is a positive number or ``inf``.

    Raises RuntimeError, on every rank, where the total is not finite and ``error_if_nonfinite`` is set,
    GradientError for parameters of no HAP module, ValueError for another ``norm_type``.
    """
    found = _listed(parameters)
    total = get_total_norm(found, norm_type, error_if_nonfinite, foreach)
    nn.utils.clip_grads_with_norm_(found, max_norm, total, foreach)
    return total


@torch.no_grad()
def get_total_norm(
    parameters: Parameters, norm_type: float = 2.0, error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:  # fmt: skip
    """The norm of the whole gradients, the same on every rank; see :func:`clip_grad_norm_`. Changes nothing."""
    p = float(norm_type)
    if not p > 0.0:
        raise ValueError(f"norm_type is a positive number or inf, not {norm_type}")
    parts = owners(_listed(parameters))
    totals = [_total(part, p, foreach) for part in parts]
    total = totals[0] if len(totals) == 1 else _norm(torch.stack(totals), p)
    dtypes = [q.grad.dtype for part in parts for q in part.parameters if q.grad is not None]
    dtype = torch.get_default_dtype()
    if dtypes:
        dtype = dtypes[0]
        for other in dtypes[1:]:
            dtype = torch.promote_types(dtype, other)
    total = total.to(dtype)
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


def _total(part: Owned, p: float, foreach: bool | None) -> torch.Tensor:
    """The norm of the gradients of one HAP module, in float64."""
    counted = [q.grad.detach() for q in part.counted() if q.grad is not None and q.grad.numel()]
    for gradient in counted:
        if gradient.is_sparse or gradient.is_complex():
            raise GradientError(
                "norms of sparse and complex gradients are not supported; clip by value instead"
            )
    own = torch.zeros((), dtype=torch.float64, device=part.device)
    if counted:
        own = _norm(torch.stack(_norms(counted, p, foreach)), p)
    if part.communicator.world == 1:
        return own
    everyone = own.new_empty(part.communicator.world)
    part.communicator.all_gather(everyone, own.reshape(1)).wait()
    return _norm(everyone, p)


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
