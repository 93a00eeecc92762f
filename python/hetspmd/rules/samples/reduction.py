"""Samples of reductions."""

from __future__ import annotations

from collections.abc import Callable

import torch

from hetspmd.rules.samples import Sample
from hetspmd.rules.sampling import booleans, integers, positive, real

Samples = Callable[[], list[Sample]]


def _whole() -> list[Sample]:
    return [((real(4, 5),), {}), ((real(),), {})]


def _dims(*, required: bool = False, several: bool = True) -> Samples:
    """``op(x, dim, keepdim)`` with one dim, a list of dims, negative ones, none."""

    def samples() -> list[Sample]:
        x = real(4, 5, 7)
        cases: list[Sample] = [((x, [1] if several else 1), {}), ((x, [-1] if several else -1, True), {})]
        if several:
            cases += [((x, [0, 2], True), {}), ((x, [0, -1]), {})]
        if not required:
            cases.append(((x,), {}))
        return cases

    return samples


def _listed() -> list[Sample]:
    x = real(4, 5, 7)
    return [*_dims(required=True)(), ((x, None), {}), ((x, []), {}), ((x, [1]), {"dtype": torch.float32})]


def _sum() -> list[Sample]:
    return [
        *_listed(),
        ((integers(9, 4, 5), [0]), {}),
        ((booleans(4, 5), [0]), {}),
        ((real(4, 6), [0]), {"dtype": torch.int64}),
        ((real(1, 5), [0]), {}),
    ]


def _sum_default() -> list[Sample]:
    return [*_whole(), ((booleans(4, 5),), {}), ((real(6),), {"dtype": torch.float32})]


def _mean() -> list[Sample]:
    return [*_whole(), ((integers(9, 5, 4),), {"dtype": torch.float64})]


def _mean_dim() -> list[Sample]:
    return [*_listed(), ((real(4, 5, dtype=torch.bfloat16), [0]), {}), ((real(4, 5), [1], True), {})]


def _nansum() -> list[Sample]:
    x = real(4, 5, 7)
    x[1, 2] = float("nan")
    return [((x, [0]), {}), ((x, [1, 2], True), {}), ((x,), {})]


def _count() -> list[Sample]:
    return [((integers(2, 4, 5),), {}), ((integers(2, 4, 5), 1), {}), ((booleans(4, 5), 0), {})]


def _count_dims() -> list[Sample]:
    return [((integers(2, 4, 5, 3), [0, 2]), {}), ((real(4, 5), [1]), {})]


def _correction() -> list[Sample]:
    x = real(4, 5, 7)
    return [
        ((x, [1]), {"correction": 0, "keepdim": True}),
        ((x, [0, 2]), {"correction": 1}),
        ((x,), {}),
        ((x, None), {"correction": 1}),
    ]


def _unbiased() -> list[Sample]:
    return [((real(4, 5, 7), [1], False), {}), ((real(4, 5, 7), [0, 2], True, True), {})]


def _booleans() -> list[Sample]:
    return [((booleans(4, 5) & booleans(4, 5, seed=1),), {})]


def _booleans_dim() -> list[Sample]:
    x = booleans(4, 5, 3) & booleans(4, 5, 3, seed=1)
    return [((x, 1), {}), ((x, -1, True), {})]


def _booleans_dims() -> list[Sample]:
    x = booleans(4, 5, 3) & booleans(4, 5, 3, seed=1)
    return [((x, [1]), {}), ((x, [0, 2], True), {}), ((x, []), {}), ((x,), {})]


def _aminmax() -> list[Sample]:
    return [((real(4, 5),), {"dim": 1}), ((real(4, 5),), {"dim": 0, "keepdim": True}), ((real(4, 5),), {})]


def _vector_norm() -> list[Sample]:
    x = real(4, 5, 7)
    return [
        ((x,), {}),
        ((x, 2, [1]), {}),
        ((x, 1, [0]), {}),
        ((x, 0, [0, 2], True), {}),
        ((x, float("inf"), [-1]), {"dtype": torch.float64}),
        ((x, 3.0), {}),
    ]


def _norm() -> list[Sample]:
    return [((real(4, 5),), {}), ((real(4, 5), 1), {})]


def _norm_dim() -> list[Sample]:
    return [((real(4, 5), 2, [1]), {}), ((real(4, 5), 1, [0], True), {}), ((real(4, 5), None, [0]), {})]


def _norm_dtype() -> list[Sample]:
    return [((real(4, 5), 1), {"dtype": torch.float64})]


def _norm_dim_dtype() -> list[Sample]:
    return [((real(4, 5), 1, [0], False), {"dtype": torch.float64})]


def _product() -> list[Sample]:
    return [((positive(4, 5),), {}), ((positive(6),), {})]


SAMPLES: dict[str, Samples] = {
    "aten.sum.default": _sum_default,
    "aten.sum.dim_IntList": _sum,
    "aten.nansum.default": _nansum,
    "aten.count_nonzero.default": _count,
    "aten.count_nonzero.dim_IntList": _count_dims,
    "aten.mean.default": _mean,
    "aten.mean.dim": _mean_dim,
    "aten.amax.default": _dims(),
    "aten.amin.default": _dims(),
    "aten.max.default": lambda: [((real(4, 5),), {})],
    "aten.min.default": lambda: [((real(4, 5),), {})],
    "aten.prod.default": _product,
    "aten.any.default": _booleans,
    "aten.all.default": _booleans,
    "aten.var.default": lambda: [((real(4, 5),), {}), ((real(4, 5), False), {})],
    "aten.std.default": lambda: [((real(4, 5),), {})],
    "aten.max.dim": _dims(required=True, several=False),
    "aten.min.dim": _dims(required=True, several=False),
    "aten.prod.dim_int": _dims(required=True, several=False),
    "aten.any.dim": _booleans_dim,
    "aten.all.dim": _booleans_dim,
    "aten.any.dims": _booleans_dims,
    "aten.all.dims": _booleans_dims,
    "aten.logsumexp.default": _dims(required=True),
    "aten.argmax.default": _dims(several=False),
    "aten.argmin.default": _dims(several=False),
    "aten.var.correction": _correction,
    "aten.std.correction": _correction,
    "aten.var_mean.correction": _correction,
    "aten.std_mean.correction": _correction,
    "aten.var.dim": _unbiased,
    "aten.std.dim": _unbiased,
    "aten.var_mean.dim": _unbiased,
    "aten.std_mean.dim": _unbiased,
    "aten.aminmax.default": _aminmax,
    "aten.linalg_vector_norm.default": _vector_norm,
    "aten.norm.Scalar": _norm,
    "aten.norm.ScalarOpt_dim": _norm_dim,
    "aten.norm.ScalarOpt_dtype": _norm_dtype,
    "aten.norm.ScalarOpt_dim_dtype": _norm_dim_dtype,
}
