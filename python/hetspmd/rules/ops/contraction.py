"""Rules of contractions: products of tensors summed over shared dims.

``C[i, j] = sum_k A[i, k] B[k, j]``: i and j are parallel, k is a reduction. With a bias,
``beta * bias + alpha * A B`` is a sum over k too once the bias is held as summands (all of it on one
device), so a row that sums over k wants the bias All-Reduce. FLOPs are 2 * the product of all factor sizes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

import torch

from hetspmd.rules.registry import rule
from hetspmd.rules.rule import SUM, Call, Local, LocalCall, OpRule
from hetspmd.rules.terms import WRAPS, Dim, Term, broadcast_term, linear_sets, term_factors
from hetspmd.trace.graph import DType, Ref

_TERMS: dict[str, tuple[str, str, str]] = {
    "aten.mm.default": ("mk", "kn", "mn"),
    "aten.mm.dtype": ("mk", "kn", "mn"),
    "aten._int_mm.default": ("mk", "kn", "mn"),
    "aten.bmm.default": ("bmk", "bkn", "bmn"),
    "aten.bmm.dtype": ("bmk", "bkn", "bmn"),
    "aten.mv.default": ("mk", "k", "m"),
    "aten.dot.default": ("k", "k", ""),
    "aten.vdot.default": ("k", "k", ""),
    "aten.outer.default": ("m", "n", "mn"),
    "aten.ger.default": ("m", "n", "mn"),
}
"""Terms of the two arguments and the output, one letter per dim."""

_BIASED: dict[str, tuple[str, str, str]] = {
    "aten.addmm.default": ("mk", "kn", "mn"),
    "aten.addmm.dtype": ("mk", "kn", "mn"),
    "aten.baddbmm.default": ("bmk", "bkn", "bmn"),
    "aten.baddbmm.dtype": ("bmk", "bkn", "bmn"),
    "aten.addbmm.default": ("bmk", "bkn", "mn"),
    "aten.addmv.default": ("mk", "k", "m"),
    "aten.addr.default": ("m", "n", "mn"),
}
"""The same for ``op(bias, a, b, *, beta, alpha)``; the bias broadcasts to the output."""


def _flops(call: Call, terms: Sequence[Sequence[Dim]]) -> float:
    sizes: dict[str, int] = {}
    for term, type_ in zip(terms, call.inputs, strict=True):
        for dim, extent in zip(term, type_.shape, strict=True):
            if isinstance(dim, str):
                sizes[dim] = max(sizes.get(dim, 1), extent)
    return 2.0 * math.prod(sizes.values())


@rule(*_TERMS)
def _product(call: Call) -> OpRule:
    a, b, out = _TERMS[call.op]
    return OpRule(
        term_factors(call, [a, b], [out]),
        linear=linear_sets(call, [[0], [1]]),
        flops=_flops(call, [a, b]),
        omitted={"*partial} {partial}": WRAPS, "{partial*": WRAPS}
        if call.op == "aten._int_mm.default"
        else {},
    )


@rule(*_BIASED)
def _biased_product(call: Call) -> OpRule:
    a, b, out = _BIASED[call.op]
    bias = broadcast_term(out, call.inputs[0])
    flops = _flops(Call(call.op, call.args, call.kwargs, call.inputs[1:], call.outputs), [a, b])
    return OpRule(
        term_factors(call, [bias, a, b], [out], added={0}),
        linear=linear_sets(call, _bias_groups(call.kwargs.get("beta", 1) != 0)),
        rewrite=_biased_locally,
        flops=flops,
    )


def _biased_locally(local: Local) -> LocalCall:
    """Without a summand of the product, the bias alone: torch's addmv then forgets to broadcast it."""
    factor = local.factor
    if factor is None or local.start != local.stop or SUM not in factor.outputs:
        return local.default()
    beta, dtype = local.call.kwargs.get("beta", 1), DType(local.call.out.dtype)
    return scaled_bias, (Ref(0), beta, local.output_shapes[0], dtype), {}


def scaled_bias(bias: torch.Tensor, beta: float, shape: list[int], dtype: torch.dtype) -> torch.Tensor:
    """``beta * bias`` broadcast to ``shape``; zeros for ``beta`` 0, whatever the bias holds."""
    if beta == 0:
        return torch.zeros(shape, dtype=dtype, device=bias.device)
    return (bias.to(dtype) * beta).expand(shape).contiguous()


def _bias_groups(added: bool) -> list[list[int | None]]:
    """What such an op is linear in, of the bias and both factors; the bias counts if it is added at all."""
    groups: list[list[int | None]] = [[0, 1], [0, 2]]
    return groups if added else [*groups, [1], [2]]


