"""Rules of distances between two sets of points, x [..., P, M] and y [..., R, M].

The distances [..., P, R] are parallel in the batch dims, P and R. M is blocked, for the norm's root is taken
after its sum; with p = 1 there is no root. The gradient of x sums over R; given the distances, it is parallel
in M, and with p = 2 it is linear in x - y.
"""

from __future__ import annotations

from math import prod

from hetspmd.rules.factor_places import Factors
from hetspmd.rules.registry import rule
from hetspmd.rules.rule import SUM, Call, OpRule
from hetspmd.rules.terms import linear_sets


@rule("aten._cdist_forward.default")
def cdist(call: Call) -> OpRule:
    """(x, y, p, compute_mode)."""
    ndim = call.out.ndim
    factors = Factors(call)
    for d in range(ndim - 2):
        places = {i: d - (ndim - t.ndim) for i, t in enumerate(call.inputs)}
        own = {i: at for i, at in places.items() if at >= 0 and call.inputs[i].shape[at] == call.out.shape[d]}
        factors.add(f"d{d}", own, {0: d})
    factors.add("p", {0: call.inputs[0].ndim - 2}, {0: ndim - 2})
    factors.add("r", {1: call.inputs[1].ndim - 2}, {0: ndim - 1})
    if call.arg(2, "p") == 1:
        factors.add("m", {i: t.ndim - 1 for i, t in enumerate(call.inputs)}, {0: SUM})
    return OpRule(factors.done(), flops=3.0 * prod(call.out.shape) * call.inputs[0].shape[-1])


@rule("aten._cdist_backward.default")
def cdist_backward(call: Call) -> OpRule:
    """(grad, x, y, p, distances) to the gradient of x; batch dims that broadcast are blocked."""
    grad, x, y = call.inputs[:3]
    n = x.ndim
    factors = Factors(call)
    if grad.ndim == y.ndim == n:
        for d in range(n - 2):
            if x.shape[d] == y.shape[d] == grad.shape[d]:
                factors.add(f"d{d}", {0: d, 1: d, 2: d, 3: d}, {0: d})
        factors.add("p", {0: n - 2, 1: n - 2, 3: n - 2}, {0: n - 2})
        factors.add("r", {0: n - 1, 2: n - 2, 3: n - 1}, {0: SUM})
        factors.add("m", {1: n - 1, 2: n - 1}, {0: n - 1})
    groups = [(0,), (1, 2)] if call.arg(3, "p") == 2 else [(0,)]
    return OpRule(factors.done(), linear_sets(call, groups), flops=5.0 * prod(grad.shape) * x.shape[-1])
