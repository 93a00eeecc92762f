"""Rules of ops that draw random numbers: elementwise, every dim is parallel, nothing is linear.

Each is marked ``random``: a shard draws its own numbers, whole tensors draw alike on every device.
"""

from __future__ import annotations

from dataclasses import replace

from hetspmd.rules.registry import rule
from hetspmd.rules.rule import Call, OpRule
from hetspmd.rules.terms import Term, broadcast_term, dim_names, term_factors


@rule(
    "aten.bernoulli.default", "aten.bernoulli.p", "aten.bernoulli.Tensor", "aten.binomial.default",
    "aten.cauchy.default", "aten.exponential.default", "aten.geometric.default", "aten.log_normal.default",
    "aten.normal.Tensor_Tensor", "aten.normal.Tensor_float", "aten.normal.float_Tensor",
    "aten.normal_functional.default", "aten.poisson.default", "aten.rand_like.default",
    "aten.randint_like.default", "aten.randint_like.low_dtype", "aten.randn_like.default",
    "aten.uniform.default",
)  # fmt: skip
def _elementwise(call: Call) -> OpRule:
    return _drawn(call, random=True)


def _drawn(call: Call, *, random: bool) -> OpRule:
    names = dim_names(call.out.ndim)
    inputs: list[Term] = [broadcast_term(names, t) for t in call.inputs]
    return OpRule(term_factors(call, inputs, [names] * len(call.outputs)), random=random)


@rule("aten.native_dropout.default")
def _dropout(call: Call) -> OpRule:
    p, train = call.arg(1, "p"), call.arg(2, "train")
    op_rule = _drawn(call, random=train is not False and 0.0 < float(p) < 1.0)
    return replace(op_rule, omitted={"*partial*": "linear without randomness, but the mask cannot be a sum"})


@rule("aten.rrelu_with_noise_functional.default")
def _rrelu(call: Call) -> OpRule:
    op_rule = _drawn(call, random=bool(call.arg(4, "training", False)))
    return replace(
        op_rule, omitted={"*partial*": "without training the noise passes through, and is not used"}
    )


@rule("aten.rand.default", "aten.randn.default")
def _sized(call: Call) -> OpRule:
    return _shaped(call, 0)


@rule("aten.randint.default")
def _randint(call: Call) -> OpRule:
    return _shaped(call, 1)


@rule("aten.randint.low", "aten.normal.float_float")
def _range(call: Call) -> OpRule:
    return _shaped(call, 2)


def _shaped(call: Call, position: int) -> OpRule:
    names = dim_names(call.out.ndim)
    return OpRule(term_factors(call, [], [names]), shape_args={position: 0}, random=True)


@rule("aten.randperm.default")
def _randperm(call: Call) -> OpRule:
    """No shard of a permutation is one."""
    return OpRule(random=True)


@rule("aten.multinomial.default")
def _multinomial(call: Call) -> OpRule:
    """Distributions [N, classes] are parallel; the draws from one depend on each other."""
    x = call.inputs[0]
    term: Term = ("n", None) if x.ndim == 2 else (None,)
    return OpRule(term_factors(call, [term], [term]), random=True)


@rule("aten._fused_dropout.default")
def _fused_dropout(call: Call) -> OpRule:
    return _drawn(call, random=True)
