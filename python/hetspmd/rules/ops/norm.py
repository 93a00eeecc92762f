"""Rules of normalisations: the dims that statistics are taken over are never cut.

Gradients of weight and bias sum over every other dim, so those rows end in All-Reduce. Batch norm with given
statistics is elementwise; with batch statistics only channels are parallel (tracing decomposes that case into
sums, which may be sharded further). Group norm is told its extents: N, C and the number of groups are local.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hetspmd.rules.registry import rule
from hetspmd.rules.rule import Call, Local, LocalCall, OpRule
from hetspmd.rules.terms import Dim, Term, dim_names, linear_sets, term_factors, zero_outputs

_PARTIAL = {
    "{replicated, *partial*} {*}": "linear in weight and bias, which are parameters: no cheaper as summands",
    "{partial, *partial*} {*}": "affine in the input, but the statistics come back whole",
}


def _size(call: Call) -> float:
    return float(math.prod(call.inputs[0].shape))


def _lead(call: Call, x: int, position: int) -> tuple[tuple[Dim, ...], tuple[Dim, ...]]:
    """Terms of the input and of its statistics, where the last dims are normalised."""
    ndim = call.inputs[x].ndim
    lead = ndim - len(call.args[position])
    term = tuple(n if i < lead else None for i, n in enumerate(dim_names(ndim)))
    return term, term


def _or_none(call: Call, terms: Sequence[Term]) -> list[Term]:
    """The outputs' terms, None where the op returns none."""
    return [None if out is None else term for out, term in zip(call.outputs, terms, strict=True)]


def _input_terms(call: Call, terms: dict[int | None, Term]) -> list[Term]:
    return [terms.get(i) for i in range(len(call.inputs))]


@rule("aten.native_layer_norm.default", "aten._fused_rms_norm.default")
def _layer_norm(call: Call) -> OpRule:
    term, stats = _lead(call, 0, 1)
    outputs = [term, *[stats] * (len(call.outputs) - 1)]
    inputs: list[Term] = [term, *[None] * (len(call.inputs) - 1)]
    return OpRule(term_factors(call, inputs, outputs), flops=8 * _size(call), omitted=_PARTIAL)


@rule("aten.rms_norm.default")
def _rms_norm(call: Call) -> OpRule:
    term, _ = _lead(call, 0, 1)
    return OpRule(
        term_factors(call, [term, *[None] * (len(call.inputs) - 1)], [term]),
        flops=6 * _size(call),
        omitted=_PARTIAL,
    )


@rule("aten.native_layer_norm_backward.default")
def _layer_norm_backward(call: Call) -> OpRule:
    term, stats = _lead(call, 1, 2)
    inputs = _input_terms(
        call, {0: term, 1: term, call.tensor(3, "mean"): stats, call.tensor(4, "rstd"): stats}
    )
    return OpRule(
        term_factors(
            call, inputs, _or_none(call, [term, (None,) * _normalised(call), (None,) * _normalised(call)])
        ),
        linear=linear_sets(call, [[0]]),
        flops=14 * _size(call),
        omitted=_PARTIAL,
    )


def _normalised(call: Call) -> int:
    return len(call.args[2])


@rule("aten._fused_rms_norm_backward.default")
def _rms_norm_backward(call: Call) -> OpRule:
    term, stats = _lead(call, 1, 2)
    inputs = _input_terms(call, {0: term, 1: term, call.tensor(3, "rstd"): stats})
    return OpRule(
        term_factors(call, inputs, _or_none(call, [term, (None,) * _normalised(call)])),
        linear=linear_sets(call, [[0]]),
        flops=12 * _size(call),
        omitted=_PARTIAL,
    )


