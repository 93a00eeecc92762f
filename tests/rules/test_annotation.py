"""The annotation grammar: what it spells, and what it rejects."""

from __future__ import annotations

import pytest

from hetspmd.errors import RuleError
from hetspmd.rules.annotation import check_annotation, parse_annotation
from hetspmd.rules.rule import SUM, Call, Cut, Factor, TensorType
from hetspmd.trace.graph import Ref


def call(*shapes: tuple[int, ...], outs: int = 1, dtype: str = "float32") -> Call:
    """A call whose last ``outs`` shapes are outputs (of ``dtype``)."""
    cut = len(shapes) - outs
    inputs = tuple(TensorType(s, "float32") for s in shapes[:cut])
    outputs = tuple(TensorType(s, dtype) for s in shapes[cut:])
    return Call("lib.op.default", tuple(Ref(i) for i in range(cut)), {}, inputs, outputs)


def factors(text: str, on: Call) -> tuple[Factor, ...]:
    rule = parse_annotation(text, on)
    rule.verify(on)
    return rule.factors


def test_matrix_product() -> None:
    assert factors("m k, k n -> m n", call((6, 4), (4, 5), (6, 5))) == (
        Factor("m", 6, (Cut(0), None), (Cut(0),)),
        Factor("k", 4, (Cut(1), Cut(0)), (SUM,)),
        Factor("n", 5, (None, Cut(1)), (Cut(1),)),
    )


def test_blocked_factors_are_blocked_in_every_term() -> None:
    on = call((6, 4), (6, 4))
    assert [f.name for f in factors("b h!, -> b h".replace(",", ""), on)] == ["b"]
    assert [f.name for f in factors("b h -> b h!", on)] == ["b"]


def test_parentheses_give_the_first_factor_a_unit() -> None:
    on = call((2, 12), (2, 3, 4))
    split = factors("b (h d) -> b h d", on)
    assert split == (
        Factor("b", 2, (Cut(0),), (Cut(0),)),
        Factor("h", 3, (Cut(1, 4),), (Cut(1),)),
    )
    merged = factors("b h d -> b (h d)", call((2, 3, 4), (2, 12)))
    assert merged[1] == Factor("h", 3, (Cut(1),), (Cut(1, 4),))
    three = factors("(a b c) -> a b c", call((24,), (2, 3, 4)))
    assert three == (Factor("a", 2, (Cut(0, 12),), (Cut(0),)),)


def test_one_extent_inside_parentheses_follows_from_the_others() -> None:
    on = call((12,), (4,))
    assert factors("(g d) -> g", on) == (Factor("g", 4, (Cut(0, 3),), (Cut(0),)),)


def test_ellipsis_names_dims_from_the_right() -> None:
    on = call((2, 3, 4), (4,), (2, 3))
    assert factors("... h, h -> ...", on) == (
        Factor("_1", 2, (Cut(0), None), (Cut(0),)),
        Factor("_0", 3, (Cut(1), None), (Cut(1),)),
        Factor("h", 4, (Cut(2), Cut(0)), (SUM,)),
    )
    assert [f.name for f in factors("... h, h -> ...", call((4,), (4,), ()))] == ["h"]


def test_scalars_extent_one_and_no_inputs() -> None:
    assert factors("b 1 -> b", call((6, 1), (6,))) == (Factor("b", 6, (Cut(0),), (Cut(0),)),)
    assert factors("a, -> a", call((6,), (), (6,))) == (Factor("a", 6, (Cut(0), None), (Cut(0),)),)
    assert factors("-> a b", call((2, 3))) == (Factor("a", 2, (), (Cut(0),)), Factor("b", 3, (), (Cut(1),)))
    assert factors("a ->", call((6,), ())) == (Factor("a", 6, (Cut(0),), (SUM,)),)


def test_several_outputs() -> None:
    on = call((6, 4), (6, 4), (6, 4), (4,), outs=2)
    assert factors("b h, b h -> b h, h", on) == (
        Factor("b", 6, (Cut(0), Cut(0)), (Cut(0), SUM)),
        Factor("h", 4, (Cut(1), Cut(1)), (Cut(1), Cut(0))),
    )


def test_an_empty_dim_and_a_bool_sum_give_no_factor() -> None:
    assert [f.name for f in factors("a b -> a b", call((0, 3), (0, 3)))] == ["b"]
    assert [f.name for f in factors("a b -> a", call((2, 3), (2,), dtype="bool"))] == ["a"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a b", "exactly one '->'"),
        ("a -> b -> c", "exactly one '->'"),
        ("((a b)) -> a b", "nested parentheses"),
        ("() -> a", r"'\)' without names"),
        ("a) -> a", r"'\)' without names"),
        ("(a b -> a b", r"'\(' is not closed"),
        ("... a ... -> a", "'...' once per term"),
        ("(a ...) -> a", "'...' once per term"),
        ("a + b -> a", r"unexpected '\+'"),
        ("2 a -> a", "unexpected '2'"),
        ("i i -> i", "'i' twice in one term; block it"),
        ("(i j) i -> j", "'i' twice in one term"),
    ],
)
def test_malformed_text(text: str, message: str) -> None:
    with pytest.raises(RuleError, match=message):
        check_annotation(text)
    with pytest.raises(RuleError, match=message):
        parse_annotation(text, call((2, 3), (2, 3)))


@pytest.mark.parametrize(
    ("text", "on", "message"),
    [
        ("a, a -> a", call((3,), (3,)), "has 2 inputs, the call 1"),
        ("a -> a, a", call((3,), (3,)), "has 2 outputs, the call 1"),
        ("a b -> a", call((3,), (3,)), r"does not fit a tensor of shape \[3\]"),
        ("a -> a", call((3, 2), (3, 2)), r"does not fit a tensor of shape \[3, 2\]"),
        ("a -> a", call((3,), (4,)), "a is 3, the tensor has 4"),
        ("a 1 -> a", call((3, 2), (3,)), "1 is 1, the tensor has 2"),
        ("(a b) -> a", call((7,), (3,)), "a b is 3, the tensor has 7"),
        ("(a b) -> 1", call((6,), (1,)), "cannot be told apart"),
    ],
)
def test_text_that_does_not_fit_the_call(text: str, on: Call, message: str) -> None:
    with pytest.raises(RuleError, match=message):
        parse_annotation(text, on)


def test_an_output_that_is_none_needs_a_function() -> None:
    on = Call("lib.op.default", (Ref(0),), {}, (TensorType((3,), "float32"),), (None,))
    with pytest.raises(RuleError, match="output that is None"):
        parse_annotation("a -> a", on)


def test_a_repeated_blocked_name_is_a_square_dim() -> None:
    assert [f.name for f in factors("b i! i! -> b i!", call((2, 3, 3), (2, 3)))] == ["b"]
