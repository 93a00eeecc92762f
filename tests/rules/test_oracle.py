"""The oracle finds planted faults, accepts right rules, and every built-in rule passes it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import inf

import pytest
import torch

from hetspmd.errors import RuleError
from hetspmd.rules import registry
from hetspmd.rules import samples as sample_package
from hetspmd.rules.brute import (
    assembled,
    case_of,
    mismatch,
    shards,
    splits,
    starts_of,
    summands,
)
from hetspmd.rules.missing import implies, triple_text
from hetspmd.rules.oracle import OracleReport, check
from hetspmd.rules.rule import SUM, Cut, Factor, Local, LocalCall, OpRule
from hetspmd.rules.samples import Sample

torch.manual_seed(0)


def ops_without_samples() -> tuple[str, ...]:
    """Ops with a rule of their own that the oracle cannot test for want of samples."""
    bundled = sample_package.load()
    return tuple(
        op for op in registry.registered() if op not in bundled.samples and op not in bundled.untested
    )


def d(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64)


@pytest.fixture
def _empty_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_RULES", {})
    monkeypatch.setattr(registry, "_FAMILIES", [])


@pytest.fixture(scope="module")
def library() -> Iterator[torch.library.Library]:
    """Ops that torch does not have: block_swap reverses every block of 4; offset adds arange(start)."""
    found = torch.library.Library("hetspmd_oracle", "FRAGMENT")
    found.define("block_swap(Tensor x) -> Tensor")
    found.impl("block_swap", lambda x: x.view(-1, 4).flip(1).reshape(-1), "CPU")
    found.define("offset(Tensor x, int start) -> Tensor")
    found.impl("offset", lambda x, start: x * torch.arange(start, start + len(x)), "CPU")
    yield found
    found._destroy()


MM: list[Sample] = [((d(4, 6), d(6, 5)), {})]
M = Factor("m", 4, (Cut(0), None), (Cut(0),))
K = Factor("k", 6, (Cut(1), Cut(0)), (SUM,))
N = Factor("n", 5, (None, Cut(1)), (Cut(1),))
LINEAR = (frozenset({0}), frozenset({1}))
MM_RULE = OpRule((M, K, N), linear=LINEAR)


def planted(op: str, rule: OpRule, samples: list[Sample], *, missing: bool = False) -> OracleReport:
    registry.rule(op)(lambda _: rule)
    return check(op, samples, missing=missing)


@pytest.mark.usefixtures("_empty_registry")
class TestPlanted:
    def test_a_right_rule_passes(self) -> None:
        report = planted("aten::mm", MM_RULE, MM, missing=True)
        assert report.ok
        assert (report.samples, report.rows_checked) == (1, 6)
        assert report.splits_checked > 20
        assert str(report).startswith("aten.mm.default: ok (1 samples, 6 rows")

    def test_a_wrong_dim(self) -> None:
        square: list[Sample] = [((d(4, 4), d(4, 4)), {})]
        rule = OpRule((Factor("m", 4, (Cut(0), None), (Cut(1),)),))
        report = planted("aten::mm", rule, square)
        (wrong,) = report.wrong
        assert wrong.row == "{shard(0), replicated} m {shard(1)}"
        assert (wrong.output, wrong.error, wrong.sample) == (0, inf, 0)
        assert "instead of torch.float64 [4, 2]" in wrong.reason
        assert len(wrong.split) == 3

    def test_a_wrong_input(self) -> None:
        square: list[Sample] = [((d(4, 4), d(4, 4)), {})]
        report = planted("aten::mm", OpRule((Factor("n", 4, (None, Cut(0)), (Cut(1),)),)), square)
        (wrong,) = report.wrong
        assert wrong.output == -1
        assert "rank 0 raised RuntimeError" in wrong.reason

    def test_a_missing_sum(self) -> None:
        report = planted("aten::mm", OpRule((replace(K, outputs=(None,)),)), MM)
        (wrong,) = report.wrong
        assert wrong.row == "{shard(1), shard(0)} k {replicated}"
        assert 1e-3 < wrong.error < inf
        assert "largest relative error" in str(report)
        assert "units per rank [3, 2, 1]" in str(report)

    def test_a_sum_that_is_whole(self) -> None:
        report = planted("aten::mm", OpRule((replace(M, inputs=(None, None), outputs=(SUM,)),)), MM)
        assert [w.row for w in report.wrong] == ["{replicated, replicated} m {partial}"]

    def test_a_bias_added_on_every_rank(self) -> None:
        registry.rule("aten::addmm", "n, m k, k n -> m n")  # the bias is no summand here
        report = check("aten::addmm", [((d(5), d(4, 6), d(6, 5)), {})])
        assert [w.row.split("} ")[1].split(" ")[0] for w in report.wrong] == ["k"]
        texts = [m.text for m in report.missing]
        assert "{partial, shard(1), shard(0)} {partial}" in texts

    def test_a_wrong_unit(self, library: torch.library.Library) -> None:
        op = "hetspmd_oracle::block_swap"
        samples: list[Sample] = [((d(24),), {})]
        linear = (frozenset({0}),)
        wrong_unit = OpRule((Factor("block", 12, (Cut(0, 2),), (Cut(0, 2),)),), linear)
        assert len(planted(op, wrong_unit, samples).wrong) == 1
        registry.unregister(op)
        right_unit = OpRule((Factor("block", 6, (Cut(0, 4),), (Cut(0, 4),)),), linear)
        assert planted(op, right_unit, samples, missing=True).ok
        registry.unregister(op)
        report = planted(op, OpRule(linear=linear), samples, missing=True)
        assert [(m.text, m.units) for m in report.missing] == [("{shard(0)} {shard(0)}", 6)]

    def test_not_linear(self) -> None:
        positive: list[Sample] = [((d(4, 6).abs(),), {})]
        report = planted("aten::relu", OpRule(linear=(frozenset({0}),)), positive)
        assert [w.row for w in report.wrong] == ["{partial} linear(0) {partial}"]

    def test_affine_is_not_linear(self) -> None:
        report = planted("aten::add.Scalar", OpRule(linear=(frozenset({0}),)), [((d(4), 1.0), {})])
        assert len(report.wrong) == 1

    def test_linear_together_is_not_linear_alone(self) -> None:
        report = planted("aten::add.Tensor", OpRule(linear=LINEAR), [((d(4), d(4)), {})])
        assert len(report.wrong) == 2
        registry.unregister("aten::add.Tensor")
        report = planted("aten::mul.Tensor", OpRule(linear=(frozenset({0, 1}),)), [((d(4), d(4)), {})])
        assert len(report.wrong) == 1

    def test_integer_summands_are_compared_exactly(self) -> None:
        ints = torch.arange(6).reshape(2, 3)
        both = OpRule(linear=(frozenset({0, 1}),))
        assert not planted("aten::add.Tensor", both, [((ints, ints), {})]).wrong
        registry.unregister("aten::add.Tensor")
        assert planted("aten::bitwise_or.Tensor", both, [((ints, ints + 1), {})]).wrong

    @pytest.mark.parametrize(
        ("rule", "lacks"),
        [
            (OpRule((M, K), LINEAR), "{replicated, shard(1)} {shard(1)}"),
            (OpRule((M, N), LINEAR), "{shard(1), shard(0)} {partial}"),
            (OpRule((M, K, N), LINEAR[:1]), "{replicated, partial} {partial}"),
        ],
    )
    def test_an_omitted_row(self, rule: OpRule, lacks: str) -> None:
        report = planted("aten::mm", rule, MM, missing=True)
        assert not report.wrong
        assert [m.text for m in report.missing] == [lacks]
        assert not report.ok
        assert f"missing: {lacks}" in str(report)
        registry.unregister("aten::mm")
        assert planted("aten::mm", replace(rule, omitted={lacks: "on purpose"}), MM, missing=True).ok

    def test_a_missing_factor_of_a_view(self) -> None:
        samples: list[Sample] = [((d(6, 8), [6, 2, 4]), {})]
        rows = Factor("r", 6, (Cut(0),), (Cut(0),))
        heads = Factor("h", 2, (Cut(1, 4),), (Cut(1),))
        rule = OpRule((rows,), linear=(frozenset({0}),), shape_args={1: 0})
        report = planted("aten::view", rule, samples, missing=True)
        assert [(m.text, m.units) for m in report.missing] == [("{shard(1)} {shard(1)}", 2)]
        registry.unregister("aten::view")
        assert planted("aten::view", replace(rule, factors=(rows, heads)), samples, missing=True).ok
        registry.unregister("aten::view")
        report = planted("aten::view", replace(rule, shape_args={}), samples)
        assert [w.output for w in report.wrong] == [-1]  # the local view asked for the global shape

    def test_no_false_alarm_from_special_values(self) -> None:
        rows = tuple(Factor(f"d{i}", n, (Cut(i),), (Cut(i),)) for i, n in enumerate((4, 3)))
        zeros: list[Sample] = [((torch.zeros(4, 3, dtype=torch.float64),), {})]
        assert planted("aten::exp", OpRule(rows), zeros, missing=True).ok
        positive: list[Sample] = [((d(4, 3).abs(),), {})]
        assert planted("aten::abs", OpRule(rows), positive, missing=True).ok

    def test_a_rewrite_that_forgets_the_offset(self, library: torch.library.Library) -> None:
        op = "hetspmd_oracle::offset"
        samples: list[Sample] = [((d(7), 3), {})]

        def shifted(local: Local) -> LocalCall:
            target, args, kwargs = local.default()
            return target, (args[0], args[1] + local.start), kwargs

        rows = OpRule((Factor("i", 7, (Cut(0),), (Cut(0),)),), linear=(frozenset({0}),))
        assert len(planted(op, rows, samples).wrong) == 1
        registry.unregister(op)
        assert planted(op, replace(rows, rewrite=shifted), samples, missing=True).ok

    def test_a_rewrite_that_spoils_the_whole_call(self) -> None:
        def doubled(local: Local) -> LocalCall:
            return "aten.mul.Scalar", (local.call.args[0], 2), {}

        report = planted("aten::alias", OpRule(rewrite=doubled), [((d(4),), {})])
        assert [w.row for w in report.wrong] == ["{replicated} always {replicated}"]

    def test_a_rewrite_that_raises(self) -> None:
        def broken(local: Local) -> LocalCall:
            raise KeyError(local.rank)

        report = planted("aten::alias", OpRule(rewrite=broken), [((d(4),), {})])
        assert "raised KeyError" in report.wrong[0].reason

    def test_a_wrong_empty_shard(self) -> None:
        # The mean of no elements is NaN: without a neutral result for empty shards the sum is spoiled.
        def local_mean(local: Local) -> LocalCall:
            share = (local.stop - local.start) / 6 if local.factor else 1.0
            return lambda x: x.mean() * share, local.call.args, {}

        rule = OpRule((Factor("b", 6, (Cut(0),), (None,)),), rewrite=local_mean)
        assert planted("aten::mean", rule, [((d(6),), {})]).wrong
        registry.unregister("aten::mean")
        rule = replace(rule, factors=(Factor("b", 6, (Cut(0),), (SUM,)),))
        assert not planted("aten::mean", rule, [((d(6),), {})]).wrong

    def test_a_rule_that_does_not_fit_is_reported(self) -> None:
        report = planted("aten::mm", MM_RULE, [*MM, ((d(3, 6), d(6, 5)), {})])
        (wrong,) = report.wrong
        assert (wrong.sample, wrong.row) == (1, "the rule does not fit the call")
        assert "4 units of 1, but dim 0 of input 0 has 3" in str(report)

    def test_dropout(self) -> None:
        rows = OpRule((Factor("b", 40, (Cut(0),), (Cut(0), Cut(0))),), random=True)
        samples: list[Sample] = [((d(40, 9), 0.25, True), {})]
        report = planted("aten::native_dropout", rows, samples, missing=True)
        assert report.ok
        assert report.skipped == ("missing rows: the values of the op's result are not determined",)
        registry.unregister("aten::native_dropout")

        def unscaled(local: Local) -> LocalCall:
            def drop(x: torch.Tensor, p: float, _: bool) -> tuple[torch.Tensor, torch.Tensor]:
                mask = torch.rand_like(x) > p
                return x * mask, mask

            return (drop, local.call.args, {}) if local.factor else local.default()

        report = planted("aten::native_dropout", replace(rows, rewrite=unscaled), samples)
        assert ["input * mask" in w.reason for w in report.wrong] == [True]

    def test_random_ops_with_a_wrong_mean_or_a_lost_seed(self) -> None:
        rows = OpRule((Factor("b", 400, (Cut(0),), (Cut(0),)),), random=True)
        samples: list[Sample] = [((d(400), 0.25), {})]
        assert planted("aten::bernoulli.p", rows, samples).ok
        registry.unregister("aten::bernoulli.p")

        def swapped(local: Local) -> LocalCall:
            x, p = local.call.args
            return ("aten.bernoulli.p", (x, 1 - p), {}) if local.factor else local.default()

        report = planted("aten::bernoulli.p", replace(rows, rewrite=swapped), samples)
        assert "the mean is off" in report.wrong[0].reason
        registry.unregister("aten::bernoulli.p")

        draws = torch.Generator().manual_seed(5)

        def unseeded(local: Local) -> LocalCall:
            return lambda x, p: torch.bernoulli(torch.full_like(x, p), generator=draws), local.call.args, {}

        report = planted("aten::bernoulli.p", replace(rows, rewrite=unseeded), samples)
        reasons = [w.reason for w in report.wrong]
        assert any("two runs from the same seeds differ" in r for r in reasons)
        assert any("after {replicated} always {replicated}" in r for r in reasons)

    def test_uninitialised_results_are_compared_by_shape(self) -> None:
        samples: list[Sample] = [((d(4, 3),), {})]
        rule = OpRule((Factor("a", 4, (Cut(0),), (Cut(0),)),))
        assert planted("aten::empty_like", rule, samples, missing=True).ok
        registry.unregister("aten::empty_like")
        assert planted("aten::empty_like", OpRule((Factor("a", 4, (Cut(0),), (None,)),)), samples).wrong

    def test_outputs_that_are_none_count_as_whole(self) -> None:
        x, w = d(2, 3, 5), d(4, 3, 2)
        grad = torch.nn.functional.conv1d(x, w)
        args = (torch.randn_like(grad), x, w, [4], [1], [0], [1], False, [0], 1, [True, False, False])
        rows = OpRule(
            (
                Factor("n", 2, (Cut(0), Cut(0), None), (Cut(0), None, None)),
                Factor("i", 3, (None, Cut(1), Cut(1)), (Cut(1), None, None)),
                Factor("o", 4, (Cut(1), None, Cut(0)), (SUM, None, None)),
            ),
            linear=(frozenset({0}), frozenset({2})),
        )
        report = planted("aten::convolution_backward", rows, [(args, {})], missing=True)
        assert not report.wrong
        assert report.ok, str(report)  # no {.., partial, ..}: the second input is read for its shape only

    def test_the_global_random_state_is_left_alone(self) -> None:
        before = torch.random.get_rng_state()
        planted("aten::mm", MM_RULE, MM, missing=True)
        assert torch.equal(before, torch.random.get_rng_state())

    def test_reports_are_deterministic(self) -> None:
        registry.rule("aten::mm")(lambda _: OpRule((replace(K, outputs=(None,)),)))
        assert str(check("aten::mm", MM)) == str(check("aten::mm", lambda: MM))

    def test_no_rule_and_no_samples(self) -> None:
        with pytest.raises(RuleError, match=r"lib\.op\.default has no rule; register one"):
            check("lib::op")
        registry.rule("lib::op", "a -> a")
        with pytest.raises(RuleError, match=r"no samples; pass samples="):
            check("lib::op")
        with pytest.raises(RuleError, match="the list of samples is empty"):
            check("lib::op", [])
        assert ops_without_samples() == ("lib.op.default",)


@pytest.mark.parametrize("size", range(1, 13))
def test_splits_cover_uneven_and_empty_shards(size: int) -> None:
    found = splits(size)
    assert all(sum(units) == size and min(units) >= 0 for units in found)
    assert {len(units) for units in found} == {1, 2, 3}
    assert (0, size, 0) in found
    if size >= 2:
        threes = [units for units in found if len(units) == 3]
        for empty in range(3):
            assert any(units[empty] == 0 and sum(map(bool, units)) == 2 for units in threes)
    if size >= 4:
        assert any(len(set(units)) > 1 and min(units) > 0 for units in found if len(units) == 3)
    assert starts_of(found[0])[-1] == size


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.complex128, torch.int64, torch.uint8])
def test_splitting_and_assembling_are_inverse(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    whole = (torch.rand(6, 4, dtype=torch.float64) * 9 - 3).to(dtype)
    for world, on in ((1, None), (3, None), (3, 0), (3, 2)):
        parts = summands(whole, world, generator, on)
        assert len(parts) == world
        assert mismatch(assembled(parts, 1), whole, 1e-5) is None
    parts = shards(whole, Cut(1, 2), (0, 2, 0), generator, None)
    assert [tuple(p.shape) for p in parts] == [(6, 0), (6, 4), (6, 0)]
    assert torch.equal(assembled(shards(whole, Cut(0), (3, 1, 2), generator, None), 2), whole)


def test_mismatch() -> None:
    nan, one = float("nan"), torch.ones(3, dtype=torch.float64)
    special = torch.tensor([nan, inf, 1.0], dtype=torch.float64)
    assert mismatch(special.clone(), special, 1e-9) is None
    assert mismatch(torch.tensor([nan, -inf, 1.0]).double(), special, 1e-9) == inf
    assert mismatch(torch.tensor([inf, nan, 1.0]).double(), special, 1e-9) == inf
    assert mismatch(one, special, 1e-9) == inf
    assert mismatch(one.float(), one, 1e-9) == inf
    assert mismatch(one[:2], one, 1e-9) == inf
    assert mismatch(one + 1e-12, one, 1e-9) is None
    error = mismatch(one + 1e-3, one, 1e-9)
    assert error == pytest.approx(1e-3)
    assert mismatch(one + 1e-3, one, 1e-9, scale=1e7) is None
    assert mismatch(torch.tensor([1]), torch.tensor([2]), 1.0) == inf


def test_implied_rows() -> None:
    rows = ((2, 2), (2,))
    assert implies(rows, ((2, 2), (2,)))
    assert implies(rows, ((0, 2), (2,)))  # a whole input can be sliced
    assert not implies(((0, 2), (2,)), ((2, 2), (2,)))
    assert implies(((1,), (0,)), ((1,), (3,)))  # a whole output can be sliced
    assert not implies(((1,), (1,)), ((1,), (0,)))
    assert triple_text((2, 0), (1,)) == "{shard(0), replicated} {partial}"


def test_a_case_sees_tensors_in_lists_and_keywords() -> None:
    a, b, c = d(2, 3), d(2, 3), d(3)
    case = case_of("aten.cat.default", ([a, b],), {"dim": 1})
    assert [t.shape for t in case.call.inputs] == [(2, 3), (2, 3)]
    assert case.call.outputs[0] is not None
    assert case.call.outputs[0].shape == (2, 6)
    case = case_of("aten.linear.default", (a, d(4, 3)), {"bias": d(4)})
    assert case.call.tensor(2, "bias") == 2
    assert case.tolerance == 1e-9
    assert case_of("aten.exp.default", (c.float(),), {}).tolerance > 1e-9


def test_every_rule_has_samples_and_every_sampled_op_a_rule() -> None:
    assert ops_without_samples() == ()
    bundled = sample_package.load()
    assert [op for op in bundled.samples if registry.rule_function(op) is None] == []
    assert not set(bundled.samples) & set(bundled.untested)


@pytest.mark.parametrize("op", sorted(sample_package.load().samples))
def test_built_in_rule(op: str) -> None:
    report = check(op)
    assert report.ok, str(report)
    assert report.rows_checked >= report.samples


@pytest.mark.usefixtures("_empty_registry")
@pytest.mark.parametrize("text", ["{All-Reduce, Identity} {All-Reduce}", "{partial, replicated} {partial}"])
def test_a_triple_is_left_out_by_either_words(text: str) -> None:
    assert planted(
        "aten::mm", OpRule((M, K, N), LINEAR[1:], omitted={text: "for this test"}), MM, missing=True
    ).ok
    registry.unregister("aten::mm")
    lacking = planted("aten::mm", OpRule((M, K, N), LINEAR[1:]), MM, missing=True)
    assert [m.text for m in lacking.missing] == ["{partial, replicated} {partial}"]
