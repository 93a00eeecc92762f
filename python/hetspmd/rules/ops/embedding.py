"""Rules of embeddings: positions and features are parallel, the vocabulary is a reduction.

A device that holds the rows ``[low, low + n)`` of the table looks up the indices in that range and
contributes zeros for the others; the sum over devices is the whole lookup. The table's gradient over a shard
of the vocabulary is that of the indices in the range, and over a shard of the positions a summand.
"""

from __future__ import annotations

import torch

from hetspmd.rules.registry import rule
from hetspmd.rules.rule import Call, Local, LocalCall, OpRule
from hetspmd.rules.terms import Dim, Term, dim_names, linear_sets, term_factors
from hetspmd.trace.graph import DType, Ref

_MAX = 2
"""torch's code of the mode ``max``."""

_BAGS = "linear in the table, but a linear row would make the counts All-Reduce too"


@rule("aten.embedding.default")
def _embedding(call: Call) -> OpRule:
    names = dim_names(call.inputs[1].ndim)
    factors = term_factors(call, [("v", "e"), names], [(*names, "e")])
    return OpRule(factors, linear=linear_sets(call, [[0]]), rewrite=_embedding_locally)


def _embedding_locally(local: Local) -> LocalCall:
    if local.factor is None or local.factor.name != "v":
        return local.default()
    return embedding_part, (Ref(0), Ref(1), local.start), {}


def embedding_part(weight: torch.Tensor, indices: torch.Tensor, low: int) -> torch.Tensor:
    """Rows of the table where ``low <= index < low + len(weight)``, zeros elsewhere: [*indices, E]."""
    inside = (indices >= low) & (indices < low + weight.shape[0])
    rows: torch.Tensor = torch.ops.aten.embedding.default(weight, torch.where(inside, indices - low, 0))
    return rows.masked_fill(~inside.unsqueeze(-1), 0)


@rule("aten.embedding_dense_backward.default")
def _embedding_backward(call: Call) -> OpRule:
    names: tuple[Dim, ...] = dim_names(call.inputs[1].ndim)
    if call.args[4]:  # counts how often an index appears anywhere
        names = (None,) * len(names)
    factors = term_factors(call, [(*names, "e"), names], [("v", "e")])
    return OpRule(factors, linear=linear_sets(call, [[0]]), rewrite=_embedding_backward_locally)


def _embedding_backward_locally(local: Local) -> LocalCall:
    if local.factor is None or local.factor.name != "v":
        return local.default()
    _, _, _, padding, by_frequency = local.call.args
    args = (Ref(0), Ref(1), local.start, local.stop - local.start, padding, by_frequency)
    return embedding_backward_part, args, {}


def embedding_backward_part(
    grad: torch.Tensor, indices: torch.Tensor, low: int, count: int, padding: int, by_frequency: bool
) -> torch.Tensor:
    """Rows ``[low, low + count)`` of the table's gradient: [count, E]."""
    inside = (indices >= low) & (indices < low + count) & (indices != padding)
    local = torch.where(inside, indices - low, count)
    whole: torch.Tensor = torch.ops.aten.embedding_dense_backward.default(
        grad, local, count + 1, -1, by_frequency
    )
    return whole[:count].clone()


@rule("aten._embedding_bag.default", "aten._embedding_bag_forward_only.default")
def _embedding_bag(call: Call) -> OpRule:
    """Features are parallel; bags are ragged and stay whole."""
    inputs: list[Term] = [(None, "e"), *[None] * (len(call.inputs) - 1)]
    outputs: list[Term] = [(None, "e"), None, None, _maxima(call.outputs[3], call.out.shape[1])]
    return OpRule(term_factors(call, inputs, outputs), omitted={"*partial*} {*": _BAGS})


def _maxima(type_: object, width: int) -> Term:
    """Term of ``max_indices``: [bags, E] in mode max, else one-dimensional."""
    shape: tuple[int, ...] = getattr(type_, "shape", ())
    return (None, "e") if len(shape) == 2 and shape[1] == width else None


@rule("aten._embedding_bag_dense_backward.default")
def _embedding_bag_backward(call: Call) -> OpRule:
    indices, maxima = call.inputs[1], call.tensor(4, "maximum_indices")
    inputs: list[Term] = [(None, "e"), *[None] * (len(call.inputs) - 1)]
    weights = call.tensor(8, "per_sample_weights")
    groups: list[list[int | None]] = [[0], [weights]]
    if call.args[7] == _MAX:  # reads no index but the winners'
        inputs[0], inputs[3] = ("b", "e"), ("b",)
        if maxima is not None:
            inputs[maxima] = ("b", "e")
    elif not call.args[6] and call.inputs[2].shape == indices.shape:  # each index adds a row of its own
        inputs[1] = inputs[2] = ("n",)
        if weights is not None:
            inputs[weights] = ("n",)
    return OpRule(
        term_factors(call, inputs, [(None, "e")]),
        linear=linear_sets(call, groups),
        omitted={"{partial, shard(0)*": "in mode max the indices are not read"},
    )


@rule("aten._embedding_bag_backward.default")
def _embedding_bag_backward_by_offsets(call: Call) -> OpRule:
    """Features are parallel; bags are ragged and stay whole. A sparse gradient is not divided."""
    if call.arg(9, "sparse", False):
        return OpRule()
    maxima = call.tensor(5, "maximum_indices")
    inputs: list[Term] = [(None, "e"), *[None] * (len(call.inputs) - 1)]
    if maxima is not None:
        inputs[maxima] = _maxima(call.inputs[maxima], call.out.shape[1])
    groups: list[list[int | None]] = [[0], [call.tensor(10, "per_sample_weights")]]
    return OpRule(
        term_factors(call, inputs, [(None, "e")]),
        linear=linear_sets(call, groups),
        omitted={"*shard(0)*": "bags are ragged: a share of the indices is not a share of the bags"},
    )


@rule("aten.one_hot.default")
def _one_hot(call: Call) -> OpRule:
    if call.arg(1, "num_classes", -1) < 0:  # the number of classes depends on the data
        return OpRule()
    names = dim_names(call.inputs[0].ndim)
    return OpRule(term_factors(call, [names], [(*names, "c")]), rewrite=_one_hot_locally)


def _one_hot_locally(local: Local) -> LocalCall:
    if local.factor is None or local.factor.name != "c":
        return local.default()
    return one_hot_part, (Ref(0), local.start, local.stop, DType(local.call.out.dtype)), {}


def one_hot_part(indices: torch.Tensor, low: int, high: int, dtype: torch.dtype) -> torch.Tensor:
    """Columns ``[low, high)`` of ``one_hot(indices)``."""
    classes = torch.arange(low, high, device=indices.device)
    return (indices.unsqueeze(-1) == classes).to(dtype)
