"""Samples of elementwise ops, made from their schemas.

Every tensor argument gets a full tensor in one call, and broadcasts (a row, a column, a scalar in turn) in
another where the op broadcasts. Ops whose domain is not the real line are listed by domain; ops with options
that matter have calls of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final

import torch

from hetspmd.rules.samples import Sample
from hetspmd.rules.sampling import booleans, integers, positive, real
from hetspmd.trace.values import torch_op

Samples = Callable[[], list[Sample]]
Make = Callable[..., torch.Tensor]

_REAL: Final = """
    abs add.Scalar add.Tensor addcmul alias angle asinh atan atan2 celu ceil clamp_max
    clamp_max.Tensor clamp_min clamp_min.Tensor clone conj_physical _conj_physical copysign.Scalar
    copysign.Tensor cos cosh deg2rad detach div.Scalar div.Tensor elu eq.Scalar eq.Tensor erf erfc exp exp2
    expm1 floor floor_divide fmax fmin fmod.Scalar fmod.Tensor frac frexp.Tensor ge.Scalar ge.Tensor gelu
    gelu_backward gt.Scalar gt.Tensor hardshrink hardshrink_backward hardsigmoid hardsigmoid_backward
    hardswish hardswish_backward hardtanh heaviside hypot i0 isclose isfinite isinf isnan isneginf
    isposinf ldexp.Tensor le.Scalar le.Tensor leaky_relu lerp.Scalar lerp.Tensor lift lift_fresh
    lift_fresh_copy log_sigmoid_forward logaddexp logaddexp2 lt.Scalar lt.Tensor max.other maximum min.other
    minimum mish mish_backward mul.Scalar mul.Tensor nan_to_num ne.Scalar ne.Tensor neg nextafter positive
    rad2deg reciprocal relu relu6 remainder.Scalar remainder.Tensor round rsub.Scalar rsub.Tensor selu sgn
    sigmoid sigmoid_backward sign signbit silu silu_backward sin sinc sinh softplus softshrink
    special_bessel_j0 special_erfcx special_i0e special_i1 special_i1e sub.Scalar sub.Tensor tan tanh
    tanh_backward true_divide.Tensor trunc square
"""
_POSITIVE: Final = """
    acos acosh asin atanh digamma erfinv lgamma log log10 log1p log2 logit logit_backward pow.Scalar
    pow.Tensor_Scalar pow.Tensor_Tensor rsqrt sqrt special_entr special_log_ndtr special_ndtri
    special_xlog1py xlogy.Scalar_Other xlogy.Scalar_Self xlogy.Tensor igamma igammac float_power.Tensor_Tensor
    special_zeta addcdiv
"""
_INTEGER: Final = """
    bitwise_and.Scalar bitwise_and.Tensor bitwise_left_shift.Tensor bitwise_not bitwise_or.Scalar
    bitwise_or.Tensor bitwise_right_shift.Tensor bitwise_xor.Scalar bitwise_xor.Tensor gcd lcm __and__.Scalar
    __and__.Tensor __or__.Scalar __or__.Tensor __xor__.Tensor __lshift__.Scalar __rshift__.Scalar
