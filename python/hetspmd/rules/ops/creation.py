"""Rules of ops that make tensors from shapes and numbers: every dim of the output is parallel.

A shape argument becomes the local shape. Where values depend on the place (``arange``, ``eye``), a device
makes the entries of its own range. ``zeros_like(x)`` is cut as x is; a tensor that is only asked for its
dtype (``new_zeros``) may be whole.
"""

from __future__ import annotations

import torch

from hetspmd.rules.registry import rule
from hetspmd.rules.rule import Call, Cut, Local, LocalCall, OpRule
from hetspmd.rules.terms import Term, dim_names, linear_sets, term_factors
from hetspmd.trace.graph import DEVICE, DType

_REASON = "the input's values are not read; tracing replaces the op by one without input"
_UNREAD = {"{*} {replicated}": _REASON, "{*} {partial}": _REASON, "{*} {shard*}": _REASON}


@rule(
    "aten.full.default",
    "aten.zeros.default",
    "aten.ones.default",
    "aten.empty.memory_format",
    "aten.empty_permuted.default",
)
def _sized(call: Call) -> OpRule:
    return OpRule(term_factors(call, [], [dim_names(call.out.ndim)]), shape_args={0: 0})


@rule("aten.new_zeros.default", "aten.new_ones.default", "aten.new_full.default", "aten.new_empty.default")
def _new(call: Call) -> OpRule:
    return OpRule(
        term_factors(call, [None] * len(call.inputs), [dim_names(call.out.ndim)]),
        shape_args={1: 0},
        omitted=_UNREAD,
    )


@rule(
    "aten.full_like.default",
    "aten.zeros_like.default",
    "aten.ones_like.default",
    "aten.empty_like.default",
    "aten.zero.default",
)
def _like(call: Call) -> OpRule:
    names = dim_names(call.out.ndim)
    terms: list[Term] = [names, *[()] * (len(call.inputs) - 1)]
    zero = call.op in ("aten.zeros_like.default", "aten.zero.default")
    zero = zero or (call.op == "aten.full_like.default" and call.args[1] == 0)
    return OpRule(
        term_factors(call, terms, [names]), linear=linear_sets(call, [[0]] if zero else []), omitted=_UNREAD
    )


@rule("aten.empty_strided.default", "aten.new_empty_strided.default")
def _strided(call: Call) -> OpRule:
    position = 0 if call.op == "aten.empty_strided.default" else 1
    factors = term_factors(call, [None] * len(call.inputs), [dim_names(call.out.ndim)])
    return OpRule(factors, shape_args={position: 0}, rewrite=_strided_locally, omitted=_UNREAD)


def _strided_locally(local: Local) -> LocalCall:
    """Strides in the same order, without gaps."""
    target, args, kwargs = local.default()
    if local.factor is None:
        return target, args, kwargs
    position = 0 if local.call.op == "aten.empty_strided.default" else 1
    shape, strides = local.output_shapes[0], local.call.args[position + 1]
    dense, step = [0] * len(shape), 1
    for d in sorted(range(len(shape)), key=lambda d: (strides[d], -d)):
        dense[d] = step
        step *= max(shape[d], 1)
    return target, (*args[: position + 1], tuple(dense), *args[position + 2 :]), kwargs


@rule(
    "aten.scalar_tensor.default",
    "aten.tril_indices.default",
    "aten.triu_indices.default",
    "aten.logspace.default",
)
def _whole(call: Call) -> OpRule:
    return OpRule()


@rule("aten.arange.default", "aten.arange.start", "aten.arange.start_step")
def _arange(call: Call) -> OpRule:
    return OpRule(term_factors(call, [], [("n",)]), rewrite=_arange_locally)


def _arange_locally(local: Local) -> LocalCall:
    if local.factor is None:
        return local.default()
    call = local.call
    start = 0 if call.op == "aten.arange.default" else call.args[0]
    step = call.arg(2, "step", 1) if call.op == "aten.arange.start_step" else 1
    return arange_part, (start, step, local.start, local.stop, DType(call.out.dtype), DEVICE), {}


def arange_part(
    start: float, step: float, low: int, high: int, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Entries ``[low, high)`` of ``arange(start, ..., step)``: ``start + i * step``, the numbers first
    converted to the dtype if that is integral, as torch does."""
    if not dtype.is_floating_point:
        return (
            torch.arange(low, high, dtype=torch.int64, device=device).mul(int(step)).add(int(start)).to(dtype)
        )
    return torch.arange(low, high, dtype=torch.float64, device=device).mul(step).add(start).to(dtype)


@rule("aten.linspace.default")
def _linspace(call: Call) -> OpRule:
    if DType(call.out.dtype).name not in ("float64", "float32", "float16", "bfloat16"):
        return OpRule()
    return OpRule(term_factors(call, [], [("n",)]), rewrite=_linspace_locally)


def _linspace_locally(local: Local) -> LocalCall:
    if local.factor is None:
        return local.default()
    start, end, steps = local.call.args[:3]
    dtype = DType(local.call.out.dtype)
    return linspace_part, (start, end, steps, local.start, local.stop, dtype, DEVICE), {}


def linspace_part(
    start: float, end: float, steps: int, low: int, high: int, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Entries ``[low, high)`` of ``linspace(start, end, steps)``, from the nearer end as torch does."""
    step = (end - start) / (steps - 1)
    i = torch.arange(low, high, dtype=torch.float64, device=device)
    return torch.where(i < steps // 2, start + i * step, end - (steps - 1 - i) * step).to(dtype)


@rule("aten.eye.default", "aten.eye.m")
def _eye(call: Call) -> OpRule:
    return OpRule(term_factors(call, [], [("n", "m")]), rewrite=_eye_locally)


def _eye_locally(local: Local) -> LocalCall:
    if local.factor is None:
        return local.default()
    place = local.factor.outputs[0]
    rows, columns = local.call.out.shape
    cut = (local.start, local.stop)
    first = place == Cut(0)
    spans = (*(cut if first else (0, rows)), *((0, columns) if first else cut))
    return eye_part, (*spans, DType(local.call.out.dtype), DEVICE), {}


def eye_part(
    top: int, bottom: int, left: int, right: int, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Rows ``[top, bottom)`` and columns ``[left, right)`` of the identity matrix."""
    rows = torch.arange(top, bottom, device=device)
    return (rows.unsqueeze(1) == torch.arange(left, right, device=device)).to(dtype)
