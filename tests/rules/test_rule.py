"""Rules as data: what verification rejects, the rows that follow, and local calls."""

from __future__ import annotations

import pytest
import torch

from hetspmd.errors import RuleError
from hetspmd.placement import PARTIAL, REPLICATE, shard
from hetspmd.rules.kernels import empty_shards
from hetspmd.rules.rule import (
    SUM,
    Call,
    Cut,
    Factor,
    Local,
    LocalCall,
    OpRule,
    TensorType,
    Triple,
    call_of,
    local_shape,
    localize,
)
from hetspmd.trace.graph import DEVICE, DType, Graph, Instruction, Ref, Tensor
from hetspmd.trace.values import to_torch


def f32(*shape: int) -> TensorType:
    return TensorType(shape, "float32")


def flags(*shape: int) -> TensorType:
    return TensorType(shape, "bool")


MM = Call("aten.mm.default", (Ref(0), Ref(1)), {}, (f32(6, 4), f32(4, 5)), (f32(6, 5),))
M = Factor("m", 6, (Cut(0), None), (Cut(0),))
K = Factor("k", 4, (Cut(1), Cut(0)), (SUM,))
N = Factor("n", 5, (None, Cut(1)), (Cut(1),))
MM_RULE = OpRule((M, K, N), linear=(frozenset({0}), frozenset({1})))


def call(inputs: tuple[TensorType, ...], outputs: tuple[TensorType | None, ...]) -> Call:
    return Call("lib.op.default", tuple(Ref(i) for i in range(len(inputs))), {}, inputs, outputs)


@pytest.mark.parametrize(
    ("rule", "on", "message"),
    [
        (OpRule((M, Factor("m", 5, (None, Cut(1)), (Cut(1),)))), MM, "two factors share a name"),
        (OpRule((Factor("m", 0, (Cut(0), None), (Cut(0),)),)), MM, "has 0 units; leave an empty dim out"),
        (OpRule((Factor("m", 6, (Cut(0),), (Cut(0),)),)), MM, "places 1 inputs, the call has 2"),
        (OpRule((Factor("m", 6, (Cut(0), None), ()),)), MM, "places 0 outputs, the call has 1"),
        (OpRule((Factor("m", 6, (Cut(2), None), (Cut(0),)),)), MM, r"cuts dim 2 of input 0, shape \[6, 4\]"),
        (OpRule((Factor("m", 6, (Cut(-1), None), (Cut(0),)),)), MM, "cuts dim -1 of input 0"),
        (
            OpRule((Factor("m", 6, (Cut(0), None), (Cut(1),)),)),
            MM,
            "6 units of 1, but dim 1 of output 0 has 5",
        ),
        (
            OpRule((Factor("m", 2, (Cut(0, 2), None), (Cut(0, 3),)),)),
            MM,
            "2 units of 2, but dim 0 of input 0",
        ),
        (OpRule((M, Factor("x", 3, (Cut(0, 2), None), (SUM,)))), MM, "m and x both cut dim 0 of input 0"),
        (
            OpRule((Factor("a", 6, (Cut(0),), (Cut(0),)),)),
            call((f32(6),), (None,)),
            "output 0, which is None",
        ),
        (
            OpRule((Factor("a", 6, (Cut(0),), (SUM,)),)),
            call((f32(6),), (flags(),)),
            "bool output 0 cannot be",
        ),
        (
            OpRule((Factor("a", 6, (SUM, Cut(0)), (SUM,)),)),
            call((flags(), f32(6)), (f32(),)),
            "bool input 0 cannot be a sum",
        ),
        (OpRule(linear=(frozenset(),)), MM, r"linear inputs \[\] of 2"),
        (OpRule(linear=(frozenset({2}),)), MM, r"linear inputs \[2\] of 2"),
        (OpRule(linear=(frozenset({-1}),)), MM, r"linear inputs \[-1\] of 2"),
        (OpRule(linear=(frozenset({0}),)), call((f32(3),), (flags(3),)), "bool output cannot be All-Reduce"),
        (OpRule(shape_args={1: 1}), MM, "shape argument 1 names output 1 of 1"),
    ],
)
def test_verification_names_the_fault(rule: OpRule, on: Call, message: str) -> None:
    with pytest.raises(RuleError, match=message):
        rule.verify(on)