"""
_BOOLEAN: Final = "logical_and logical_not logical_or logical_xor"

# Arguments without a default, by name.
_VALUES: Final[dict[str, Any]] = {
    "other": 2,
    "weight": 0.3,
    "exponent": 1.5,
    "self": 0.7,
    "max": 0.4,
    "min": -0.4,
    "scale": 1.25,
    "threshold": 0.1,
    "value": 0.5,
    "lambd": 0.5,
}
_NO_BROADCAST: Final = ("_backward", "ldexp", "log_sigmoid", "special_entr")


def _from_schema(op: str, make: Make) -> list[Sample]:
    schema = torch_op(op)._schema

    def call(shapes: Callable[[int], tuple[int, ...]]) -> Sample:
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        seen = 0
        for argument in schema.arguments:
            if isinstance(argument.type, torch.TensorType):
                value: Any = make(*shapes(seen), seed=seen)
                seen += 1
            elif argument.has_default_value():
                continue
            else:
                value = _VALUES[argument.name]
                value = 2 if make is integers_below and argument.name == "other" else value
            if argument.kwarg_only:
                kwargs[argument.name] = value
            else:
                args.append(value)
        return tuple(args), kwargs

    tensors = sum(isinstance(a.type, torch.TensorType) for a in schema.arguments)
    samples = [call(lambda _: (4, 5))]
    if tensors > 1 and not any(part in op for part in _NO_BROADCAST):
        small: list[tuple[int, ...]] = [(5,), (4, 1), ()]
        for first in range(tensors):
            samples.append(call(partial(_one_full, first, small)))
        samples.append(call(lambda i: (4, 1, 5) if i % 2 == 0 else (3, 1)))
    else:
        samples.append(call(lambda _: (3, 1, 7)))
    return samples


def _one_full(first: int, small: list[tuple[int, ...]], i: int) -> tuple[int, ...]:
    return (4, 5) if i == first else small[(i + first) % 3]


def integers_below(*shape: int, seed: int = 0) -> torch.Tensor:
    """Small positive integers."""
    return integers(9, *shape, seed=seed, low=1)


def _with(make: Make, *rest: Any, **options: Any) -> Samples:
    """``op(x, *rest, **options)``."""
    return lambda: [((make(4, 5), *rest), options)]


def _grad(*rest: Any, between: tuple[Any, ...] = ()) -> Samples:
    """``op(grad, *between, x, *rest)``."""
    return lambda: [((real(4, 5), *between, real(4, 5, seed=1), *rest), {})]


def _add() -> list[Sample]:
    x, y = real(4, 5), real(4, 5, seed=1)
    return [
        *_from_schema("aten.add.Tensor", real),
        ((x, y), {"alpha": 2.5}),
        ((x, 3.0), {}),
        ((x, 0), {}),
        ((integers(9, 4, 5), integers(9, 5)), {}),
        ((integers(9, 4, 5), x), {}),
        ((x.float(), y), {}),
        ((booleans(4, 5), integers(9, 4, 5)), {}),
    ]


def _mul() -> list[Sample]:
    x = real(4, 5)
    return [
        *_from_schema("aten.mul.Tensor", real),
        ((x, booleans(4, 5)), {}),
        ((booleans(4, 5), booleans(4, 5, seed=1)), {}),
        ((integers(9, 4, 5), integers(9, 5)), {}),
        ((x, 2.0), {}),
        ((torch.complex(x, real(4, 5, seed=1)), x), {}),
    ]


def _div_mode() -> list[Sample]:
    x, y = real(4, 5), positive(5)
    modes = ("floor", "trunc", None)
    return [((x, y), {"rounding_mode": m}) for m in modes] + [
        ((integers(90, 4), 7), {"rounding_mode": "floor"})
    ]


def _to_copy() -> list[Sample]:
    x = real(4, 5)
    return [
        ((x,), {"dtype": torch.float32}),
        ((x,), {"dtype": torch.int64}),
        ((x,), {"dtype": torch.bool}),
        ((x,), {"dtype": torch.bfloat16}),
        ((integers(9, 4, 5),), {"dtype": torch.float64}),
        ((real(4, 5, 3, 2),), {"memory_format": torch.channels_last}),
        ((booleans(4, 5),), {"dtype": torch.float64}),
    ]


def _where() -> list[Sample]:
    mask = booleans(4, 5)
    return [
        ((mask, real(4, 5), real(4, 5, seed=1)), {}),
        ((mask, real(5), real()), {}),
        ((booleans(4, 1), real(5), real(4, 5)), {}),
        ((mask, integers(9, 4, 5), integers(9, 4, 5, seed=1)), {}),
        ((mask, booleans(4, 5, seed=1), booleans(4, 5, seed=2)), {}),
    ]


def _masked_fill() -> list[Sample]:
    x, mask = real(4, 5), booleans(4, 5)
    return [
        ((x, mask, 0.0), {}),
        ((x, mask, float("-inf")), {}),
        ((x, booleans(5), 2), {}),
        ((real(4, 5), booleans(3, 4, 5), 1.0), {}),
    ]


def _prelu() -> list[Sample]:
    return [((real(4, 5, 3), real(1, 5, 1, seed=1)), {}), ((real(4, 5), real(1, 1)), {})]


def _prelu_backward() -> list[Sample]:
    return [((real(4, 5, 3), real(4, 5, 3, seed=1), real(1, 5, 1, seed=2)), {})]


def _clamp() -> list[Sample]:
    return [((real(4, 5), -0.5), {}), ((real(4, 5), None, 0.5), {}), ((real(4, 5), 0, 1), {})]


def _clamp_tensor() -> list[Sample]:
    x = real(4, 5)
    return [((x, real(5, seed=1), real(4, 1, seed=2)), {}), ((x, None, real()), {})]


def _complex() -> torch.Tensor:
    return torch.complex(real(4, 5), real(4, 5, seed=1))


def _log_sigmoid_backward() -> list[Sample]:
    x = real(4, 5)
    _, buffer = torch.ops.aten.log_sigmoid_forward.default(x)
    return [((real(4, 5, seed=1), x, buffer), {})]


def _copy() -> list[Sample]:
    return [
        ((real(4, 5), real(4, 5, seed=1)), {}),
        ((real(4, 5), real(5, seed=1)), {}),
        ((real(4, 5), integers(9, 4, 5)), {}),
    ]


_OWN: Final[dict[str, Samples]] = {
    "add.Tensor": _add,
    "mul.Tensor": _mul,
    "div.Tensor_mode": _div_mode,
    "div.Scalar_mode": lambda: [((real(4, 5), 2.0), {"rounding_mode": m}) for m in ("floor", None)],
    "_to_copy.default": _to_copy,
    "where.self": _where,
    "where.ScalarOther": lambda: [((booleans(4, 5), real(4, 5), v), {}) for v in (0.0, 1.5)],
    "where.ScalarSelf": lambda: [((booleans(4, 5), v, real(4, 5)), {}) for v in (0.0, 1.5)],
    "where.Scalar": lambda: [((booleans(4, 5), 1.0, 0.0), {})],
    "masked_fill.Scalar": _masked_fill,
    "masked_fill.Tensor": lambda: [
        ((real(4, 5), booleans(4, 5), real()), {}),
        ((real(4, 5), booleans(5), real()), {}),
    ],
    "_prelu_kernel.default": _prelu,
    "_prelu_kernel_backward.default": _prelu_backward,
    "clamp.default": _clamp,
    "clamp.Tensor": _clamp_tensor,
    "copy.default": _copy,
    "_conj.default": lambda: [((_complex(),), {})],
    "_neg_view.default": lambda: [((real(4, 5),), {})],
    "real.default": lambda: [((_complex(),), {})],
    "imag.default": lambda: [((_complex(),), {})],
    "complex.default": lambda: [((real(4, 5), real(5, seed=1)), {})],
    "polar.default": lambda: [((positive(4, 5), real(4, 5, seed=1)), {})],
    "native_dropout_backward.default": lambda: [((real(4, 5), booleans(4, 5), 1.25), {})],
    "threshold_backward.default": _grad(0.0),
    "threshold.default": _with(real, 0.1, 2.0),
    "hardtanh_backward.default": _grad(-1.0, 1.0),
    "elu_backward.default": _grad(between=(1.0, 1.0, 1.0, False)),
    "leaky_relu_backward.default": _grad(0.01, False),
    "softplus_backward.default": _grad(1.0, 20.0),
    "softshrink_backward.default": _grad(0.5),
    "log_sigmoid_backward.default": _log_sigmoid_backward,
    "rrelu_with_noise_backward.default": lambda: [
        ((real(4, 5), real(4, 5, seed=1), positive(4, 5), 0.1, 0.3, True, False), {})
    ],
    "floor_divide.Scalar": _with(real, 2),
    "isin.Tensor_Scalar": lambda: [((integers(5, 4, 6), 3), {})],
    "isin.Tensor_Tensor": lambda: [
        ((integers(9, 4, 6), integers(9, 5)), {}),
        ((real(4), real(3)), {"invert": True}),
    ],
    "polygamma.default": lambda: [((1, positive(4, 5)), {})],
    "mvlgamma.default": lambda: [((positive(4, 5) + 2, 2), {})],
    "round.decimals": _with(real, decimals=1),
    "fill.Scalar": lambda: [((real(4, 5), v), {}) for v in (0, 2.5)],
    "fill.Tensor": lambda: [((real(4, 5), real()), {})],
    "glu.default": lambda: [((real(4, 6), -1), {}), ((real(6, 5, 4), 0), {})],
    "glu_backward.default": lambda: [((real(4, 3), real(4, 6, seed=1), -1), {})],
}

_DOMAINS: Final[tuple[tuple[str, Make], ...]] = (
    (_REAL, real),
    (_POSITIVE, positive),
    (_INTEGER, integers_below),
    (_BOOLEAN, booleans),
)


def _full_name(name: str) -> str:
    return f"aten.{name}" if "." in name else f"aten.{name}.default"


def _all() -> dict[str, Samples]:
    factories: dict[str, Samples] = {f"aten.{name}": samples for name, samples in _OWN.items()}
    for names, make in _DOMAINS:
        for name in names.split():
            op = _full_name(name)
            factories.setdefault(op, partial(_from_schema, op, make))
    return factories


SAMPLES: dict[str, Samples] = _all()
