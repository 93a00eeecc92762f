"""Rules of ops that take, join or place parts of tensors, and of ops on the diagonal.

A dim along which an op takes only a part, joins, pads or reorders is blocked; all others are parallel. These
ops are linear: in the input, or in all joined inputs at once.
"""

from __future__ import annotations

from collections.abc import Collection

import torch

from hetspmd.rules.factor_places import Factors
from hetspmd.rules.registry import rule
from hetspmd.rules.rule import SUM, Call, Cut, Local, LocalCall, OpRule
from hetspmd.rules.terms import linear_sets, wrap


def _same_dims(call: Call, blocked: Collection[int], inputs: tuple[int, ...] = (0,)) -> Factors:
    """Factors of the dims that ``inputs`` and all outputs share by number, without the blocked ones."""
    factors = Factors(call)
    for d in range(call.inputs[inputs[0]].ndim):
        if d not in blocked:
            factors.add(f"d{d}", dict.fromkeys(inputs, d), dict.fromkeys(range(len(call.outputs)), d))
    return factors


def _without(call: Call, at: int) -> Factors:
    """Factors of a call whose outputs lack dim ``at`` of the input."""
    factors = Factors(call)
    for d in range(call.inputs[0].ndim):
        if d != at:
            factors.add(f"d{d}", {0: d}, dict.fromkeys(range(len(call.outputs)), d - (d > at)))
    return factors


@rule("aten.select.int", "aten.select_copy.int")
def select(call: Call) -> OpRule:
    """One index of one dim, which goes."""
    at = wrap(call.arg(1, "dim"), call.inputs[0].ndim)
    return OpRule(_without(call, at).done(), linear_sets(call, [(0,)]), alias=True)


@rule("aten.unbind.int", "aten.unbind_copy.int")
def unbind(call: Call) -> OpRule:
    """One output for each element of one dim, which goes."""
    at = wrap(call.arg(1, "dim", 0), call.inputs[0].ndim)
    return OpRule(_without(call, at).done(), linear_sets(call, [(0,)]), alias=True)


@rule("aten.select_backward.default")
def select_backward(call: Call) -> OpRule:
    """The transpose of select: (grad, input_sizes, dim, index)."""
    out = call.out
    at = wrap(call.args[2], out.ndim)
    factors = Factors(call)
    for d in range(out.ndim):
        if d != at:
            factors.add(f"d{d}", {0: d - (d > at)}, {0: d})
    return OpRule(factors.done(), linear_sets(call, [(0,)]), shape_args={1: 0})


@rule("aten.select_scatter.default")
def select_scatter(call: Call) -> OpRule:
    """(x, src, dim, index): src in place of one index of one dim."""
    x = call.inputs[0]
    at = wrap(call.arg(2, "dim"), x.ndim)
    factors = Factors(call)
    for d in range(x.ndim):
        if d != at:
            factors.add(f"d{d}", {0: d, 1: d - (d > at)}, {0: d})
    return OpRule(factors.done(), linear_sets(call, [(0, 1)]))


def _sliced(extent: int, length: int, start: int | None, step: int) -> bool:
    """Whether a slice takes one of every ``step`` elements of a dim: ``length`` of ``extent``.

    The same bounds then do so for any number of whole steps: an end beyond the local extent is clamped, and
    one that counts from the end cuts the last step where it did. A start must count from the front.
    """
    first = 0 if start is None or start <= -extent else start
    return 0 <= first < step and extent == step * length


@rule("aten.slice.Tensor", "aten.slice_copy.Tensor", "aten.slice_scatter.default")
def slice_(call: Call) -> OpRule:
    """(x, dim, start, end, step), or (x, src, dim, start, end, step) for slice_scatter."""
    x = call.inputs[0]
    scatter = "scatter" in call.op
    k = 2 if scatter else 1
    at = wrap(call.arg(k, "dim", 0), x.ndim)
    start, step = call.arg(k + 1, "start"), call.arg(k + 3, "step", 1)
    short = call.inputs[1] if scatter else call.out
    inputs = (0, 1) if scatter else (0,)
    factors = _same_dims(call, (at,), inputs)
    if _sliced(x.shape[at], short.shape[at], start, step):
        long = Cut(at, step)
        factors.add(f"d{at}", {0: long, 1: at} if scatter else {0: long}, {0: long if scatter else at})
    return OpRule(factors.done(), linear_sets(call, [inputs]), alias=not scatter)


