"""Rules of losses.

A loss that is summed is a sum over shards. A mean over all elements is the local sum / global count, and its
gradient the gradient of the sum / global count. ``nll_loss`` with reduction ``mean`` divides by a weight that
depends on the targets, so its forward is not sharded by sample (tracing writes it as sum / count); its
backward is, for the total weight is an input. Over classes it is a sum: a device accounts for the targets in
its own range.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

import torch

from hetspmd.rules.registry import rule
from hetspmd.rules.rule import Call, Local, LocalCall, OpRule
from hetspmd.rules.terms import (
    Dim,
    Term,
    broadcast_shape,
    broadcast_term,
    dim_names,
    linear_sets,
    term_factors,
)
from hetspmd.trace.graph import Argument, Ref
from hetspmd.trace.values import torch_op

NONE, MEAN, SUMMED = 0, 1, 2
"""torch's codes of reductions."""

_FORWARD: Final[dict[str, tuple[int, tuple[tuple[int, ...], ...]]]] = {
    "aten.mse_loss.default": (2, ()),
    "aten.l1_loss.default": (2, ()),
    "aten.smooth_l1_loss.default": (2, ()),
    "aten.huber_loss.default": (2, ()),
    "aten.soft_margin_loss.default": (2, ()),
    "aten.kl_div.default": (2, ()),
    "aten.binary_cross_entropy.default": (3, ((2,),)),
    "aten.binary_cross_entropy_with_logits.default": (4, ((2,),)),
}
"""Op -> position of ``reduction``, and sets of argument positions in which it is linear."""

_BACKWARD: Final[dict[str, tuple[int, tuple[tuple[int, ...], ...]]]] = {
    "aten.mse_loss_backward.default": (3, ((0,), (1, 2))),
    "aten.smooth_l1_loss_backward.default": (3, ((0,),)),
    "aten.huber_loss_backward.default": (3, ((0,),)),
    "aten.soft_margin_loss_backward.default": (3, ((0,),)),
    "aten.binary_cross_entropy_backward.default": (4, ((0,), (3,))),
}


_NLL: Final = "linear in scores or weight in one output only; log-probabilities never are summands"


def _reduction(call: Call, position: int) -> int:
    return int(call.arg(position, "reduction", MEAN))


def _groups(call: Call, positions: Sequence[Sequence[int]]) -> list[list[int]]:
    """Input indices of the tensors at those argument positions, where all are given."""
    groups = [[call.tensor(p) for p in group] for group in positions]
    return [[i for i in g if i is not None] for g in groups if None not in g]


@rule(*_FORWARD)
def _loss(call: Call) -> OpRule:
    position, linear = _FORWARD[call.op]
    shape = broadcast_shape(call.inputs)
    names = dim_names(len(shape))
    inputs = [broadcast_term(names, t) for t in call.inputs]
    output = names if _reduction(call, position) == NONE else ()
    return OpRule(
        term_factors(call, inputs, [output]),
        linear=linear_sets(call, _groups(call, linear)),
        rewrite=_loss_locally,
        flops=3.0 * math.prod(shape),
    )


def _loss_locally(local: Local) -> LocalCall:
    call = local.call
    position, _ = _FORWARD[call.op]
    if local.factor is None or _reduction(call, position) != MEAN:
        return local.default()
    count = math.prod(broadcast_shape(call.inputs))
    args, kwargs = _summed(call, position)
    return mean_part, (call.op, count, *args), kwargs


def _summed(call: Call, position: int) -> tuple[tuple[Argument, ...], dict[str, Argument]]:
    """The arguments with reduction ``sum``."""
    args, kwargs = list(call.args), dict(call.kwargs)
    if position < len(args):
        args[position] = SUMMED
    else:
        kwargs["reduction"] = SUMMED
    return tuple(args), kwargs


def mean_part(op: str, count: int, *args: Any, **kwargs: Any) -> torch.Tensor:
    """This device's summand of a mean loss over ``count`` elements."""
    total: torch.Tensor = torch_op(op)(*args, **kwargs)
    return total / count


@rule(*_BACKWARD)
def _loss_backward(call: Call) -> OpRule:
    _, linear = _BACKWARD[call.op]
    names = dim_names(call.out.ndim)
    return OpRule(
        term_factors(call, [broadcast_term(names, t) for t in call.inputs], [names]),
        linear=linear_sets(call, _groups(call, linear)),
        rewrite=_loss_backward_locally,
        flops=3.0 * math.prod(call.out.shape),
    )