def test_verification_accepts_a_right_rule() -> None:
    MM_RULE.verify(MM)
    OpRule().verify(call((), (None,)))


def test_rows_are_always_factors_linear_in_this_order() -> None:
    assert [str(row) for row in MM_RULE.rows(MM)] == [
        "{replicated, replicated} always {replicated}",
        "{shard(0), replicated} m {shard(0)}",
        "{shard(1), shard(0)} k {partial}",
        "{replicated, shard(1)} n {shard(1)}",
        "{partial, replicated} linear(0) {partial}",
        "{replicated, partial} linear(1) {partial}",
    ]
    assert [row.factor for row in MM_RULE.rows(MM)] == [None, 0, 1, 2, None, None]


def test_a_factor_of_one_unit_gives_no_row() -> None:
    rule = OpRule((Factor("a", 1, (Cut(0, 6),), (Cut(0, 6),)),))
    on = call((f32(6),), (f32(6),))
    rule.verify(on)
    assert [row.name for row in rule.rows(on)] == ["always"]


def test_rows_with_the_same_forms_are_kept_once() -> None:
    on = call((f32(6), f32(6)), (f32(),))
    rule = OpRule(
        (Factor("a", 6, (Cut(0), None), (SUM,)), Factor("b", 3, (None, Cut(0, 2)), (SUM,))),
        linear=(frozenset({0}), frozenset({0})),
    )
    assert [row.name for row in rule.rows(on)] == ["always", "a", "b", "linear(0)"]


def test_call_finds_arguments_by_position_or_name() -> None:
    on = Call("lib.op.default", (Ref(0), 3), {"eps": 0.5, "bias": Ref(1)}, (f32(2), f32(2)), (f32(2),))
    assert on.arg(1, "n") == 3
    assert on.arg(2, "eps") == 0.5
    assert on.arg(5, "other", 7) == 7
    assert on.tensor(0) == 0
    assert on.tensor(3, "bias") == 1
    assert on.tensor(1, "n") is None
    assert on.out == f32(2)
    with pytest.raises(RuleError, match="first output is None"):
        _ = call((), (None,)).out


def test_local_shape() -> None:
    assert local_shape((12, 5), Cut(0, 4), 2) == (8, 5)
    assert local_shape((12, 5), Cut(1), 0) == (12, 0)
    assert local_shape((12, 5), None, 2) == (12, 5)
    assert local_shape((12, 5), SUM, 2) == (12, 5)


def test_localize_without_shape_arguments_leaves_the_call_alone() -> None:
    for row in MM_RULE.rows(MM):
        assert localize(MM, MM_RULE, row, 0, 2, 0, 3) == ("aten.mm.default", (Ref(0), Ref(1)), {})


def test_localize_replaces_shape_arguments() -> None:
    view = Call("aten.view.default", (Ref(0), (6, 2, 4)), {}, (f32(6, 8),), (f32(6, 2, 4),))
    rule = OpRule((Factor("h", 2, (Cut(1, 4),), (Cut(1),)),), shape_args={1: 0})
    always, row = rule.rows(view)
    assert localize(view, rule, row, 0, 2, 0, 1) == ("aten.view.default", (Ref(0), (6, 1, 4)), {})
    assert localize(view, rule, always, 1, 2, 0, 0) == ("aten.view.default", (Ref(0), (6, 2, 4)), {})

    full = Call("aten.full.default", ((6,), 1), {"size": (6,)}, (), (f32(6),))
    rule = OpRule((Factor("d", 6, (), (Cut(0),)),), shape_args={0: 0, "size": 0, 7: 0})
    row = rule.rows(full)[0]
    assert localize(full, rule, Triple("d", (), (shard(0),), 0), 0, 2, 1, 5) == (
        "aten.full.default",
        ((4,), 1),
        {"size": (4,)},
    )
    assert localize(full, rule, row, 0, 2, 0, 0)[1] == ((6,), 1)