@rule("aten.narrow.default", "aten.narrow_copy.default")
def narrow(call: Call) -> OpRule:
    """(x, dim, start, length)."""
    at = wrap(call.arg(1, "dim"), call.inputs[0].ndim)
    return OpRule(_same_dims(call, (at,)).done(), linear_sets(call, [(0,)]), alias=True)


@rule("aten.slice_backward.default")
def slice_backward(call: Call) -> OpRule:
    """The transpose of slice: (grad, input_sizes, dim, start, end, step)."""
    at = wrap(call.args[2], call.out.ndim)
    start, _, step = call.args[3:6]
    factors = _same_dims(call, (at,))
    if _sliced(call.out.shape[at], call.inputs[0].shape[at], start, step):
        factors.add(f"d{at}", {0: at}, {0: Cut(at, step)})
    return OpRule(factors.done(), linear_sets(call, [(0,)]), shape_args={1: 0})


@rule(
    "aten.split.Tensor",
    "aten.split_with_sizes.default",
    "aten.unsafe_split.Tensor",
    "aten.unsafe_split_with_sizes.default",
    "aten.split_copy.Tensor",
    "aten.split_with_sizes_copy.default",
    "aten.chunk.default",
    "aten.unsafe_chunk.default",
)
def split(call: Call) -> OpRule:
    """Parts of one dim."""
    at = wrap(call.arg(2, "dim", 0), call.inputs[0].ndim)
    return OpRule(_same_dims(call, (at,)).done(), linear_sets(call, [(0,)]), alias=True)


@rule("aten.cat.default", "aten.concat.default")
def cat(call: Call) -> OpRule:
    """Joined along one dim. An input of shape [0] may join tensors of any rank; it has nothing to cut."""
    at = wrap(call.arg(1, "dim", 0), call.out.ndim)
    real = [i for i, x in enumerate(call.inputs) if x.shape != (0,) or call.out.ndim == 1]
    factors = Factors(call)
    for d in range(call.out.ndim):
        if d != at:
            factors.add(f"d{d}", dict.fromkeys(real, d), {0: d})
    return OpRule(factors.done(), linear_sets(call, [tuple(range(len(call.inputs)))]))


@rule("aten.stack.default")
def stack(call: Call) -> OpRule:
    """Joined along a new dim."""
    at = wrap(call.arg(1, "dim", 0), call.out.ndim)
    every = range(len(call.inputs))
    factors = Factors(call)
    for d in range(call.inputs[0].ndim):
        factors.add(f"d{d}", dict.fromkeys(every, d), {0: d + (d >= at)})
    return OpRule(factors.done(), linear_sets(call, [tuple(every)]))


@rule("aten.flip.default", "aten.roll.default")
def reorder(call: Call) -> OpRule:
    """Elements change places along the named dims."""
    ndim = call.inputs[0].ndim
    dims = call.arg(1, "dims") if "flip" in call.op else call.arg(2, "dims", ()) or range(ndim)
    return OpRule(_same_dims(call, {wrap(d, ndim) for d in dims}).done(), linear_sets(call, [(0,)]))


@rule("aten.rot90.default")
def rot90(call: Call) -> OpRule:
    """(x, k, (a, b)): one turn reverses b, then swaps the two; three turns reverse a, then swap."""
    ndim = call.inputs[0].ndim
    turns = call.arg(1, "k", 1) % 4
    a, b = (wrap(d, ndim) for d in call.arg(2, "dims", (0, 1)))
    factors = _same_dims(call, (a, b) if turns else ())
    if turns == 1:
        factors.add(f"d{a}", {0: a}, {0: b})
    elif turns == 3:
        factors.add(f"d{b}", {0: b}, {0: a})
    return OpRule(factors.done(), linear_sets(call, [(0,)]))


