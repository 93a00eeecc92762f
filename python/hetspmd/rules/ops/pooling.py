"""Rules of pooling: samples and channels are parallel, planes are blocked; averages are linear.

The indices of a maximum count the elements of its plane, so cuts of samples and channels leave them alone.
Gradients take the pooled input as well: only its shape for averages, nothing but its shape for maxima.
"""

from __future__ import annotations

import re
from math import prod

from hetspmd.rules.factor_places import Factors
from hetspmd.rules.registry import rule
from hetspmd.rules.rule import Call, OpRule
from hetspmd.rules.terms import linear_sets

_DIMS = re.compile(r"(\d)d")
_TILED = "a cut of a plane is right only between windows that tile it; samples and channels are cut instead"
_OVERLAP = "values of one slot leave the winner open, and it may differ between devices"


def _planes(call: Call, inputs: range) -> Factors:
    """Factors of the dims before the planes."""
    match = _DIMS.search(call.op)
    assert match is not None
    factors = Factors(call)
    for d in range(call.inputs[0].ndim - int(match[1])):
        places = dict.fromkeys(range(len(call.outputs)), d)
        factors.add(f"d{d}", dict.fromkeys(inputs, d), places)
    return factors


def _omitted(call: Call) -> dict[str, str]:
    match = _DIMS.search(call.op)
    assert match is not None
    ndim = call.inputs[0].ndim
    planes = range(ndim - int(match[1]), ndim)
    return {f"*All-Gather({d})*": _TILED for d in planes}


def _flops(call: Call) -> float:
    return float(max(prod(t.shape) for t in (*call.inputs, *call.outputs) if t is not None))


@rule(
    "aten.avg_pool1d.default",
    "aten.avg_pool2d.default",
    "aten.avg_pool3d.default",
    "aten.adaptive_avg_pool1d.default",
    "aten.adaptive_avg_pool2d.default",
    "aten.adaptive_avg_pool3d.default",
    "aten._adaptive_avg_pool2d.default",
    "aten._adaptive_avg_pool3d.default",
    "aten.avg_pool2d_backward.default",
    "aten.avg_pool3d_backward.default",
    "aten._adaptive_avg_pool2d_backward.default",
    "aten._adaptive_avg_pool3d_backward.default",
)
def average(call: Call) -> OpRule:
    """(x, ...), or (grad, x, ...) for a gradient."""
    factors = _planes(call, range(len(call.inputs)))
    return OpRule(factors.done(), linear_sets(call, [(0,)]), flops=_flops(call), omitted=_omitted(call))


@rule(
    "aten.max_pool1d.default",
    "aten.max_pool2d.default",
    "aten.max_pool3d.default",
    "aten.max_pool1d_with_indices.default",
    "aten.max_pool2d_with_indices.default",
    "aten.max_pool3d_with_indices.default",
    "aten.adaptive_max_pool1d.default",
    "aten.adaptive_max_pool2d.default",
    "aten.adaptive_max_pool3d.default",
)
def maximum(call: Call) -> OpRule:
    """(x, ...) to values, and indices within the plane."""
    return OpRule(_planes(call, range(1)).done(), flops=_flops(call), omitted=_omitted(call))


@rule("aten.fractional_max_pool2d.default", "aten.fractional_max_pool3d.default")
def fractional_maximum(call: Call) -> OpRule:
    """(x, kernel_size, output_size, samples [N, C, k]): N = 1 where x has no batch dim."""
    x, samples = call.inputs[0], call.inputs[1]
    match = _DIMS.search(call.op)
    assert match is not None
    leading = x.ndim - int(match[1])
    factors = Factors(call)
    for d in range(leading):
        at = d + 2 - leading
        if samples.shape[at] == x.shape[d]:
            factors.add(f"d{d}", {0: d, 1: at}, {0: d, 1: d})
    return OpRule(factors.done(), flops=_flops(call))


@rule(
    "aten.max_pool2d_with_indices_backward.default",
    "aten.max_pool3d_with_indices_backward.default",
    "aten.adaptive_max_pool2d_backward.default",
    "aten.adaptive_max_pool3d_backward.default",
    "aten.fractional_max_pool2d_backward.default",
    "aten.fractional_max_pool3d_backward.default",
    "aten.max_unpool2d.default",
    "aten.max_unpool3d.default",
)
def scattered(call: Call) -> OpRule:
    """(grad, x, ..., indices), or (x, indices, output_size) for max_unpool: each value to its index."""
    factors, omitted = _planes(call, range(len(call.inputs))), _omitted(call)
    groups = linear_sets(call, [(0,)])
    if "unpool" in call.op:
        groups, omitted["{partial, replicated} {partial}"] = (), _OVERLAP
    return OpRule(factors.done(), groups, flops=_flops(call), omitted=omitted)
