"""Rules of elementwise ops: every output dim is a factor, inputs broadcast to the output.

An op belongs here if torch tags it pointwise, or if :data:`UNTAGGED` names it. :data:`LINEAR` says in which
arguments an op is linear, so that summands pass through it: ``op(x + x', ...) = op(x, ...) + op(x', ...)``.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Final

import torch

from hetspmd.errors import TraceError
from hetspmd.rules.registry import family, rule
from hetspmd.rules.rule import Call, OpRule, TensorType
from hetspmd.rules.terms import (
    INTEGER,
    WRAPS,
    Term,
    broadcast_term,
    dim_names,
    linear_sets,
    term_factors,
    wrap,
)
from hetspmd.trace.values import torch_op

Groups = tuple[tuple[str, ...], ...]
"""Sets of argument names."""

_GRAD: Final[Groups] = (("grad_output",),)
_SELF: Final[Groups] = (("self",),)

LINEAR: Final[dict[str, Groups]] = {
    "__lshift__": _SELF,
    "_conj": _SELF,
    "_conj_physical": _SELF,
    "_neg_view": _SELF,
    "_prelu_kernel_backward": _GRAD,
    "_to_copy": _SELF,
    "add": (("self", "other"),),
    "addcdiv": (("self", "tensor1"),),
    "addcmul": (("self", "tensor1"), ("self", "tensor2")),
    "alias": _SELF,
    "bitwise_left_shift": _SELF,
    "clone": _SELF,
    "complex": (("real", "imag"),),
    "conj_physical": _SELF,
    "copy": (("src",), ("self", "src")),
    "deg2rad": _SELF,
    "detach": _SELF,
    "div": _SELF,
    "elu_backward": _GRAD,
    "gelu_backward": _GRAD,
    "glu_backward": _GRAD,
    "hardshrink_backward": (("grad_out",),),
    "hardsigmoid_backward": _GRAD,
    "hardswish_backward": _GRAD,
    "hardtanh_backward": _GRAD,
    "imag": _SELF,
    "ldexp": _SELF,
    "leaky_relu_backward": _GRAD,
    "lerp": (("self", "end"),),
    "lift": _SELF,
    "lift_fresh": _SELF,
    "lift_fresh_copy": _SELF,
    "log_sigmoid_backward": _GRAD,
    "logit_backward": _GRAD,
    "masked_fill": (("self", "value"),),
    "mish_backward": _GRAD,
    "mul": (("self",), ("other",)),
    "native_dropout_backward": _GRAD,
    "neg": _SELF,
    "polar": (("abs",),),
    "positive": _SELF,
    "rad2deg": _SELF,
    "real": _SELF,
    "rrelu_with_noise_backward": _GRAD,
    "rsub": (("self", "other"),),
    "sigmoid_backward": _GRAD,
    "silu_backward": _GRAD,
    "softplus_backward": _GRAD,
    "softshrink_backward": _GRAD,
    "sub": (("self", "other"),),
    "tanh_backward": _GRAD,
    "threshold_backward": _GRAD,
    "true_divide": _SELF,
    "where": (("self", "other"),),
}
"""Op (without overload) -> sets of arguments that may be All-Reduce together."""

# In these, a number in place of a tensor adds a constant to each summand: harmless if it is 0 or infinite.
_AFFINE: Final = frozenset({"add", "masked_fill", "rsub", "sub", "where"})

_ALIASES: Final = frozenset(
    {"_conj", "_neg_view", "alias", "detach", "imag", "lift", "lift_fresh", "positive", "real"}
)

UNTAGGED: Final = frozenset({
    "__and__.Scalar", "__and__.Tensor", "__or__.Scalar", "__or__.Tensor", "_conj.default",
    "_conj_physical.default", "_neg_view.default", "_prelu_kernel.default",
    "_prelu_kernel_backward.default", "_to_copy.default",
    "alias.default", "complex.default", "copy.default", "detach.default", "elu_backward.default",
    "floor_divide.Scalar", "floor_divide.default", "hardshrink_backward.default",
    "hardsigmoid_backward.default", "hardswish.default",
    "hardswish_backward.default", "hardtanh_backward.default", "imag.default", "isclose.default",
    "isin.Tensor_Scalar", "leaky_relu.default", "leaky_relu_backward.default", "lift.default", "lift_fresh.default",
    "lift_fresh_copy.default", "log_sigmoid_backward.default", "log_sigmoid_forward.default",
    "masked_fill.Tensor", "mish_backward.default", "polar.default", "real.default",
    "rrelu_with_noise_backward.default", "rsub.Tensor", "softplus_backward.default",
    "softshrink_backward.default", "where.Scalar", "where.ScalarOther", "where.ScalarSelf",
})  # fmt: skip
"""Elementwise ops that torch does not tag, in one of its versions at least."""

# Tagged pointwise, but the result is no tensor, or random.
_EXCLUDED: Final = frozenset({"equal.default", "rrelu.default"})

_LOGARITHM = "the logarithm may be infinite, and infinite summands do not add up"
_ALL = "*All-Reduce*"

OMITTED: Final[dict[str, dict[str, str]]] = {
    "nan_to_num": {_ALL: "a NaN or infinity is replaced after the summands are added, not before"},
    "nextafter": {_ALL: "holds within the oracle's tolerance only: the values differ by one rounding"},
    "rrelu_with_noise_backward": {_ALL: "in training the input is not read and the noise is a factor"},
    "special_xlog1py": {_ALL: _LOGARITHM},
    "xlogy": {_ALL: _LOGARITHM},
}
"""Op (without overload) -> rows left out, and why."""

_TABLE: Final = "the table is searched as a whole"


@cache
def is_pointwise(op: str) -> bool:
    """Whether the family rule of this module serves the op called ``aten.name.overload``."""
    namespace, _, name = op.partition(".")
    if namespace != "aten" or name in _EXCLUDED:
        return False
    if name in UNTAGGED:
        return True
    try:
        overload = torch_op(op)
    except TraceError:
        return False
    schema = overload._schema
    return (
        torch.Tag.pointwise in overload.tags
        and torch.Tag.nondeterministic_seeded not in overload.tags
        and not schema.is_mutable
        and not any(argument.is_out for argument in schema.arguments)
    )


def argument_tensors(call: Call) -> dict[str, int]:
    """Argument name -> input index of the tensor that stands there."""
    schema = torch_op(call.op)._schema
    indices = {}
    for position, argument in enumerate(schema.arguments):
        index = call.tensor(len(call.args) if argument.kwarg_only else position, argument.name)
        if index is not None:
            indices[argument.name] = index
    return indices


def linear_groups(call: Call) -> tuple[frozenset[int], ...]:
    """The sets of inputs in which this call of an elementwise op is linear."""
    name = call.op.split(".")[1]
    if name == "div" and call.kwargs.get("rounding_mode") is not None:
        return ()
    tensors = argument_tensors(call)
    groups: list[list[int]] = []
    for names in LINEAR.get(name, ()):
        present = [tensors[n] for n in names if n in tensors]
        if len(present) == len(names) or (name in _AFFINE and _constant_is_idempotent(call, names, tensors)):
            groups.append(present)
    return linear_sets(call, groups)


def _constant_is_idempotent(call: Call, names: tuple[str, ...], tensors: dict[str, int]) -> bool:
    schema = torch_op(call.op)._schema
    for position, argument in enumerate(schema.arguments):
        if argument.name in names and argument.name not in tensors:
            value = call.arg(position, argument.name, 1)
            if value != 0 and not math.isinf(value):
                return False
    return True


def elementwise(call: Call) -> OpRule:
    """The rule of an elementwise op: factors of all output dims, and its linear sets."""
    names = dim_names(call.out.ndim)
    factors = term_factors(
        call,
        [_input_term(names, t, call.out) for t in call.inputs],
        [_output_term(names, t) for t in call.outputs],
    )
    name = call.op.split(".")[1]
    omitted = OMITTED.get(name, {})
    if name == "_to_copy" and call.inputs[0].dtype in INTEGER:
        omitted = {_ALL: WRAPS}
    return OpRule(factors, linear=linear_groups(call), alias=name in _ALIASES, omitted=omitted)


def _input_term(names: tuple[str, ...], type_: TensorType, out: TensorType) -> Term:
    # log_sigmoid's buffer is empty on CUDA: whole, whatever is cut.
    if type_.shape == (0,) and out.shape != (0,):
        return None
    return broadcast_term(names, type_)


def _output_term(names: tuple[str, ...], type_: TensorType | None) -> Term:
    return None if type_ is None or type_.shape == (0,) else names


family("pointwise", is_pointwise, elementwise)


@rule("aten.isin.Tensor_Tensor")
def _lookup(call: Call) -> OpRule:
    """Elementwise in the first argument; the second is a table."""
    names = dim_names(call.out.ndim)
    return OpRule(term_factors(call, [names, None], [names]), omitted={"*": _TABLE})


@rule("aten.fill.Scalar", "aten.fill.Tensor")
def _fill(call: Call) -> OpRule:
    names = dim_names(call.out.ndim)
    value = call.tensor(1, "value")
    terms: list[Term] = [names] if value is None else [names, ()]
    groups: list[list[int]] = [] if value is None else [[value], [0, value]]
    if value is None and call.arg(1, "value") == 0:
        groups = [[0]]
    return OpRule(
        term_factors(call, terms, [names]),
        linear=linear_sets(call, groups),
        omitted={"{partial*} {replicated}": "the values are not read; tracing makes this aten.full"},
    )


@rule("aten.glu.default")
def _glu(call: Call) -> OpRule:
    """``a * sigmoid(b)`` for the halves a, b of one dim: that dim is whole, the others parallel."""
    blocked = wrap(call.arg(1, "dim", -1), call.out.ndim)
    names = tuple(None if i == blocked else n for i, n in enumerate(dim_names(call.out.ndim)))
    return OpRule(term_factors(call, [names], [names]))


@rule("aten.glu_backward.default")
def _glu_backward(call: Call) -> OpRule:
    blocked = wrap(call.arg(2, "dim"), call.out.ndim)
    names = tuple(None if i == blocked else n for i, n in enumerate(dim_names(call.out.ndim)))
    return OpRule(term_factors(call, [names, names], [names]), linear=linear_sets(call, [[0]]))
