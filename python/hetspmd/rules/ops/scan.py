"""Rules of cumulative ops: the scanned dim is blocked, all others are parallel."""

from __future__ import annotations

from math import prod

from hetspmd.rules.factor_places import Factors
from hetspmd.rules.registry import rule
from hetspmd.rules.rule import Call, OpRule
from hetspmd.rules.terms import linear_sets, wrap


def _others(call: Call) -> Factors:
    ndim = call.inputs[0].ndim
    at = wrap(call.arg(1, "dim"), ndim)
    factors = Factors(call)
    for d in range(ndim):
        if d != at:
            factors.add(f"d{d}", {0: d}, dict.fromkeys(range(len(call.outputs)), d))
    return factors


@rule("aten.cumsum.default")
def cumsum(call: Call) -> OpRule:
    """(x, dim): linear."""
    groups = linear_sets(call, [(0,)])
    omitted = {"{partial} {partial}": "integer summands wrap around, their sum as a float does not"}
    return OpRule(_others(call).done(), groups, flops=float(prod(call.out.shape)), omitted=omitted)


@rule("aten.cumprod.default", "aten.logcumsumexp.default", "aten.cummax.default", "aten.cummin.default")
def scan(call: Call) -> OpRule:
    """(x, dim): values, and for cummax and cummin their indices."""
    return OpRule(_others(call).done(), flops=float(prod(call.out.shape)))