def _loss_backward_locally(local: Local) -> LocalCall:
    call = local.call
    position, _ = _BACKWARD[call.op]
    if local.factor is None or _reduction(call, position) != MEAN:
        return local.default()
    args, kwargs = _summed(call, position)
    return mean_backward_part, (call.op, math.prod(call.out.shape), *args), kwargs


def mean_backward_part(op: str, count: int, grad: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """This device's shard of the gradient of a mean loss over ``count`` elements."""
    result: torch.Tensor = torch_op(op)(grad / count, *args, **kwargs)
    return result


def _nll_terms(call: Call, x: int) -> tuple[tuple[Dim, ...], tuple[Dim, ...]]:
    """Terms of the scores [N, C, ...] (or [C]) and of the target [N, ...]."""
    ndim = call.inputs[x].ndim
    if ndim == 1:
        return ("c",), ()
    names = dim_names(ndim)
    return (names[0], "c", *names[2:]), (names[0], *names[2:])


@rule("aten.nll_loss_forward.default", "aten.nll_loss2d_forward.default")
def _nll(call: Call) -> OpRule:
    scores, target = _nll_terms(call, 0)
    reduction = _reduction(call, 3)
    if reduction == MEAN:
        return OpRule(omitted={"*partial*} {*": _NLL})
    inputs: list[Term] = [scores, target]
    if call.tensor(2, "weight") is not None:
        inputs.append(("c",))
    output: Term = target if reduction == NONE else ()
    # The total weight is zero where the loss is not reduced, except for a single sample.
    unread = reduction == NONE and len(scores) > 1
    factors = term_factors(call, inputs, [output, None if unread else ()])
    return OpRule(factors, rewrite=_nll_locally, omitted={"*partial*} {*": _NLL})


def _nll_locally(local: Local) -> LocalCall:
    if local.factor is None or local.factor.name != "c":
        return local.default()
    call = local.call
    weight, reduction, ignored = call.args[2:5]
    return nll_part, (call.op, Ref(0), Ref(1), weight, reduction, ignored, local.start, local.stop), {}


def nll_part(
    op: str,
    scores: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    reduction: int,
    ignored: int,
    low: int,
    high: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss of the targets in ``low <= class < high``, the classes whose scores are given."""
    if low == high:
        shape = target.shape if reduction == NONE else ()
        return scores.new_zeros(shape), scores.new_zeros(())
    loss, total = torch_op(op)(scores, local_target(target, ignored, low, high), weight, reduction, -1)
    return loss, total


def local_target(target: torch.Tensor, ignored: int, low: int, high: int) -> torch.Tensor:
    """Targets counted from ``low``; -1 for other classes and for ``ignored``."""
    inside = (target >= low) & (target < high) & (target != ignored)
    return torch.where(inside, target - low, -1)


@rule("aten.nll_loss_backward.default", "aten.nll_loss2d_backward.default")
def _nll_backward(call: Call) -> OpRule:
    scores, target = _nll_terms(call, 1)
    inputs: list[Term] = [target if call.inputs[0].ndim == len(target) else (), scores, target]
    groups: list[list[int]] = [[0], [0, 1]]
    weight = call.tensor(3, "weight")
    if weight is not None:
        inputs.append(("c",))
        groups.append([weight])
    factors = term_factors(call, [*inputs, ()], [scores])
    return OpRule(factors, linear=linear_sets(call, groups), rewrite=_nll_backward_locally)


def _nll_backward_locally(local: Local) -> LocalCall:
    if local.factor is None or local.factor.name != "c":
        return local.default()
    call = local.call
    weight, reduction, ignored, total = call.args[3:7]
    args = (call.op, Ref(0), Ref(1), Ref(2), weight, reduction, ignored, total, local.start, local.stop)
    return nll_backward_part, args, {}


def nll_backward_part(
    op: str,
    grad: torch.Tensor,
    scores: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    reduction: int,
    ignored: int,
    total: torch.Tensor,
    low: int,
    high: int,
) -> torch.Tensor:
    """The gradient of the scores of classes ``[low, high)``."""
    target = local_target(target, ignored, low, high)
    result: torch.Tensor = torch_op(op)(grad, scores, target, weight, reduction, -1, total)
    return result
