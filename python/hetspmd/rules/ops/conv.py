"""Rules of convolution and its gradients.

With N samples, Ci input and Co output channels in G groups, and w = [Co, Ci/G, k...] ([Ci, Co/G, k...]
when transposed)::

    y[n, co] = b[co] + sum over ci of w[co, ci] * x[n, ci]
    gx[n, ci] = sum over co of w[co, ci] * gy[n, co]      gw[co, ci] = sum over n of gy[n, co] * x[n, ci]
    gb[co]    = sum over n of gy[n, co]

So n is parallel in y and gx and summed in gw and gb; ci is summed in y and parallel in gx and gw; co is
parallel in y, gw and gb and summed in gx. With G > 1 only whole groups are consecutive in both channel dims,
and the local call has fewer of them. A spatial dim that windows tile without overlap, as in patch embedding,
is parallel like n, in units of one window.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from hetspmd.rules.factor_places import Factors, Where
from hetspmd.rules.kernels import empty_shards
from hetspmd.rules.registry import rule
from hetspmd.rules.rule import SUM, Call, Cut, Local, LocalCall, OpRule, TensorType
from hetspmd.rules.terms import linear_sets
from hetspmd.trace.graph import DEVICE, DType


@dataclass(frozen=True)
class _Shapes:
    """What both rules need of a convolution of x by w that gives y."""

    x: TensorType
    w: TensorType
    y: TensorType
    transposed: bool
    groups: int
    tiles: dict[int, tuple[int, int]]
    """Spatial dim -> units of x and of y, where windows tile it."""

    @property
    def dim_in(self) -> int:
        return 0 if self.transposed else 1

    @property
    def dim_out(self) -> int:
        return 1 - self.dim_in

    @property
    def group_cuts(self) -> tuple[Cut, Cut]:
        """Where groups lie in x and in y."""
        return Cut(1, self.x.shape[1] // self.groups), Cut(1, self.y.shape[1] // self.groups)

    @property
    def flops(self) -> float:
        """2 FLOPs for each weight at each position of the side that windows slide over."""
        side = self.x if self.transposed else self.y
        return 2.0 * prod(side.shape[2:]) * side.shape[0] * prod(self.w.shape)


def _shapes(x: TensorType, w: TensorType, y: TensorType, options: Sequence[object]) -> _Shapes | None:
    """From ``stride, padding, dilation, transposed, output_padding, groups``; None without a batch dim."""
    stride, padding, dilation, transposed, _, groups = options
    assert isinstance(groups, int)
    if not x.ndim == w.ndim == y.ndim:
        return None
    tiles = {}
    for d in range(2, x.ndim):
        step, pad, gap = (_at(v, d - 2) for v in (stride, padding, dilation))
        reach = gap * (w.shape[d] - 1) + 1
        units = (1, step) if transposed else (step, 1)
        if reach <= step and pad == 0 and x.shape[d] * units[1] == y.shape[d] * units[0]:
            tiles[d] = units
    return _Shapes(x, w, y, bool(transposed), groups, tiles)


def _at(value: object, d: int) -> int:
    assert isinstance(value, tuple)
    return int(value[d] if len(value) > 1 else value[0])


@rule("aten.convolution.default")
def convolution(call: Call) -> OpRule:
    """(x, w, b, stride, padding, dilation, transposed, output_padding, groups)."""
    at = _shapes(call.inputs[0], call.inputs[1], call.out, call.args[3:9])
    if at is None:
        return OpRule()
    bias = call.tensor(2)
    factors = Factors(call)

    def with_bias(where: Where, places: dict[int, Where]) -> dict[int, Where]:
        return places if bias is None else {**places, bias: where}

    factors.add("n", {0: 0}, {0: 0})
    if at.groups == 1:
        factors.add("ci", with_bias(SUM, {0: 1, 1: at.dim_in}), {0: SUM})
        factors.add("co", with_bias(0, {1: at.dim_out}), {0: 1})
    else:
        in_x, in_y = at.group_cuts
        own = Cut(0, at.w.shape[0] // at.groups)
        factors.add("g", with_bias(Cut(0, in_y.unit), {0: in_x, 1: own}), {0: in_y})
    for d, (x_unit, y_unit) in at.tiles.items():
        factors.add(f"d{d}", {0: Cut(d, x_unit)}, {0: Cut(d, y_unit)})
    groups = ((0,), (1,)) if bias is None else ((0, bias), (1, bias))
    return OpRule(factors.done(), linear_sets(call, groups), rewrite=_convolution, flops=at.flops)


def _convolution(local: Local) -> LocalCall:
    op, args, kwargs = local.default()
    if local.row.name == "g":
        args = (*args[:8], local.stop - local.start)
    elif local.factor is not None and local.start == local.stop:
        return bias_only, (args[2], local.output_shapes[0]), {}
    return op, args, kwargs


def bias_only(bias: Tensor, shape: list[int]) -> Tensor:
    """A convolution over no input channels: the bias of each channel, of ``shape``."""
    return bias.reshape(1, -1, *[1] * (len(shape) - 2)).expand(shape).contiguous()


_SUMS_ALL = "a linear set sums every output, and this sums only some"
_OMITTED = {
    "{replicated, partial, *} {*replicated*}": _SUMS_ALL,
    "{replicated, replicated, partial} {*replicated*}": _SUMS_ALL,
}
_OMITTED_BIAS = {"*": "the gradient of b depends on gy alone, so x and w may have any form"}


@rule("aten.convolution_backward.default")
def convolution_backward(call: Call) -> OpRule:
    """(gy, x, w, bias_sizes, stride, padding, dilation, transposed, output_padding, groups, output_mask)."""
    at = _shapes(call.inputs[1], call.inputs[2], call.inputs[0], call.args[4:10])
    wants = tuple(t is not None for t in call.outputs)
    if at is None:
        return OpRule()
    factors = Factors(call)

    def outs(gx: Where, gw: Where, gb: Where) -> dict[int, Where]:
        return {k: where for k, where in enumerate((gx, gw, gb)) if wants[k]}

    factors.add("n", {0: 0, 1: 0}, outs(0, SUM, SUM))
    if at.groups == 1:
        factors.add("ci", {1: 1, 2: at.dim_in}, outs(1, at.dim_in, None))
        factors.add("co", {0: 1, 2: at.dim_out}, outs(SUM, at.dim_out, 0))
    else:
        in_x, in_y = at.group_cuts
        own = Cut(0, at.w.shape[0] // at.groups)
        factors.add("g", {0: in_y, 1: in_x, 2: own}, outs(in_x, own, Cut(0, in_y.unit)))
    for d, (x_unit, y_unit) in at.tiles.items():
        factors.add(f"d{d}", {0: Cut(d, y_unit), 1: Cut(d, x_unit)}, outs(Cut(d, x_unit), SUM, SUM))
    # gx is linear in w and gw in x, but a linear set sums every output
    crossed: dict[tuple[bool, ...], tuple[int, ...]] = {
        (True, False, False): (2,),
        (False, True, False): (1,),
        (True, True, False): (1, 2),
    }
    groups = linear_sets(call, ((0,), crossed.get(wants, ())))
    flops = at.flops * (wants[0] + wants[1]) + (prod(at.y.shape) if wants[2] else 0)
    omitted = _OMITTED if wants[0] or wants[1] else _OMITTED_BIAS
    return OpRule(factors.done(), groups, rewrite=_convolution_backward, flops=flops, omitted=omitted)


def _convolution_backward(local: Local) -> LocalCall:
    op, args, kwargs = local.default()
    name, wants_bias = local.row.name, local.call.outputs[2] is not None
    if local.factor is None:
        return op, args, kwargs
    if local.start == local.stop:  # only with ci and gb: the other outputs are cut, sums or absent
        dtypes = tuple(None if t is None else DType(t.dtype) for t in local.call.outputs[:2])
        return no_channels, (args[0], local.output_shapes[:2], dtypes, DEVICE), {}
    changed = list(args)
    if name == "g":
        changed[9] = local.stop - local.start
    if wants_bias:
        changed[3] = (local.input_shapes[0][1],)
    return op, tuple(changed), kwargs


def no_channels(
    gy: Tensor, shapes: list[list[int]], dtypes: list[torch.dtype | None], device: torch.device
) -> tuple[Tensor | None, ...]:
    """The gradients of a convolution over no input channels; the bias's does not depend on them."""
    return (*empty_shards(shapes, dtypes, device), gy.sum([0, *range(2, gy.ndim)]))
