"""Rules of softmax and its relatives: the dim that is normalised is never cut, all others are parallel.

The backward ops are linear in the incoming gradient.
"""

from __future__ import annotations

import math

from hetspmd.rules.registry import rule
from hetspmd.rules.rule import Call, OpRule
from hetspmd.rules.terms import Dim, broadcast_term, dim_names, linear_sets, term_factors, wrap


def _names(call: Call, dim: int) -> tuple[Dim, ...]:
    ndim = call.inputs[0].ndim
    blocked = wrap(dim, ndim)
    return tuple(None if i == blocked else n for i, n in enumerate(dim_names(ndim)))


def _flops(call: Call, each: float) -> float:
    return each * math.prod(call.inputs[0].shape)


@rule(
    "aten._softmax.default",
    "aten._log_softmax.default",
    "aten._safe_softmax.default",
    "aten.softmax.int",
    "aten.log_softmax.int",
)
def _softmax(call: Call) -> OpRule:
    names = _names(call, call.arg(1, "dim"))
    return OpRule(term_factors(call, [names], [names]), flops=_flops(call, 5))


@rule("aten._softmax_backward_data.default", "aten._log_softmax_backward_data.default")
def _softmax_backward(call: Call) -> OpRule:
    names = _names(call, call.arg(2, "dim"))
    return OpRule(
        term_factors(call, [names, names], [names]), linear=linear_sets(call, [[0]]), flops=_flops(call, 4)
    )


@rule("aten._masked_softmax_backward.default")
def _masked_softmax_backward(call: Call) -> OpRule:
    dim = call.arg(3, "dim")
    names = _names(call, -1 if dim is None else dim)
    mask = broadcast_term(names, call.inputs[2])
    return OpRule(
        term_factors(call, [names, names, mask], [names]),
        linear=linear_sets(call, [[0]]),
        flops=_flops(call, 4),
    )