@rule("aten.linear.default")
def _linear(call: Call) -> OpRule:
    x, w = call.inputs[0], call.inputs[1]
    lead = tuple(f"x{i}" for i in range(x.ndim - 1))
    x_term, w_term = (*lead, "k"), ("n", "k") if w.ndim == 2 else ("k",)
    out = (*lead, *w_term[:-1])
    terms: list[Term] = [x_term, w_term]
    bias = call.tensor(2, "bias")
    if bias is not None:
        terms.append(w_term[:-1] if call.inputs[bias].ndim == 1 else ())
    flops = _flops(Call(call.op, call.args, call.kwargs, call.inputs[:2], call.outputs), [x_term, w_term])
    return OpRule(
        term_factors(call, terms, [out], added=() if bias is None else {bias}),
        linear=linear_sets(call, [[bias, 0], [bias, 1]]),
        flops=flops,
    )


@rule("aten.matmul.default")
def _matmul(call: Call) -> OpRule:
    a, b = call.inputs
    a_term: tuple[str, ...] = ("k",) if a.ndim == 1 else ("m", "k")
    b_term: tuple[str, ...] = ("k",) if b.ndim == 1 else ("k", "n")
    lead = tuple(f"x{i}" for i in range(max(a.ndim, b.ndim) - 2))
    a_term = (*lead[len(lead) - max(a.ndim - 2, 0) :], *a_term)
    b_term = (*lead[len(lead) - max(b.ndim - 2, 0) :], *b_term)
    out = (*lead, *(["m"] if a.ndim > 1 else []), *(["n"] if b.ndim > 1 else []))
    return OpRule(
        term_factors(call, [a_term, b_term], [out]),
        linear=linear_sets(call, [[0], [1]]),
        flops=_flops(call, [a_term, b_term]),
    )


@rule("aten.einsum.default")
def _einsum(call: Call) -> OpRule:
    equation = re.sub(r"\s", "", str(call.args[0]))
    operands, arrow, output = equation.partition("->")
    written = operands.split(",")
    ellipses = [t.ndim - len(w.replace("...", "")) for w, t in zip(written, call.inputs, strict=True)]
    width = max((e for e, w in zip(ellipses, written, strict=True) if "..." in w), default=0)
    terms = [_einsum_term(w, e) for w, e in zip(written, ellipses, strict=True)]
    if not arrow:
        letters = operands.replace(",", "").replace("...", "")
        output = ("..." if "..." in operands else "") + "".join(
            c for c in sorted(set(letters)) if letters.count(c) == 1
        )
    diagonal = {n for t in terms for n in t if t.count(n) > 1}
    out = _einsum_term(output, width)
    factors = term_factors(call, [_without(t, diagonal) for t in terms], [_without(out, diagonal)])
    flops = float(len(terms)) * math.prod(
        max(
            t.shape[i]
            for t, term in zip(call.inputs, terms, strict=True)
            for i, n in enumerate(term)
            if n == name
        )
        for name in dict.fromkeys(n for t in terms for n in t)
    )
    return OpRule(factors, linear=linear_sets(call, [[i] for i in range(len(terms))]), flops=flops)


def _einsum_term(written: str, ellipsis: int) -> tuple[str, ...]:
    before, dots, after = written.partition("...")
    return (*before, *([f"_{i}" for i in range(ellipsis - 1, -1, -1)] if dots else ()), *after)


def _without(term: tuple[str, ...], names: set[str]) -> tuple[Dim, ...]:
    return tuple(None if n in names else n for n in term)


_GROUPED: dict[tuple[int, int], tuple[str, str, str]] = {
    (2, 3): ("rk", "gkn", "rn"),
    (3, 2): ("gmk", "kr", "mr"),
    (2, 2): ("mr", "rn", "gmn"),
    (3, 3): ("gmk", "gkn", "gmn"),
}
"""Dims of the two arguments -> terms; r is ragged: ``offs`` divides it into the groups g."""

_ITEM = {"float32": 4, "float16": 2, "bfloat16": 2}


@rule("aten._grouped_mm.default")
def _grouped_mm(call: Call) -> OpRule:
    """As a batched product, but neither a ragged dim nor then the groups can be cut.

    The kernels want rows of whole 16-byte pieces, so other dims are cut at multiples of that.
    """
    a, b = call.inputs[:2]
    terms = _GROUPED[a.ndim, b.ndim]
    whole = "rg" if "r" in terms[0] + terms[1] else ""
    unit = 16 // _ITEM.get(a.dtype, 4)
    tensors = (a, b, call.out)
    unaligned = {
        n
        for t, type_ in zip(terms, tensors, strict=True)
        for n, e in zip(t, type_.shape, strict=True)
        if e % unit
    }

    def dim(name: str) -> Dim:
        if name == "g":
            return None if whole else name
        return None if name in whole or name in unaligned else (name, unit)

    a_term, b_term, out = (tuple(map(dim, term)) for term in terms)
    products = Call(call.op, call.args, call.kwargs, (a, b), call.outputs)
    flops = _flops(products, terms[:2]) / (b.shape[0] if (a.ndim, b.ndim) == (2, 3) else 1)
    flops /= a.shape[0] if (a.ndim, b.ndim) == (3, 2) else 1
    if call.tensor(3, "bias") is not None:
        return OpRule(flops=flops)
    rest: list[Term] = [None] * (len(call.inputs) - 2)
    return OpRule(
        term_factors(call, [a_term, b_term, *rest], [out]), linear=linear_sets(call, [[0], [1]]), flops=flops
    )
