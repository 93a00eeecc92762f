"""Rules of cumulative ops: the scanned dim is blocked, all others are parallel (design 4)."""

from __future__ import annotations

from math import prod

from hetspmd.rules.places import Factors, linear, norm
from hetspmd.rules.registry import rule
from hetspmd.rules.rule import Call, OpRule


def _others(call: Call) -> Factors:
    ndim = call.inputs[0].ndim
    at = norm(call.arg(1, "dim"), ndim)
    factors = Factors(call)
    for d in range(ndim):
        if d != at:
            factors.add(f"d{d}", {0: d}, dict.fromkeys(range(len(call.outputs)), d))
    return factors


@rule("aten.cumsum.default")
def cumsum(call: Call) -> OpRule:
    """(x, dim): linear."""
    return OpRule(_others(call).done(), linear(call, (0,)), flops=float(prod(call.out.shape)))


@rule("aten.cumprod.default", "aten.logcumsumexp.default", "aten.cummax.default", "aten.cummin.default")
def scan(call: Call) -> OpRule:
    """(x, dim): values, and for cummax and cummin their indices."""
    return OpRule(_others(call).done(), flops=float(prod(call.out.shape)))
