"""Rules of ops that order or pick elements along a dim: that dim is blocked, all others are parallel."""

from __future__ import annotations

from hetspmd.rules.factor_places import Factors
from hetspmd.rules.registry import rule
from hetspmd.rules.rule import Call, OpRule
from hetspmd.rules.terms import wrap

_POSITIONS = {
    "aten.topk.default": (2, -1),
    "aten.sort.default": (1, -1),
    "aten.sort.stable": (2, -1),
    "aten.argsort.default": (1, -1),
    "aten.argsort.stable": (2, -1),
    "aten.msort.default": (1, 0),
    "aten.kthvalue.default": (2, -1),
    "aten.median.dim": (1, None),
    "aten.nanmedian.dim": (1, None),
    "aten.mode.default": (1, -1),
}
"""Position and default of the argument ``dim``."""


@rule(*_POSITIONS)
def order(call: Call) -> OpRule:
    """Values and indices, with the dim kept or (``keepdim=False``) gone; indices count along the dim."""
    x = call.inputs[0]
    position, default = _POSITIONS[call.op]
    at = wrap(call.arg(position, "dim", default), x.ndim)
    gone = call.out.ndim < x.ndim
    factors = Factors(call)
    for d in range(x.ndim):
        if d != at:
            factors.add(f"d{d}", {0: d}, dict.fromkeys(range(len(call.outputs)), d - (gone and d > at)))
    return OpRule(factors.done())


@rule(
    "aten.median.default",
    "aten.nanmedian.default",
    "aten._unique.default",
    "aten._unique2.default",
    "aten.unique_dim.default",
    "aten.unique_consecutive.default",
)
def whole(call: Call) -> OpRule:
    """Every element may matter to every result: never sharded."""
    return OpRule(omitted={"*": "holds only as long as the data has no equal neighbours"})
