"""Rules of fused scaled-dot-product attention: samples and heads are parallel.

Query [B, H, L, E], key and value [B, H', S, E]. With grouped queries (H = r * H'), one unit of the head
factor is r query heads and their one key head; with a single key head (H' = 1) query heads are parallel and
the key's gradient is a sum. Query positions are parallel where attention is not causal and the kernel's
log-sum-exp is not padded; the key's and value's gradients are then sums. A kernel's seed outputs do not
matter without dropout. With dropout inside the kernel, forward and backward must draw alike on every device,
so such a call is never sharded: the trace puts an op with a seed for each sample and head in its place
(:mod:`hetspmd.trace.dropout_attention`), of which these are parallel.
"""

from __future__ import annotations

from dataclasses import dataclass

from hetspmd.rules.registry import rule
from hetspmd.rules.rule import Call, Local, LocalCall, OpRule, TensorType
from hetspmd.rules.terms import Dim, Term, broadcast_term, linear_sets, term_factors, zero_outputs

_VALUE_DIM = "the fused kernels want query, key and value of one head size"
_VALUES = "linear in the values in some outputs only: a row with All-Reduce is All-Reduce in all"


@dataclass(frozen=True)
class _Shape:
    """Terms of the tensors of an attention."""

    query: Term
    key: Term
    score: tuple[Dim, ...]
    statistics: tuple[Dim, ...]
    heads: tuple[Dim, ...]
    flops: float


