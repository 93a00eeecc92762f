"""Rules of reductions: kept dims are parallel, summed dims become All-Reduce.

``mean`` over a sharded dim is the local sum divided by the global count; a norm of order 0 or 1 is a sum.
Maxima, products, variances and other norms have no All-Reduce form (the only sum there is is addition), so
the dims they go over are never cut.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from hetspmd.rules.registry import rule
from hetspmd.rules.rule import SUM, Call, Local, LocalCall, OpRule, Rewrite
from hetspmd.rules.terms import INTEGER, WRAPS, dim_names, linear_sets, reduced_dims, term_factors
from hetspmd.trace.graph import Ref


def _reduction(
    call: Call,
    dims: frozenset[int],
    *,
    summed: bool,
    linear: bool = False,
    rewrite: Rewrite | None = None,
) -> OpRule:
    """The rule of a reduction of input 0 over ``dims``; the outputs all have the reduced shape."""
    x = call.inputs[0]
    names = dim_names(x.ndim)
    rest = [n for i, n in enumerate(names) if i not in dims]
    term = names if summed else tuple(None if i in dims else n for i, n in enumerate(names))
    outputs = []
    for out in call.outputs:
        keepdim = out is not None and out.ndim == x.ndim and len(rest) < x.ndim
        outputs.append([None if i in dims else n for i, n in enumerate(names)] if keepdim else rest)
    return OpRule(
        term_factors(call, [term], outputs),
        linear=linear_sets(call, [[0]]) if linear else (),
        rewrite=rewrite,
        flops=float(math.prod(x.shape)),
        omitted={"{partial} {partial}": WRAPS} if linear and x.dtype in INTEGER else {},
    )


@rule("aten.sum.default", "aten.sum.dim_IntList")
def _sum(call: Call) -> OpRule:
    dims = reduced_dims(call.arg(1, "dim") if call.op.endswith("dim_IntList") else None, call.inputs[0].ndim)
    return _reduction(call, dims, summed=True, linear=True)


@rule("aten.nansum.default")
def _nansum(call: Call) -> OpRule:
    return _reduction(call, reduced_dims(call.arg(1, "dim"), call.inputs[0].ndim), summed=True)


@rule("aten.count_nonzero.default", "aten.count_nonzero.dim_IntList")
def _count_nonzero(call: Call) -> OpRule:
    return _reduction(call, reduced_dims(call.arg(1, "dim"), call.inputs[0].ndim), summed=True)


@rule("aten.mean.default", "aten.mean.dim")
def _mean(call: Call) -> OpRule:
    dims = reduced_dims(call.arg(1, "dim") if call.op == "aten.mean.dim" else None, call.inputs[0].ndim)
    return _reduction(call, dims, summed=True, linear=True, rewrite=_mean_locally)


def _mean_locally(local: Local) -> LocalCall:
    factor, call = local.factor, local.call
    if factor is None or SUM not in factor.outputs:
        return local.default()
    x = call.inputs[0]
    dims = sorted(reduced_dims(call.arg(1, "dim") if call.op == "aten.mean.dim" else None, x.ndim))
    keepdim = bool(call.arg(2, "keepdim", False)) if call.op == "aten.mean.dim" else False
    count = math.prod(x.shape[d] for d in dims)
    return mean_part, (Ref(0), tuple(dims), keepdim, call.kwargs.get("dtype"), count), {}


def mean_part(
    x: torch.Tensor, dims: Sequence[int], keepdim: bool, dtype: torch.dtype | None, count: int
) -> torch.Tensor:
    """This device's summand of a mean over ``count`` elements: the local sum / ``count``.

    As in ``torch.mean``, half precision is accumulated in float32.
    """
    result = x.dtype if dtype is None else dtype
    wide = torch.float32 if result in (torch.float16, torch.bfloat16) else result
    return (torch.sum(x, list(dims), keepdim=keepdim, dtype=wide) / count).to(result)


@rule("aten.amax.default", "aten.amin.default")
def _extremum(call: Call) -> OpRule:
    return _reduction(call, reduced_dims(call.arg(1, "dim", ()), call.inputs[0].ndim), summed=False)


@rule(
    "aten.max.default",
    "aten.min.default",
    "aten.prod.default",
    "aten.any.default",
    "aten.all.default",
    "aten.var.default",
    "aten.std.default",
)
def _whole(call: Call) -> OpRule:
    return _reduction(call, reduced_dims(None, call.inputs[0].ndim), summed=False)


@rule("aten.max.dim", "aten.min.dim", "aten.prod.dim_int", "aten.any.dim", "aten.any.dims", "aten.all.dim",
      "aten.all.dims", "aten.logsumexp.default", "aten.argmax.default", "aten.argmin.default",
      "aten.var.correction", "aten.std.correction", "aten.var_mean.correction",
      "aten.std_mean.correction")  # fmt: skip
def _over_dims(call: Call) -> OpRule:
    dims = call.arg(1, "dim")
    if dims == () and call.op in ("aten.any.dims", "aten.all.dims"):
        return _no_reduction(call)
    return _reduction(call, reduced_dims(dims, call.inputs[0].ndim), summed=False)


def _no_reduction(call: Call) -> OpRule:
    """``any`` and ``all`` over the empty list of dims convert each element to bool."""
    names = dim_names(call.inputs[0].ndim)
    return OpRule(term_factors(call, [names], [names]))


@rule("aten.var.dim", "aten.std.dim", "aten.var_mean.dim", "aten.std_mean.dim")
def _variance_dims(call: Call) -> OpRule:
    return _reduction(call, reduced_dims(call.arg(1, "dim"), call.inputs[0].ndim), summed=False)


@rule("aten.aminmax.default")
def _aminmax(call: Call) -> OpRule:
    return _reduction(call, reduced_dims(call.kwargs.get("dim"), call.inputs[0].ndim), summed=False)


@rule("aten.linalg_vector_norm.default")
def _vector_norm(call: Call) -> OpRule:
    return _norm(call, call.arg(1, "ord", 2), call.arg(2, "dim"))


@rule("aten.norm.Scalar", "aten.norm.ScalarOpt_dtype")
def _full_norm(call: Call) -> OpRule:
    return _norm(call, call.arg(1, "p", 2), None)


@rule("aten.norm.ScalarOpt_dim", "aten.norm.ScalarOpt_dim_dtype")
def _norm_dims(call: Call) -> OpRule:
    return _norm(call, call.arg(1, "p"), call.arg(2, "dim"))


def _norm(call: Call, order: Any, dims: Any) -> OpRule:
    reduced = reduced_dims(dims, call.inputs[0].ndim)
    return _reduction(call, reduced, summed=order is not None and float(order) in (0.0, 1.0))