def _padded(ndim: int, pad: tuple[int, ...]) -> set[int]:
    """The dims that ``pad`` changes: pairs of amounts, the last dim first."""
    return {ndim - 1 - k // 2 for k, amount in enumerate(pad) if amount}


@rule("aten.constant_pad_nd.default")
def constant_pad(call: Call) -> OpRule:
    """(x, pad, value): linear when it pads with zeros."""
    blocked = _padded(call.out.ndim, call.arg(1, "pad"))
    groups = linear_sets(call, [(0,)]) if call.arg(2, "value", 0) == 0 else ()
    return OpRule(_same_dims(call, blocked).done(), groups)


_PADS = [f"aten.{kind}_pad{k}d" for kind in ("reflection", "replication") for k in (1, 2, 3)]


@rule(*(f"{name}.default" for name in _PADS))
def edge_pad(call: Call) -> OpRule:
    """(x, padding): the padding comes from the same plane."""
    blocked = _padded(call.out.ndim, call.arg(1, "padding"))
    return OpRule(_same_dims(call, blocked).done(), linear_sets(call, [(0,)]))


@rule(*(f"{name}_backward.default" for name in _PADS))
def edge_pad_backward(call: Call) -> OpRule:
    """(grad, x, padding): x gives only its shape."""
    blocked = _padded(call.out.ndim, call.arg(2, "padding"))
    return OpRule(_same_dims(call, blocked, (0, 1)).done(), linear_sets(call, [(0,)]))


@rule("aten.tril.default", "aten.triu.default")
def triangle(call: Call) -> OpRule:
    """Zero on one side of a diagonal of the last two dims; a cut of either moves the diagonal."""
    return OpRule(_same_dims(call, ()).done(), linear_sets(call, [(0,)]), rewrite=_triangle)


def _triangle(local: Local) -> LocalCall:
    # kept by tril: col - row <= diagonal. With rows cut, row = start + local row; with columns likewise.
    call, factor = local.call, local.factor
    diagonal = call.arg(1, "diagonal", 0)
    cut = factor.inputs[0] if factor is not None else None
    if isinstance(cut, Cut):
        ndim = call.out.ndim
        diagonal += {ndim - 2: local.start, ndim - 1: -local.start}.get(cut.dim, 0)
    return call.op, (call.args[0], diagonal), {}


@rule("aten.diagonal.default", "aten.diagonal_copy.default")
def diagonal(call: Call) -> OpRule:
    """(x, offset, dim1, dim2): the diagonal becomes the last dim."""
    ndim = call.inputs[0].ndim
    pair = {wrap(call.arg(2, "dim1", 0), ndim), wrap(call.arg(3, "dim2", 1), ndim)}
    factors = Factors(call)
    for k, d in enumerate(d for d in range(ndim) if d not in pair):
        factors.add(f"d{d}", {0: d}, {0: k})
    return OpRule(factors.done(), linear_sets(call, [(0,)]), alias=True)


@rule("aten.diagonal_backward.default", "aten.diag_embed.default", "aten.diagonal_scatter.default")
def diagonal_placed(call: Call) -> OpRule:
    """A last dim becomes a diagonal: of zeros, or of another tensor (diagonal_scatter: x, src, ...)."""
    ndim = call.out.ndim
    if "embed" in call.op:
        dims, src = (call.arg(2, "dim1", -2), call.arg(3, "dim2", -1)), 0
    elif "backward" in call.op:
        dims, src = (call.args[3], call.args[4]), 0
    else:
        dims, src = (call.arg(3, "dim1", 0), call.arg(4, "dim2", 1)), 1
    pair = {wrap(d, ndim) for d in dims}
    factors = Factors(call)
    for k, d in enumerate(d for d in range(ndim) if d not in pair):
        factors.add(f"d{d}", {src: k, 0: d if src else k}, {0: d})
    groups = linear_sets(call, [(0, 1) if src else (0,)])
    return OpRule(factors.done(), groups, shape_args={1: 0} if "backward" in call.op else {})


@rule("aten.trace.default")
def trace(call: Call) -> OpRule:
    """The sum of a matrix's diagonal: a cut of either dim moves the diagonal."""
    factors = Factors(call)
    for d in range(2):
        factors.add(f"d{d}", {0: d}, {0: SUM})
    return OpRule(factors.done(), linear_sets(call, [(0,)]), rewrite=_trace)


def _trace(local: Local) -> LocalCall:
    factor = local.factor
    if factor is None:
        return local.default()
    cut = factor.inputs[0]
    offset = local.start if isinstance(cut, Cut) and cut.dim == 0 else -local.start
    return trace_part, (local.call.args[0], offset), {}


def trace_part(x: torch.Tensor, offset: int) -> torch.Tensor:
    """The sum of the diagonal of x that is ``offset`` columns to the right."""
    return x.diagonal(offset).sum()
