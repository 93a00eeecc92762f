"""Samples of contractions."""

from __future__ import annotations

from collections.abc import Callable

import torch

from hetspmd.rules.samples import Sample
from hetspmd.rules.sampling import integers, real

Samples = Callable[[], list[Sample]]


def _pair(a: tuple[int, ...], b: tuple[int, ...]) -> Samples:
    return lambda: [((real(*a), real(*b, seed=1)), {})]


def _biased(biases: list[tuple[int, ...]], a: tuple[int, ...], b: tuple[int, ...]) -> Samples:
    """All shapes of the bias, and beta and alpha other than 1."""

    def samples() -> list[Sample]:
        x, y = real(*a), real(*b, seed=1)
        cases: list[Sample] = [((real(*shape, seed=2), x, y), {}) for shape in biases]
        cases.append(((real(*biases[0], seed=2), x, y), {"beta": 0.5, "alpha": 3.0}))
        cases.append(((real(*biases[0], seed=2), x, y), {"beta": 0}))
        return cases

    return samples


def _mm() -> list[Sample]:
    return [
        ((real(4, 5), real(5, 6)), {}),
        ((integers(9, 4, 5), integers(9, 5, 3)), {}),
        ((real(1, 5), real(5, 6)), {}),
    ]


def _linear() -> list[Sample]:
    w, bias = real(6, 5, seed=1), real(6, seed=2)
    return [((real(4, 5), w, bias), {}), ((real(3, 4, 5), w), {}), ((real(5), w, bias), {})]


def _matmul() -> list[Sample]:
    return [
        ((real(4, 5), real(5, 6)), {}),
        ((real(5), real(5, 6)), {}),
        ((real(4, 5), real(5)), {}),
        ((real(5), real(5, seed=1)), {}),
        ((real(3, 4, 5), real(5, 6)), {}),
        ((real(2, 1, 4, 5), real(3, 5, 6)), {}),
        ((real(5), real(3, 5, 6)), {}),
    ]


def _einsum() -> list[Sample]:
    return [
        (("ij,jk->ik", [real(4, 5), real(5, 6)]), {}),
        (("bij, bjk", [real(3, 4, 5), real(3, 5, 6)]), {}),
        (("...ij,...jk->...ik", [real(2, 3, 4, 5), real(3, 5, 6)]), {}),
        (("bhid,bhjd->bhij", [real(2, 3, 4, 5), real(2, 3, 6, 5)]), {}),
        (("ii->i", [real(5, 5)]), {}),
        (("iij,jk->ik", [real(4, 4, 5), real(5, 3)]), {}),
        (("i,i->", [real(5), real(5, seed=1)]), {}),
        (("i,j", [real(4), real(5)]), {}),
        (("ij->ji", [real(4, 5)]), {}),
        (("ijk,jl,kl->il", [real(3, 4, 5), real(4, 6), real(5, 6)]), {}),
        (("ij,jk->ik", [real(4, 1), real(5, 6)]), {}),
    ]


def _grouped() -> list[Sample]:
    def bf16(*shape: int) -> torch.Tensor:
        return real(*shape, dtype=torch.bfloat16)

    offs = torch.tensor([3, 4, 9], dtype=torch.int32)
    wide = torch.tensor([8, 8, 32], dtype=torch.int32)
    return [
        ((bf16(9, 32), bf16(3, 24, 32).transpose(1, 2)), {"offs": offs}),
        ((bf16(24, 32), bf16(32, 16)), {"offs": wide}),
        ((bf16(3, 24, 16), bf16(32, 16).t()), {"offs": wide}),
        ((bf16(3, 16, 32), bf16(3, 24, 32).transpose(1, 2)), {}),
    ]


SAMPLES: dict[str, Samples] = {
    "aten.mm.default": _mm,
    "aten._int_mm.default": lambda: [
        ((integers(5, 24, 16).to(torch.int8), integers(5, 16, 8).to(torch.int8)), {})
    ],
    "aten.bmm.default": _pair((3, 4, 5), (3, 5, 6)),
    "aten.mv.default": _pair((4, 5), (5,)),
    "aten.dot.default": _pair((5,), (5,)),
    "aten.vdot.default": _pair((5,), (5,)),
    "aten.outer.default": _pair((4,), (5,)),
    "aten.ger.default": _pair((4,), (5,)),
    "aten.addmm.default": _biased([(6,), (1, 6), (4, 6), (4, 1), ()], (4, 5), (5, 6)),
    "aten.baddbmm.default": _biased([(3, 4, 6), (4, 6), (1, 1, 6)], (3, 4, 5), (3, 5, 6)),
    "aten.addbmm.default": _biased([(4, 6), (6,)], (3, 4, 5), (3, 5, 6)),
    "aten.addmv.default": _biased([(4,), (1,)], (4, 5), (5,)),
    "aten.addr.default": _biased([(4, 6), (6,)], (4,), (6,)),
    "aten.linear.default": _linear,
    "aten.matmul.default": _matmul,
    "aten.einsum.default": _einsum,
    "aten._grouped_mm.default": _grouped,
}

_OUT_DTYPE = "torch has no CPU kernel for an output dtype other than the inputs'"

UNTESTED: dict[str, str] = {
    "aten.mm.dtype": _OUT_DTYPE,
    "aten.bmm.dtype": _OUT_DTYPE,
    "aten.addmm.dtype": _OUT_DTYPE,
    "aten.baddbmm.dtype": _OUT_DTYPE,
}
