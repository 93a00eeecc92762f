"""Rules of ops that only rearrange elements: views, permutations, repetitions, windows.

A view regroups the elements of consecutive dims. Take the shortest runs of input dims (a1, ..., am) and
output dims (b1, ..., bn) with the same product P, extents of 1 left out. Cutting the run's slowest dim is the
only cut of the run that keeps slices consecutive. An input slice is P/a1 elements, an output slice P/b1, so a
unit must be a multiple of both: lcm(P/a1, P/b1) = P / gcd(a1, b1). Hence gcd(a1, b1) units, of a1/gcd
elements along the input's dim and b1/gcd along the output's.
"""

from __future__ import annotations

from math import gcd, prod
from typing import cast

import torch

from hetspmd.rules.factor_places import Factors
from hetspmd.rules.registry import rule
from hetspmd.rules.rule import Call, Cut, Local, LocalCall, OpRule
from hetspmd.rules.terms import linear_sets, wrap
from hetspmd.trace.graph import ITEM_SIZES, Ref
from hetspmd.trace.view_runs import view_runs


def view_cuts(source: tuple[int, ...], target: tuple[int, ...]) -> list[tuple[Cut, Cut]]:
    """The cuts of a view from shape ``source`` to shape ``target``, slowest first (see the module)."""
    cuts = []
    for run in view_runs(source, target):
        first, second = run.source[0], run.target[0]
        units = gcd(source[first], target[second])
        if units > 1:
            cuts.append((Cut(first, source[first] // units), Cut(second, target[second] // units)))
    return cuts


def _reshape(local: Local) -> LocalCall:
    # reshape, not view: a local tensor may have other strides than the reference; and an explicit shape, not
    # squeeze: a local extent may be 1 where the reference's is not
    return "aten.reshape.default", (local.call.args[0], local.output_shapes[0]), {}


@rule(
    "aten.view.default", "aten._unsafe_view.default", "aten.reshape.default", "aten._reshape_copy.default",
    "aten.view_copy.default", "aten.flatten.using_ints", "aten.unflatten.int",
    "aten._reshape_alias.default", "aten.ravel.default",
    "aten.squeeze.default", "aten.squeeze.dim", "aten.squeeze.dims", "aten.unsqueeze.default",
    "aten.squeeze_copy.default", "aten.squeeze_copy.dim", "aten.squeeze_copy.dims",
    "aten.unsqueeze_copy.default",
)  # fmt: skip
def view(call: Call) -> OpRule:
    """Any op whose output is its first input in another shape."""
    factors = Factors(call)
    for k, (source, target) in enumerate(view_cuts(call.inputs[0].shape, call.out.shape)):
        factors.add(f"v{k}", {0: source}, {0: target})
    return OpRule(factors.done(), linear_sets(call, [(0,)]), rewrite=_reshape, alias=True)


@rule("aten.view.dtype", "aten.view_copy.dtype")
def view_dtype(call: Call) -> OpRule:
    """The same bits as another dtype: the last dim grows or shrinks by the ratio of the item sizes."""
    factors = Factors(call)
    x = call.inputs[0]
    size_in, size_out = ITEM_SIZES[x.dtype], ITEM_SIZES[call.out.dtype]
    for d in range(x.ndim):
        ratio_in, ratio_out = max(1, size_out // size_in), max(1, size_in // size_out)
        last = d == x.ndim - 1
        factors.add(f"d{d}", {0: Cut(d, ratio_in if last else 1)}, {0: Cut(d, ratio_out if last else 1)})
    return OpRule(factors.done(), rewrite=_view_dtype, alias=True)


def _view_dtype(local: Local) -> LocalCall:
    return view_bits, local.call.args, dict(local.call.kwargs)


def view_bits(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``x.view(dtype)`` whatever the strides of x."""
    return x.contiguous().view(dtype)


@rule(
    "aten.view_as_real.default",
    "aten.view_as_complex.default",
    "aten.view_as_real_copy.default",
    "aten.view_as_complex_copy.default",
)
def view_complex(call: Call) -> OpRule:
    """Complex numbers as pairs along a last dim, and back."""
    factors = Factors(call)
    for d in range(min(call.inputs[0].ndim, call.out.ndim)):
        factors.add(f"d{d}", {0: d}, {0: d})
    return OpRule(factors.done(), linear_sets(call, [(0,)]), alias=True)


@rule("aten.expand.default", "aten.expand_copy.default", "aten.broadcast_to.default")
def expand(call: Call) -> OpRule:
    """Dims of extent 1 (or new ones) repeat: the output may be cut there while the input is whole."""
    factors = Factors(call)
    x, out = call.inputs[0], call.out
    new = out.ndim - x.ndim
    for d in range(out.ndim):
        own = d - new >= 0 and x.shape[d - new] == out.shape[d]
        factors.add(f"d{d}", {0: d - new} if own else {}, {0: d})
    return OpRule(factors.done(), linear_sets(call, [(0,)]), rewrite=_expand, alias=True)


def _expand(local: Local) -> LocalCall:
    return "aten.expand.default", (local.call.args[0], local.output_shapes[0]), {}


@rule(
    "aten.permute.default",
    "aten.permute_copy.default",
    "aten.transpose.int",
    "aten.transpose_copy.int",
    "aten.t.default",
    "aten.t_copy.default",
    "aten.numpy_T.default",
)
def permute(call: Call) -> OpRule:
    """Dims change places."""
    ndim = call.inputs[0].ndim
    order = list(range(ndim))
    if "permute" in call.op:
        order = [wrap(d, ndim) for d in call.arg(1, "dims")]
    elif "transpose" in call.op and ndim:
        a, b = wrap(call.arg(1, "dim0"), ndim), wrap(call.arg(2, "dim1"), ndim)
        order[a], order[b] = b, a
    elif ".t" in call.op or "numpy_T" in call.op:
        order.reverse()
    factors = Factors(call)
    for d, source in enumerate(order):
        factors.add(f"d{d}", {0: source}, {0: d})
    return OpRule(factors.done(), linear_sets(call, [(0,)]), alias=True)


@rule("aten.repeat.default", "aten.tile.default")
def repeat(call: Call) -> OpRule:
    """A dim that is not repeated is cut as it is; a repeated one at multiples of its input extent."""
    x, out = call.inputs[0], call.out
    new = out.ndim - x.ndim
    factors = Factors(call)
    for d in range(out.ndim):
        extent = x.shape[d - new] if d >= new else 1
        if extent == 0:
            continue
        if out.shape[d] == extent:
            factors.add(f"d{d}", {0: d - new} if d >= new else {}, {0: d})
        else:
            factors.add(f"d{d}", {}, {0: Cut(d, extent)})
    return OpRule(factors.done(), linear_sets(call, [(0,)]), rewrite=_repeat)


def _repeat(local: Local) -> LocalCall:
    source, target = local.input_shapes[0], local.output_shapes[0]
    padded = (1,) * (len(target) - len(source)) + source
    times = tuple(b // a if a else 1 for a, b in zip(padded, target, strict=True))
    return "aten.repeat.default", (local.call.args[0], times), {}


@rule("aten.repeat_interleave.self_int")
def repeat_interleave(call: Call) -> OpRule:
    """Each element of one dim repeats: a unit is the copies of one element."""
    x, times = call.inputs[0], call.arg(1, "repeats")
    dim = call.arg(2, "dim")
    factors = Factors(call)
    if dim is None:
        if x.ndim and times and prod(x.shape):
            lead = next((d for d, extent in enumerate(x.shape) if extent > 1), 0)
            unit = prod(x.shape) // x.shape[lead] * times
            factors.add(f"d{lead}", {0: lead}, {0: Cut(0, unit)})
    else:
        at = wrap(dim, x.ndim)
        for d in range(x.ndim):
            if d != at or times:
                factors.add(f"d{d}", {0: d}, {0: Cut(d, times if d == at else 1)})
    return OpRule(factors.done(), linear_sets(call, [(0,)]), rewrite=_repeat_interleave)


def _repeat_interleave(local: Local) -> LocalCall:
    call = local.call
    # without output_size, which counts the elements of the whole output
    args = (call.args[0], call.arg(1, "repeats"), call.arg(2, "dim"))
    return "aten.repeat_interleave.self_int", args, {}


@rule("aten.as_strided.default", "aten.as_strided_copy.default", "aten.as_strided_scatter.default")
def as_strided(call: Call) -> OpRule:
    """Strides speak of the whole tensor's memory: never sharded, unless all of it is only given another shape.
    Holds for a contiguous reference input."""
    scatter = "scatter" in call.op
    groups = (0, 1) if scatter else (0,)
    if not _is_a_shape(call):
        return OpRule((), linear_sets(call, [groups]), rewrite=_as_strided)
    factors = Factors(call)
    for k, (source, target) in enumerate(view_cuts(call.inputs[-1].shape, call.out.shape)):
        factors.add(f"v{k}", {0: target, 1: source} if scatter else {0: source}, {0: target})
    return OpRule(factors.done(), linear_sets(call, [groups]), rewrite=_in_its_shape, alias=not scatter)


def _is_a_shape(call: Call) -> bool:
    """Whether size and strides are those of another shape of the whole contiguous input, where a dim has more than
    one element: all of it is read, or what is scattered takes its place."""
    first = len(call.inputs)
    size, strides = call.arg(first, "size"), call.arg(first + 1, "stride")
    own = [prod(size[dim + 1 :]) for dim in range(len(size))]
    return (
        prod(size) == prod(call.inputs[0].shape)
        and not call.arg(first + 2, "storage_offset")
        and all(extent == 1 or a == b for extent, a, b in zip(size, strides, own, strict=True))
    )


def _in_its_shape(local: Local) -> LocalCall:
    return "aten.reshape.default", (Ref(len(local.call.inputs) - 1), local.output_shapes[0]), {}


def _as_strided(local: Local) -> LocalCall:
    function = scatter_contiguous if "scatter" in local.call.op else stride_contiguous
    return function, local.call.args, dict(local.call.kwargs)


def stride_contiguous(
    x: torch.Tensor, size: list[int], stride: list[int], storage_offset: int | None = None
) -> torch.Tensor:
    """``as_strided`` of x laid out contiguously in memory of its own, as the reference's is."""
    return x.clone(memory_format=torch.contiguous_format).as_strided(size, stride, storage_offset or 0)


def scatter_contiguous(
    x: torch.Tensor, src: torch.Tensor, size: list[int], stride: list[int], storage_offset: int | None = None
) -> torch.Tensor:
    """``as_strided_scatter`` of x laid out contiguously in memory of its own, as the reference's is."""
    own = x.clone(memory_format=torch.contiguous_format)
    own.as_strided(size, stride, storage_offset or 0).copy_(src)
    return own


@rule("aten.unfold.default", "aten.unfold_copy.default")
def unfold(call: Call) -> OpRule:
    """Windows of one dim go to a last dim; where windows tile the dim, it is cut at whole windows."""
    ndim = call.inputs[0].ndim
    if ndim == 0:
        return OpRule((), linear_sets(call, [(0,)]), alias=True)
    at, size, step = wrap(call.arg(1, "dimension"), ndim), call.arg(2, "size"), call.arg(3, "step")
    factors = Factors(call)
    for d in range(ndim):
        if d != at:
            factors.add(f"d{d}", {0: d}, {0: d})
        elif size <= step and call.inputs[0].shape[d] == step * call.out.shape[d]:
            factors.add(f"d{d}", {0: Cut(d, step)}, {0: d})
    return OpRule(factors.done(), linear_sets(call, [(0,)]), alias=True)


@rule("aten.unfold_backward.default")
def unfold_backward(call: Call) -> OpRule:
    """The transpose of unfold: (grad, input_sizes, dim, size, step)."""
    out = call.out
    at, size, step = wrap(call.args[2], out.ndim), call.args[3], call.args[4]
    factors = Factors(call)
    for d in range(out.ndim):
        if d != at:
            factors.add(f"d{d}", {0: d}, {0: d})
        elif size <= step and out.shape[d] == step * call.inputs[0].shape[d]:
            factors.add(f"d{d}", {0: d}, {0: Cut(d, step)})
    return OpRule(factors.done(), linear_sets(call, [(0,)]), shape_args={1: 0})


@rule("aten.im2col.default", "aten.col2im.default")
def im2col(call: Call) -> OpRule:
    """[..., C, H, W] to [..., C kernel, windows], or back."""
    kernel = prod(call.arg(1 if "im2col" in call.op else 2, "kernel_size"))
    forward = "im2col" in call.op
    channel = call.inputs[0].ndim - (3 if forward else 2)
    factors = Factors(call)
    if channel:
        factors.add("n", {0: 0}, {0: 0})
    wide, narrow = Cut(channel, kernel), Cut(channel)
    flops = float(prod((call.out if forward else call.inputs[0]).shape))
    factors.add("c", {0: narrow if forward else wide}, {0: wide if forward else narrow})
    return OpRule(factors.done(), linear_sets(call, [(0,)]), flops=flops)


@rule("aten.pixel_shuffle.default", "aten.pixel_unshuffle.default")
def pixel_shuffle(call: Call) -> OpRule:
    """[..., C r r, H, W] to [..., C, H r, W r], or back."""
    r = cast(int, call.arg(1, "upscale_factor", call.kwargs.get("downscale_factor")))
    ndim = call.inputs[0].ndim
    packed, spread = (0, 1) if "unshuffle" not in call.op else (1, 0)
    factors = Factors(call)
    for d in range(ndim):
        unit = (r * r, 1) if d == ndim - 3 else (1, r) if d > ndim - 3 else (1, 1)
        factors.add(f"d{d}", {0: Cut(d, unit[packed])}, {0: Cut(d, unit[spread])})
    return OpRule(factors.done(), linear_sets(call, [(0,)]))


@rule("aten.channel_shuffle.default", "aten.native_channel_shuffle.default")
def channel_shuffle(call: Call) -> OpRule:
    """The channels (dim 1) change places among each other."""
    factors = Factors(call)
    for d in range(call.out.ndim):
        if d != 1:
            factors.add(f"d{d}", {0: d}, {0: d})
    return OpRule(factors.done(), linear_sets(call, [(0,)]))