def _shape(query: TensorType, key: TensorType, value: TensorType, *, positions: bool) -> _Shape | None:
    """None for a layout other than four dims with whole groups of query heads."""
    if not query.ndim == key.ndim == value.ndim == 4:
        return None
    batch, heads, length, width = query.shape
    groups = key.shape[1]
    if groups == 0 or heads % groups or value.shape[1] != groups:
        return None
    head: Dim = "h" if groups in (1, heads) else ("h", heads // groups)
    place = "l" if positions else None
    return _Shape(
        query=("b", head, place, None),
        key=("b", "h", None, None),
        score=("b", head, place, None),
        statistics=("b", head, place),
        heads=("b", head),
        flops=2.0 * batch * heads * length * key.shape[2] * (width + value.shape[3]),
    )


def _logsumexp_term(shape: _Shape, type_: TensorType | None, length: int) -> Term:
    """Per sample and head; per position too, unless padded or left out."""
    if type_ is None or type_.ndim < 3:
        return None
    head = shape.statistics[: 3 if type_.shape[2] == length else 2]
    return (*head, *[None] * (type_.ndim - len(head)))


def _dropout(call: Call, position: int) -> bool:
    return float(call.arg(position, "dropout_p", 0.0)) > 0.0


def _forward(call: Call, *, mask: int | None, causal: bool, dropout: bool, positions: bool) -> OpRule:
    """The rule of an attention that returns its output, a log-sum-exp or nothing, and seeds."""
    shape = _shape(*call.inputs[:3], positions=positions and not causal)
    if shape is None or dropout:
        return OpRule(random=dropout)
    inputs: list[Term] = [shape.query, shape.key, shape.key, *[None] * (len(call.inputs) - 3)]
    if mask is not None:
        inputs[mask] = broadcast_term(shape.score, call.inputs[mask])
    length = call.inputs[0].shape[2]
    outputs: list[Term] = [shape.query, *[None] * (len(call.outputs) - 1)]
    if len(outputs) > 1:
        outputs[1] = _logsumexp_term(shape, call.outputs[1], length)
    return OpRule(
        term_factors(call, inputs, outputs),
        linear=linear_sets(call, [[2]]) if len(outputs) == 1 else (),
        rewrite=_seeded,
        flops=shape.flops,
        omitted={"{*, shard(3)*} {*}": _VALUE_DIM, "{replicated, *partial*} {*": _VALUES},
    )


def _seeded(local: Local) -> LocalCall:
    """Some kernels refuse empty shards."""
    if local.factor is None or local.start != local.stop:
        return local.default()
    return zero_outputs(local)


def _backward(
    call: Call,
    *,
    out: int | None,
    logsumexp: int | None,
    mask: int | None,
    causal: bool,
    dropout: bool,
    positions: bool,
) -> OpRule:
    """The rule of a backward: inputs 0 to 3 are grad_out, query, key, value."""
    shape = _shape(*call.inputs[1:4], positions=positions and not causal)
    if shape is None or dropout:
        return OpRule()
    inputs: list[Term] = [shape.query, shape.query, shape.key, shape.key, *[None] * (len(call.inputs) - 4)]
    if out is not None:
        inputs[out] = shape.query
    if logsumexp is not None:
        inputs[logsumexp] = _logsumexp_term(shape, call.inputs[logsumexp], call.inputs[1].shape[2])
    outputs: list[Term] = [shape.query, shape.key, shape.key]
    if mask is not None:
        inputs[mask] = broadcast_term(shape.score, call.inputs[mask])
    if len(call.outputs) > 3:
        bias = call.outputs[3]
        outputs.append(None if bias is None else broadcast_term(shape.score, bias))
    terms = [None if t is None else term for t, term in zip(call.outputs, outputs, strict=True)]
    return OpRule(
        term_factors(call, inputs, terms),
        linear=linear_sets(call, [[0]]),
        flops=2.5 * shape.flops,
        omitted={"{replicated, *partial*} {*": _VALUES},
    )


@rule("aten._scaled_dot_product_flash_attention_for_cpu.default")
def _flash_cpu(call: Call) -> OpRule:
    return _forward(
        call,
        mask=call.tensor(len(call.args), "attn_mask"),
        causal=bool(call.arg(4, "is_causal", False)),
        dropout=_dropout(call, 3),
        positions=True,
    )


@rule("aten._scaled_dot_product_flash_attention_for_cpu_backward.default")
def _flash_cpu_backward(call: Call) -> OpRule:
    return _backward(
        call,
        out=call.tensor(4, "out"),
        logsumexp=call.tensor(5, "logsumexp"),
        mask=call.tensor(len(call.args), "attn_mask"),
        causal=bool(call.arg(7, "is_causal")),
        dropout=_dropout(call, 6),
        positions=True,
    )


@rule("aten._scaled_dot_product_flash_attention.default")
def _flash(call: Call) -> OpRule:
    causal = bool(call.arg(4, "is_causal", False))
    return _forward(call, mask=None, causal=causal, dropout=_dropout(call, 3), positions=False)


@rule("aten._scaled_dot_product_flash_attention_backward.default")
def _flash_backward(call: Call) -> OpRule:
    return _backward(
        call,
        out=call.tensor(4, "out"),
        logsumexp=call.tensor(5, "logsumexp"),
        mask=None,
        causal=bool(call.arg(11, "is_causal")),
        dropout=_dropout(call, 10),
        positions=False,
    )


@rule(
    "aten._scaled_dot_product_efficient_attention.default", "aten._scaled_dot_product_cudnn_attention.default"
)
def _biased(call: Call) -> OpRule:
    return _forward(
        call,
        mask=call.tensor(3, "attn_bias"),
        causal=bool(call.arg(6, "is_causal", False)),
        dropout=_dropout(call, 5),
        positions=False,
    )


@rule("aten._scaled_dot_product_efficient_attention_backward.default")
def _efficient_backward(call: Call) -> OpRule:
    return _backward(
        call,
        out=call.tensor(5, "out"),
        logsumexp=call.tensor(6, "logsumexp"),
        mask=call.tensor(4, "attn_bias"),
        causal=bool(call.arg(11, "is_causal", False)),
        dropout=_dropout(call, 9),
        positions=False,
    )


@rule("aten._scaled_dot_product_cudnn_attention_backward.default")
def _cudnn_backward(call: Call) -> OpRule:
    return _backward(
        call,
        out=call.tensor(4, "out"),
        logsumexp=call.tensor(5, "logsumexp"),
        mask=call.tensor(8, "attn_bias"),
        causal=bool(call.arg(14, "is_causal")),
        dropout=_dropout(call, 13),
        positions=False,
    )


@rule("aten.scaled_dot_product_attention.default", "aten._scaled_dot_product_attention_math.default")
def _composite(call: Call) -> OpRule:
    """The undecomposed function; ``_math`` also returns the attention weights [B, H, L, S]."""
    causal, dropout = bool(call.arg(5, "is_causal", False)), _dropout(call, 4)
    mask = call.tensor(3, "attn_mask")
    if len(call.inputs) > (3 if mask is None else 4):
        return OpRule(random=dropout)
    return _forward(call, mask=mask, causal=causal, dropout=dropout, positions=True)


@rule("hetspmd_ops.dropout_attention.default")
def _divisible(call: Call) -> OpRule:
    """Outputs are the output, the log-sum-exp and what the gradient needs [B, H, 2]."""
    shape = _shape(*call.inputs[:3], positions=False)
    if shape is None:
        return OpRule()
    mask, seeds = call.tensor(3, "attn_bias"), call.tensor(4, "seeds")
    inputs: list[Term] = [shape.query, shape.key, shape.key, *[None] * (len(call.inputs) - 3)]
    if mask is not None:
        inputs[mask] = broadcast_term(shape.score, call.inputs[mask])
    if seeds is not None:
        inputs[seeds] = shape.heads
    outputs: list[Term] = [shape.query, shape.statistics, (*shape.heads, None)]
    return OpRule(
        term_factors(call, inputs, outputs),
        rewrite=_seeded,
        flops=shape.flops,
        omitted={"{*, shard(3)*} {*}": _VALUE_DIM, "{replicated, *partial*} {*": _VALUES},
    )


@rule("hetspmd_ops.dropout_attention_backward.default")
def _divisible_backward(call: Call) -> OpRule:
    shape = _shape(*call.inputs[1:4], positions=False)
    if shape is None:
        return OpRule()
    inputs: list[Term] = [shape.query, shape.query, shape.key, shape.key, *[None] * (len(call.inputs) - 4)]
    for place, name, term in (
        (5, "out", shape.query),
        (6, "logsumexp", shape.statistics),
        (7, "state", (*shape.heads, None)),
    ):
        index = call.tensor(place, name)
        assert index is not None, "all are tensors"
        inputs[index] = term
    mask = call.tensor(4, "attn_bias")
    if mask is not None:
        inputs[mask] = broadcast_term(shape.score, call.inputs[mask])
    return OpRule(
        term_factors(call, inputs, [shape.query, shape.key, shape.key]),
        linear=linear_sets(call, [[0]]),
        rewrite=_seeded,
        flops=2.5 * shape.flops,
        omitted={"{replicated, *partial*} {*": _VALUES},
    )
