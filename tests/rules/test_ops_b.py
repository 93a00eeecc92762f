"""Rules of shape, slicing, indexing, scan, order, convolution, pooling, resampling and Fourier ops."""

from __future__ import annotations

from itertools import pairwise
from math import prod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hetspmd.placement import placement_text
from hetspmd.rules.brute import case_of
from hetspmd.rules.ops.shape import view_cuts
from hetspmd.rules.oracle import check
from hetspmd.rules.registry import registered, rule_for, rule_function
from hetspmd.rules.rule import SUM, Cut, Factor, OpRule
from hetspmd.rules.samples import (
    advanced,
    conv,
    distance,
    fourier,
    indexing,
    order,
    pooling,
    resample,
    scan,
    shape,
    slicing,
)

MODULES = (shape, slicing, indexing, advanced, scan, order, conv, pooling, resample, fourier, distance)
OPS = [op for module in MODULES for op in module.SAMPLES]
OWN = tuple(f"hetspmd.rules.ops.{m.__name__.rpartition('.')[2]}" for m in MODULES)


def x(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def rule(op: str, *args: object, **kwargs: object) -> OpRule:
    found = rule_for(case_of(op, args, kwargs, 0).call)
    assert found is not None
    return found


def rows(op: str, *args: object, **kwargs: object) -> dict[str, str]:
    """Name of each row of a call -> its forms: ``S0`` shard(0), ``P`` partial, ``R`` replicated."""
    call = case_of(op, args, kwargs, 0).call
    found = rule_for(call)
    assert found is not None

    def short(form: int) -> str:
        return placement_text(form).replace("replicated", "R").replace("partial", "P").replace("shard", "S")

    def side(forms: tuple[int, ...]) -> str:
        return " ".join(short(f).replace("(", "").replace(")", "") for f in forms)

    return {r.name: f"{side(r.pre)} -> {side(r.post)}" for r in found.rows(call)}


def factor(found: OpRule, name: str) -> Factor:
    return next(f for f in found.factors if f.name == name)


@pytest.mark.parametrize("op", OPS)
def test_every_row_holds_on_every_sample(op: str) -> None:
    report = check(op, missing=False)
    assert report.ok, str(report)
    assert report.rows_checked >= report.samples


def test_every_op_has_samples() -> None:
    mine = [op for op in registered() if getattr(rule_function(op), "__module__", "") in OWN]
    assert len(mine) > 200
    assert sorted(set(mine) - set(OPS)) == []


@pytest.mark.parametrize(
    "op",
    [
        "aten.view.default", "aten.expand.default", "aten.repeat.default", "aten.slice.Tensor",
        "aten.slice_backward.default", "aten.cat.default", "aten.gather.default", "aten.scatter_add.default",
        "aten.index.Tensor", "aten.index_put.default", "aten.cumsum.default", "aten.topk.default",
        "aten.convolution.default", "aten.upsample_bilinear2d.default", "aten.rot90.default",
    ],
)  # fmt: skip
def test_no_row_is_missing(op: str) -> None:
    report = check(op)
    assert report.ok, str(report)


@pytest.mark.parametrize(("kind", "k"), [("max_pool", 2), ("max_pool", 3), ("adaptive", 2), ("adaptive", 3)])
def test_gradients_of_maxima_without_a_batch_dim(kind: str, k: int) -> None:
    name = f"aten.max_pool{k}d_with_indices" if kind == "max_pool" else f"aten.adaptive_max_pool{k}d"
    rest = pooling.WINDOWS[k] if kind == "max_pool" else pooling.SIZES[k]
    report = check(
        f"{name}_backward.default", pooling.max_backward(f"{name}.default", k, (4,), *rest), missing=False
    )
    assert report.ok, str(report)
    assert report.rows_checked == 3 * len(rest)


class TestViews:
    @pytest.mark.parametrize(
        ("source", "target", "cuts"),
        [
            ((8, 16, 768), (8, 16, 12, 64), [(Cut(0), Cut(0)), (Cut(1), Cut(1)), (Cut(2, 64), Cut(2))]),
            ((8, 16, 12, 64), (128, 768), [(Cut(0), Cut(0, 16)), (Cut(2), Cut(1, 64))]),
            ((6, 4), (8, 3), [(Cut(0, 3), Cut(0, 4))]),
            ((2, 3), (3, 2), []),
            ((1, 6, 1), (6,), [(Cut(1), Cut(0))]),
            ((5, 6), (5, 1, 6), [(Cut(0), Cut(0)), (Cut(1), Cut(2))]),
            ((), (1,), []),
            ((0, 4), (4, 0), []),
        ],
    )
    def test_cuts(
        self, source: tuple[int, ...], target: tuple[int, ...], cuts: list[tuple[Cut, Cut]]
    ) -> None:
        assert view_cuts(source, target) == cuts

    @given(st.data())
    @settings(max_examples=60, deadline=None)
    def test_slices_of_any_view_are_views_of_slices(self, data: st.DataObject) -> None:
        primes = data.draw(st.lists(st.sampled_from([1, 2, 2, 3, 5]), min_size=1, max_size=5))

        def grouped() -> tuple[int, ...]:
            marks = data.draw(st.sets(st.integers(1, len(primes))))
            bounds = sorted({0, len(primes)} | marks)
            return tuple(prod(primes[a:b]) for a, b in pairwise(bounds))

        source, target = grouped(), grouped()
        whole = torch.arange(prod(primes)).view(source)
        for a, b in view_cuts(source, target):
            units = source[a.dim] // a.unit
            assert units == target[b.dim] // b.unit > 1
            cut = data.draw(st.integers(0, units))
            shape = (*target[: b.dim], cut * b.unit, *target[b.dim + 1 :])
            part = whole.narrow(a.dim, 0, cut * a.unit).reshape(shape)
            assert torch.equal(part, whole.view(target).narrow(b.dim, 0, cut * b.unit))

    def test_bool_tensors_are_never_summed(self) -> None:
        assert rule("aten.view.default", x(4, 6) > 0, [24]).linear == ()

    def test_expanded_dims_are_cut_while_the_input_is_whole(self) -> None:
        assert rows("aten.expand.default", x(5, 1), [6, 5, 4]) == {
            "always": "R -> R", "d0": "R -> S0", "d1": "S0 -> S1", "d2": "R -> S2", "linear(0)": "P -> P",
        }  # fmt: skip

    def test_views_cost_nothing_and_are_rewritten_to_reshape(self) -> None:
        found = rule("aten.squeeze.dim", x(5, 1, 4), 1)
        assert found.alias
        assert found.rewrite is not None


class TestVocabularyParallel:
    def test_gather_sums_over_the_slots(self) -> None:
        index = torch.tensor([[0], [3], [5], [2]])
        assert rows("aten.gather.default", x(4, 6), 1, index) == {
            "always": "R R -> R", "d0": "S0 S0 -> S0", "slots": "S1 R -> P", "linear(0)": "P R -> P",
        }  # fmt: skip

    def test_scatter_keeps_the_slots_apart(self) -> None:
        index = torch.tensor([[0], [3], [5], [2]])
        assert rows("aten.scatter.value", x(4, 6), 1, index, -1.0) == {
            "always": "R R -> R", "d0": "S0 S0 -> S0", "slots": "S1 R -> S1",
        }  # fmt: skip

    def test_index_put_adds_summands(self) -> None:
        index = torch.tensor([0, 3, 3])
        assert rows("aten.index_put.default", x(4, 6), [index], x(3, 6), True) == {
            "always": "R R R -> R", "d1": "S1 R S1 -> S1", "s0": "P S0 S0 -> P", "slots0": "S0 R R -> S0",
            "linear(0,2)": "P R P -> P",
        }  # fmt: skip

    def test_without_accumulation_it_does_not(self) -> None:
        index = torch.tensor([0, 3, 2])
        found = rows("aten.index_put.default", x(4, 6), [index], x(3, 6))
        assert sorted(found) == ["always", "d1", "slots0"]


class TestConvolution:
    def test_groups_are_cut_whole(self) -> None:
        args = (x(4, 6, 5, 5), x(9, 2, 3, 3), x(9), [1, 1], [0, 0], [1, 1], False, [0, 0], 3)
        found = rule("aten.convolution.default", *args)
        g = factor(found, "g")
        assert (g.size, g.inputs, g.outputs) == (3, (Cut(1, 2), Cut(0, 3), Cut(0, 3)), (Cut(1, 3),))
        assert found.flops == 2 * 4 * 9 * 9 * 2 * 9

    def test_input_channels_are_summed_and_so_is_the_bias(self) -> None:
        args = (x(4, 6, 5, 5), x(9, 6, 3, 3), x(9), [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
        ci = factor(rule("aten.convolution.default", *args), "ci")
        assert (ci.inputs, ci.outputs) == ((Cut(1), Cut(1), SUM), (SUM,))

    def test_patches_are_cut_between_windows(self) -> None:
        args = (x(2, 3, 8, 6), x(5, 3, 2, 2), None, [2, 2], [0, 0], [1, 1], False, [0, 0], 1)
        d2 = factor(rule("aten.convolution.default", *args), "d2")
        assert (d2.size, d2.inputs, d2.outputs) == (4, (Cut(2, 2), None), (Cut(2),))

    def test_each_gradient_has_its_own_sums(self) -> None:
        (args, _) = conv.SAMPLES["aten.convolution_backward.default"]()[3]
        assert args[-1] == [True, True, True]
        found = rows("aten.convolution_backward.default", *args)
        assert found["n"] == "S0 S0 R -> S0 P P"
        assert found["ci"] == "R S1 S1 -> S1 S1 R"
        assert found["co"] == "S1 R S0 -> P S0 S0"


class TestBlocked:
    @pytest.mark.parametrize(
        ("op", "args", "blocked"),
        [
            ("aten.cumsum.default", (1,), 1),
            ("aten.topk.default", (2, 0), 0),
            ("aten.sort.default", (), 2),
            ("aten.flip.default", ([1],), 1),
            ("aten.slice.Tensor", (0, 1, 4), 0),
            ("aten.constant_pad_nd.default", ([1, 0],), 2),
        ],
    )
    def test_the_dim_an_op_works_along_is_never_cut(
        self, op: str, args: tuple[object, ...], blocked: int
    ) -> None:
        found = rule(op, x(5, 4, 6), *args)
        assert sorted(f.name for f in found.factors) == [f"d{d}" for d in range(3) if d != blocked]

    def test_padding_with_a_number_is_not_linear(self) -> None:
        assert rule("aten.constant_pad_nd.default", x(5, 4), [1, 0]).linear == (frozenset({0}),)
        assert rule("aten.constant_pad_nd.default", x(5, 4), [1, 0], 1.0).linear == ()

    def test_strided_slices_are_cut_at_whole_steps(self) -> None:
        d1 = factor(rule("aten.slice.Tensor", x(5, 6), 1, 1, 6, 2), "d1")
        assert (d1.size, d1.inputs, d1.outputs) == (3, (Cut(1, 2),), (Cut(1),))
