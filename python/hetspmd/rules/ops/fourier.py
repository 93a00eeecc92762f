"""Rules of discrete Fourier transforms: transformed dims are blocked, all others are parallel; linear."""

from __future__ import annotations

from math import log2, prod

from hetspmd.rules.factor_places import Factors
from hetspmd.rules.registry import rule
from hetspmd.rules.rule import Call, OpRule
from hetspmd.rules.terms import linear_sets, wrap


@rule("aten._fft_c2c.default", "aten._fft_r2c.default", "aten._fft_c2r.default")
def transform(call: Call) -> OpRule:
    """(x, dim, normalization, ...), ``dim`` a list; the normalization counts the transformed dims alone."""
    ndim = call.inputs[0].ndim
    dims = {wrap(d, ndim) for d in call.arg(1, "dim")}
    factors = Factors(call)
    for d in range(ndim):
        if d not in dims:
            factors.add(f"d{d}", {0: d}, {0: d})
    wide = max(call.inputs[0].shape, call.out.shape, key=prod)
    points = prod(wide[d] for d in dims)
    flops = 5.0 * prod(wide) * log2(max(points, 2))
    return OpRule(factors.done(), linear_sets(call, [(0,)]), flops=flops)