def test_an_empty_shard_makes_no_call_but_neutral_results() -> None:
    _, m, k, _, linear, _ = MM_RULE.rows(MM)
    assert localize(MM, MM_RULE, m, 1, 2, 6, 6) == (
        empty_shards,
        (((0, 5),), (DType("float32"),), DEVICE),
        {},
    )
    assert localize(MM, MM_RULE, k, 1, 2, 4, 4)[1][0] == ((6, 5),)
    assert localize(MM, MM_RULE, linear, 1, 2, 0, 0)[0] == "aten.mm.default"


def test_an_empty_shard_of_an_op_that_returns_none_for_some_outputs() -> None:
    on = call((f32(6, 2),), (f32(6), None))
    rule = OpRule((Factor("a", 6, (Cut(0),), (Cut(0), None)),))
    target, args, kwargs = localize(on, rule, rule.rows(on)[1], 0, 2, 0, 0)
    assert target is empty_shards
    tensor, nothing = empty_shards(*to_torch(args, torch.device("cpu")), **kwargs)
    assert tensor.shape == (0,)
    assert nothing is None


def test_an_empty_shard_still_runs_where_its_result_is_not_neutral() -> None:
    on = call((f32(6), f32()), (f32(),))
    bias = OpRule((Factor("k", 6, (Cut(0), SUM), (SUM,)),))  # the rank's summand of the bias counts
    assert localize(on, bias, bias.rows(on)[1], 0, 2, 0, 0)[0] == "lib.op.default"
    whole = OpRule((Factor("k", 6, (Cut(0), None), (None,)),))  # the result is whole on every rank
    assert localize(on, whole, whole.rows(on)[1], 0, 2, 0, 0)[0] == "lib.op.default"


def test_a_rewrite_sees_its_rank_and_units() -> None:
    seen: list[Local] = []

    def rewrite(local: Local) -> LocalCall:
        seen.append(local)
        return local.default()

    rule = OpRule((M, N), rewrite=rewrite)
    always, m, _ = rule.rows(MM)
    localize(MM, rule, m, 1, 3, 2, 5)
    localize(MM, rule, always, 2, 3, 0, 0)
    sharded, whole = seen
    assert (sharded.rank, sharded.world, sharded.start, sharded.stop) == (1, 3, 2, 5)
    assert sharded.factor == M
    assert sharded.input_shapes == ((3, 4), (4, 5))
    assert sharded.output_shapes == ((3, 5),)
    assert whole.factor is None
    assert whole.output_shapes == ((6, 5),)


def test_call_of_numbers_every_appearance() -> None:
    tensors = tuple(Tensor(i, f"e{i}", (2, i + 1), "float32") for i in range(3))
    args = (Ref(1), (Ref(0), Ref(1)), 4)
    instruction = Instruction(0, "e2", "lib.op.default", args, (("w", Ref(0)),), (1, 0, 1, 0), (2, -1))
    nothing = ((),) * 6
    graph = Graph(tensors, (instruction,), *nothing, None, None, "", "")
    on = call_of(graph, instruction)
    assert on.args == (Ref(0), (Ref(1), Ref(2)), 4)
    assert on.kwargs == {"w": Ref(3)}
    assert on.inputs == (f32(2, 2), f32(2, 1), f32(2, 2), f32(2, 1))
    assert on.outputs == (f32(2, 3), None)


def test_forms_of_rows() -> None:
    _, m, k, *_ = MM_RULE.rows(MM)
    assert m.pre == (shard(0), REPLICATE)
    assert k.post == (PARTIAL,)