def _group_terms(call: Call, groups: int, x: int) -> tuple[Term, Term, Term]:
    """Terms of the input, of the statistics [N, groups], and of weight and bias [C]."""
    shape = call.inputs[x].shape
    channels: Dim = ("g", shape[1] // groups)
    return ("n", channels, *[None] * (len(shape) - 2)), ("n", "g"), (channels,)


@rule("aten.native_group_norm.default")
def _group_norm(call: Call) -> OpRule:
    x, stats, weight = _group_terms(call, call.args[6], 0)
    inputs: list[Term] = [x, *[weight] * (len(call.inputs) - 1)]
    factors = term_factors(call, inputs, [x, stats, stats])
    return OpRule(factors, rewrite=_group_norm_locally, flops=8 * _size(call), omitted=_PARTIAL)


def _group_norm_locally(local: Local) -> LocalCall:
    return _with_group_extents(local, batch=3, channels=4, groups=6)


@rule("aten.native_group_norm_backward.default")
def _group_norm_backward(call: Call) -> OpRule:
    x, stats, weight = _group_terms(call, call.args[8], 1)
    inputs: list[Term] = [x, x, stats, stats, *[weight] * (len(call.inputs) - 4)]
    return OpRule(
        term_factors(call, inputs, _or_none(call, [x, weight, weight])),
        linear=linear_sets(call, [[0]]),
        rewrite=_group_norm_backward_locally,
        flops=14 * _size(call),
        omitted=_PARTIAL,
    )


def _group_norm_backward_locally(local: Local) -> LocalCall:
    return _with_group_extents(local, batch=5, channels=6, groups=8)


def _with_group_extents(local: Local, *, batch: int, channels: int, groups: int) -> LocalCall:
    target, args, kwargs = local.default()
    changed: list[Any] = list(args)
    held = local.stop - local.start
    if local.factor is not None and local.factor.name == "n":
        changed[batch] = held
    elif local.factor is not None:
        changed[channels] = local.input_shapes[0][1]
        changed[groups] = held
    return target, tuple(changed), kwargs


def _spatial(call: Call, *, batch: bool) -> Term:
    """Term of a batch norm's input: all dims, or only channels where statistics are taken over the rest."""
    names = dim_names(call.inputs[0].ndim, "s")
    return tuple("c" if i == 1 else (n if batch else None) for i, n in enumerate(names))


def _statistics(call: Call) -> list[Term]:
    """Terms of the outputs after the first: per channel, or empty."""
    return [None if t is None or t.shape != (_channels(call),) else ("c",) for t in call.outputs[1:]]


def _channels(call: Call) -> int:
    return call.inputs[0].shape[1]


def _batch_norm(call: Call, *, training: bool) -> OpRule:
    x = _spatial(call, batch=not training)
    outputs = [x, *_statistics(call)]
    inputs: list[Term] = [x, *[("c",)] * (len(call.inputs) - 1)]
    factors = term_factors(call, inputs, [x, *[None] * (len(outputs) - 1)]) if not training else ()
    # With given statistics the per-channel outputs are whole while batch or space is cut.
    by_channel = [f for f in term_factors(call, inputs, outputs) if f.name == "c"]
    return OpRule(
        (*by_channel, *(f for f in factors if f.name != "c")), flops=8 * _size(call), omitted=_PARTIAL
    )


@rule("aten._native_batch_norm_legit_functional.default", "aten.native_batch_norm.default")
def _batch_norm_flag(call: Call) -> OpRule:
    return _batch_norm(call, training=bool(call.arg(5, "training")))


@rule("aten._native_batch_norm_legit_no_training.default", "aten._batch_norm_no_update.default")
def _batch_norm_given(call: Call) -> OpRule:
    return _batch_norm(call, training=False)


@rule("aten._native_batch_norm_legit.no_stats")
def _batch_norm_no_stats(call: Call) -> OpRule:
    return _batch_norm(call, training=True)


@rule("aten._batch_norm_with_update_functional.default")
def _batch_norm_update(call: Call) -> OpRule:
    return replace(_batch_norm(call, training=True), rewrite=_batch_norm_update_locally)


def _batch_norm_update_locally(local: Local) -> LocalCall:
    """The reserve, which only cuDNN uses, counts as whole; with it, no shard may be empty."""
    return zero_outputs(local) if local.factor is not None and local.start == local.stop else local.default()


@rule("aten.native_batch_norm_backward.default", "aten.batch_norm_backward.default")
def _batch_norm_backward(call: Call) -> OpRule:
    training = bool(call.arg(7, "train"))
    x = _spatial(call, batch=not training)
    inputs: list[Term] = [x, x]
    inputs += [("c",) if t.shape == (_channels(call),) else None for t in call.inputs[2:]]
    factors = term_factors(call, inputs, _or_none(call, [x, ("c",), ("c",)]))
    return OpRule(
        factors,
        linear=linear_sets(call, [[0]]),
        flops=14 * _size(call),
        omitted=_PARTIAL,
    )


def _weight_norm_terms(call: Call, dim: int) -> Term:
    dims = call.inputs[0].ndim
    return tuple("c" if i == dim % dims else None for i in range(dims))


@rule("aten._weight_norm_interface.default")
def _weight_norm(call: Call) -> OpRule:
    """``v * g / |v|``, the norm over all dims but one."""
    term = _weight_norm_terms(call, call.arg(2, "dim", 0))
    factors = term_factors(call, [term, term], [term, term])
    return OpRule(factors, flops=3 * _size(call), omitted=_PARTIAL)


@rule("aten._weight_norm_interface_backward.default")
def _weight_norm_backward(call: Call) -> OpRule:
    term = _weight_norm_terms(call, call.arg(4, "dim"))
    factors = term_factors(call, [term] * 4, [term, term])
    return OpRule(factors, linear=linear_sets(call, [[0]]), flops=6 * _size(call), omitted=_PARTIAL)
