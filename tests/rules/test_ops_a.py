"""Rules of elementwise, reducing, contracting, normalising, attending, embedding, loss and creating ops."""

from __future__ import annotations

from importlib import import_module

import pytest
import torch

from hetspmd.errors import RuleError
from hetspmd.placement import placement_text
from hetspmd.rules.brute import case_of
from hetspmd.rules.oracle import check
from hetspmd.rules.registry import registered, rule_for, rule_function
from hetspmd.rules.rule import Call, TensorType
from hetspmd.rules.sampling import integers, real
from hetspmd.rules.terms import broadcast_shape, linear_sets, reduced_dims, term_factors
from hetspmd.trace.graph import Ref

MODULES = ("attention", "contraction", "creation", "embedding", "loss", "norm", "pointwise", "random",
           "reduction", "softmax")  # fmt: skip
SAMPLED = [op for name in MODULES for op in import_module(f"hetspmd.rules.samples.{name}").SAMPLES]

# Missing rows are searched for where that is quick; `hetspmd rules check` does it for all.
SEARCHED = (
    "aten.add.Tensor", "aten.mul.Tensor", "aten.where.self", "aten.masked_fill.Scalar",
    "aten._to_copy.default", "aten.gelu_backward.default", "aten.sum.dim_IntList", "aten.var_mean.correction",
    "aten.mm.default", "aten.addmm.default", "aten.einsum.default", "aten._softmax_backward_data.default",
    "aten.embedding.default", "aten.native_layer_norm.default", "aten.zeros_like.default",
    "aten.arange.start_step",
)  # fmt: skip


@pytest.mark.parametrize("op", SAMPLED)
def test_every_row_holds(op: str) -> None:
    report = check(op, missing=False)
    assert report.rows_checked > 0
    assert not report.wrong, str(report)


@pytest.mark.parametrize("op", SEARCHED)
def test_no_row_is_missing(op: str) -> None:
    report = check(op)
    assert not report.missing, str(report)


@pytest.mark.parametrize("name", MODULES)
def test_every_rule_has_samples_or_says_why_not(name: str) -> None:
    rules, samples = (import_module(f"hetspmd.rules.{package}.{name}") for package in ("ops", "samples"))
    own = [op for op in registered() if getattr(rule_function(op), "__module__", "") == rules.__name__]
    covered = {*samples.SAMPLES, *getattr(samples, "UNTESTED", {})}
    assert [op for op in own if op not in covered] == []


def rows(op: str, *args: object, **kwargs: object) -> list[str]:
    case = case_of(op, args, kwargs)
    found = rule_for(case.call)
    assert found is not None
    return [
        f"{' '.join(map(placement_text, row.pre))} -> {' '.join(map(placement_text, row.post))}"
        for row in found.rows(case.call)
    ]


def test_matrix_product() -> None:
    assert rows("aten.mm.default", real(3, 4), real(4, 5)) == [
        "replicated replicated -> replicated",
        "shard(0) replicated -> shard(0)",
        "shard(1) shard(0) -> partial",
        "replicated shard(1) -> shard(1)",
        "partial replicated -> partial",
        "replicated partial -> partial",
    ]


def test_a_bias_is_added_once() -> None:
    assert rows("aten.addmm.default", real(5), real(3, 4), real(4, 5)) == [
        "replicated replicated replicated -> replicated",
        "shard(0) replicated shard(1) -> shard(1)",
        "replicated shard(0) replicated -> shard(0)",
        "partial shard(1) shard(0) -> partial",
        "partial partial replicated -> partial",
        "partial replicated partial -> partial",
    ]


def test_adding_a_number_is_not_linear() -> None:
    assert rows("aten.add.Tensor", real(4), 1.5) == ["replicated -> replicated", "shard(0) -> shard(0)"]
    assert rows("aten.mul.Tensor", real(4), 1.5)[-1] == "partial -> partial"


def test_rounding_division_is_not_linear() -> None:
    assert "All-Reduce" not in " ".join(rows("aten.div.Tensor_mode", real(4), real(4), rounding_mode="floor"))
    assert rows("aten.div.Tensor", real(4), real(4))[-1] == "partial replicated -> partial"


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool])
def test_conversion_to_a_discrete_dtype_is_not_linear(dtype: torch.dtype) -> None:
    assert "All-Reduce" not in " ".join(rows("aten._to_copy.default", real(4), dtype=dtype))


def test_maxima_over_a_dim_keep_it_whole() -> None:
    assert rows("aten.amax.default", real(3, 4), [1]) == [
        "replicated -> replicated",
        "shard(0) -> shard(0)",
    ]


