"""Rules of resampling: samples and channels are parallel, planes are blocked; all are linear.

Gradients of ``upsample_*`` take the whole shape of their result, which is localised.
"""

from __future__ import annotations

from math import prod

from hetspmd.rules.factor_places import Factors, Where
from hetspmd.rules.registry import rule
from hetspmd.rules.rule import SUM, Call, Local, LocalCall, OpRule
from hetspmd.rules.terms import linear_sets

_KINDS = (
    "upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d", "_upsample_nearest_exact1d",
    "_upsample_nearest_exact2d", "_upsample_nearest_exact3d", "upsample_linear1d", "upsample_bilinear2d",
    "upsample_bicubic2d", "upsample_trilinear3d", "_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa",
)  # fmt: skip


def _samples_and_channels(call: Call) -> Factors:
    factors = Factors(call)
    for d, name in enumerate("nc"):
        factors.add(name, {0: d}, {0: d})
    return factors


def _flops(call: Call) -> float:
    taps = 32 if "bicubic" in call.op else 1 if "nearest" in call.op else 8
    return float(taps * max(prod(call.inputs[0].shape), prod(call.out.shape)))


@rule(*(f"aten.{kind}.{overload}" for kind in _KINDS for overload in ("default", "vec")))
def upsample(call: Call) -> OpRule:
    """(x, output_size, ...), the output's size in the planes only."""
    return OpRule(_samples_and_channels(call).done(), linear_sets(call, [(0,)]), flops=_flops(call))


@rule(*(f"aten.{kind}_backward.default" for kind in _KINDS))
def upsample_backward(call: Call) -> OpRule:
    """(grad, output_size, input_size, ...): input_size is the shape of the result."""
    shape_args: dict[int | str, int] = {2: 0, "input_size": 0}
    return OpRule(
        _samples_and_channels(call).done(),
        linear_sets(call, [(0,)]),
        _present(call, shape_args),
        flops=_flops(call),
    )


def _present(call: Call, shape_args: dict[int | str, int]) -> dict[int | str, int]:
    return {k: v for k, v in shape_args.items() if isinstance(k, int) or k in call.kwargs}


@rule("aten.grid_sampler_2d.default", "aten.grid_sampler_3d.default", "aten.grid_sampler.default")
def grid_sampler(call: Call) -> OpRule:
    """x [N, C, *in], grid [N, *out, k] to [N, C, *out]."""
    factors = Factors(call)
    factors.add("n", {0: 0, 1: 0}, {0: 0})
    factors.add("c", {0: 1}, {0: 1})
    for d in range(2, call.out.ndim):
        factors.add(f"d{d}", {1: d - 1}, {0: d})
    return OpRule(factors.done(), linear_sets(call, [(0,)]), flops=8.0 * prod(call.out.shape))


@rule("aten.grid_sampler_2d_backward.default", "aten.grid_sampler_3d_backward.default")
def grid_sampler_backward(call: Call) -> OpRule:
    """(grad, x, grid, ..., output_mask) to the gradients of x, if wanted, and of grid."""
    wants_x = call.outputs[0] is not None
    factors = Factors(call)

    def outs(gx: Where, ggrid: Where) -> dict[int, Where]:
        return {0: gx, 1: ggrid} if wants_x else {1: ggrid}

    factors.add("n", {0: 0, 1: 0, 2: 0}, outs(0, 0))
    factors.add("c", {0: 1, 1: 1}, outs(1, SUM))
    for d in range(2, call.inputs[0].ndim):
        factors.add(f"d{d}", {0: d, 2: d - 1}, outs(SUM, d - 1))
    # the gradient of grid is linear in x, too; that of x does not depend on it
    groups = linear_sets(call, [(0,)] if wants_x else [(0,), (1,)])
    omitted = {"{replicated, partial, replicated} {replicated, partial}": "a linear set sums every output"}
    flops = 16.0 * prod(call.inputs[0].shape)
    return OpRule(factors.done(), groups, flops=flops, omitted=omitted)


@rule("aten.affine_grid_generator.default")
def affine_grid(call: Call) -> OpRule:
    """(theta [N, k, k + 1], size, align_corners) to [N, *size[2:], k]; size holds N."""
    factors = Factors(call)
    factors.add("n", {0: 0}, {0: 0})
    return OpRule(
        factors.done(), linear_sets(call, [(0,)]), rewrite=_affine_grid, flops=8.0 * prod(call.out.shape)
    )


def _affine_grid(local: Local) -> LocalCall:
    theta, size, *rest = local.call.args
    return local.call.op, (theta, (local.output_shapes[0][0], *size[1:]), *rest), dict(local.call.kwargs)