def test_layer_norm_backward_sums_parameter_gradients() -> None:
    x = real(3, 4)
    out, mean, rstd = torch.ops.aten.native_layer_norm.default(x, [4], None, None, 1e-5)
    found = rows(
        "aten.native_layer_norm_backward.default",
        out,
        x,
        [4],
        mean,
        rstd,
        real(4),
        real(4),
        [True, True, True],
    )
    assert found[1] == (
        "shard(0) shard(0) shard(0) shard(0) replicated replicated -> shard(0) partial partial"
    )


def test_vocabulary_parallel_embedding() -> None:
    found = rows("aten.embedding.default", real(7, 5), integers(7, 4))
    assert "shard(0) replicated -> partial" in found


def test_gradient_scaled_by_frequency_needs_all_positions() -> None:
    grad, indices = real(6, 5), integers(7, 6)
    free = rows("aten.embedding_dense_backward.default", grad, indices, 7, -1, False)
    scaled = rows("aten.embedding_dense_backward.default", grad, indices, 7, -1, True)
    assert set(free) - set(scaled) == {"shard(0) shard(0) -> partial"}


def flash_call(heads: int, groups: int, *, dropout: float = 0.0) -> Call:
    """A flash attention on CUDA, as tracing shows it: integers among the outputs are None."""
    q, k = TensorType((4, heads, 16, 8), "float16"), TensorType((4, groups, 16, 8), "float16")
    seeds = (TensorType((2,), "uint64"), TensorType((), "uint64"), TensorType((0,), "float16"))
    statistics = TensorType((4, heads, 16), "float32")
    op = "aten._scaled_dot_product_flash_attention.default"
    args = (Ref(0), Ref(1), Ref(2), dropout, True)
    return Call(op, args, {}, (q, k, k), (q, statistics, None, None, None, None, *seeds))


def test_query_heads_are_cut_with_their_key_heads() -> None:
    found = rule_for(flash_call(12, 4))
    assert found is not None
    assert [(f.name, f.size) for f in found.factors] == [("b", 4), ("h", 4)]
    assert [getattr(p, "unit", None) for p in found.factors[1].inputs] == [3, 1, 1]


def test_attention_with_dropout_inside_is_never_sharded() -> None:
    call = flash_call(12, 12, dropout=0.1)
    found = rule_for(call)
    assert found is not None
    assert found.random
    assert [row.name for row in found.rows(call)] == ["always"]


def test_composed_mean_loss_keeps_the_global_count() -> None:
    x, y = real(4, 5), real(4, 5, seed=1)
    assert rows("aten.mse_loss.default", x, y, 1)[1:] == [
        "shard(0) shard(0) -> partial",
        "shard(1) shard(1) -> partial",
    ]


@pytest.mark.parametrize(
    ("op", "flops"),
    [("aten.mm.default", 2 * 3 * 4 * 5), ("aten.bmm.default", 2 * 2 * 3 * 4 * 5)],
)
def test_flops_of_products(op: str, flops: int) -> None:
    lead = (2,) if "bmm" in op else ()
    case = case_of(op, (real(*lead, 3, 4), real(*lead, 4, 5)), {})
    found = rule_for(case.call)
    assert found is not None
    assert found.flops == flops


class TestTerms:
    call = Call("test.op.default", (), {}, (TensorType((4, 1), "float32"), TensorType((6,), "float32")),
                (TensorType((4, 6), "float32"),))  # fmt: skip

    def test_broadcast_inputs_are_whole(self) -> None:
        found = term_factors(self.call, [("a", "b"), ("b",)], [("a", "b")])
        assert [(f.name, f.size, f.inputs.count(None)) for f in found] == [("a", 4, 1), ("b", 6, 1)]

    def test_extents_must_agree(self) -> None:
        with pytest.raises(RuleError, match="factor a"):
            term_factors(self.call, [("a", None), ("a",)], [(None, None)])

    def test_number_of_dims_must_agree(self) -> None:
        with pytest.raises(RuleError, match="dims named"):
            term_factors(self.call, [("a",), ("b",)], [("a", "b")])

    def test_integers_are_linear_only_within_one_dtype(self) -> None:
        def sets(source: str, target: str) -> int:
            call = Call("t.o.d", (), {}, (TensorType((4,), source),), (TensorType((4,), target),))
            return len(linear_sets(call, [[0]]))

        assert [sets(*pair) for pair in (("int64", "int64"), ("int32", "int64"), ("int64", "float32"),
                ("float32", "bfloat16"), ("bool", "int64"))] == [1, 0, 0, 1, 0]  # fmt: skip

    def test_dims(self) -> None:
        assert reduced_dims((), 2) == {0, 1}
        assert reduced_dims((-1,), 3) == {2}
        assert broadcast_shape(self.call.inputs) == (4, 6)
        with pytest.raises(RuleError, match="dim 3"):
            reduced_dims((3,), 3)
