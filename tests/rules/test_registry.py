"""Registering, finding and removing rules."""

from __future__ import annotations

import pytest

from hetspmd.errors import RuleError
from hetspmd.rules import registry
from hetspmd.rules.rule import Call, Cut, Factor, Local, LocalCall, OpRule, TensorType
from hetspmd.trace.graph import Ref


@pytest.fixture(autouse=True)
def _own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_RULES", {})
    monkeypatch.setattr(registry, "_FAMILIES", [])


def call(op: str) -> Call:
    return Call(op, (Ref(0),), {}, (TensorType((6,), "float32"),), (TensorType((6,), "float32"),))


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("lib::op", "lib.op.default"),
        ("lib::op.out", "lib.op.out"),
        ("lib.op.out", "lib.op.out"),
        ("lib.op", "lib.op.default"),
    ],
)
def test_op_names(given: str, name: str) -> None:
    assert registry.op_name(given) == name


@pytest.mark.parametrize("given", ["op", "", "a.b.c.d", "lib::", "::op", "a..b"])
def test_bad_op_names(given: str) -> None:
    with pytest.raises(RuleError, match="is no op name; write namespace::op"):
        registry.op_name(given)


def test_a_function_serves_several_ops() -> None:
    @registry.rule("lib::b", "lib::a")
    def found(_: Call) -> OpRule:
        return OpRule(alias=True)

    assert registry.registered() == ("lib.a.default", "lib.b.default")
    assert registry.rule_function("lib.a.default") is found
    assert registry.rule_for(call("lib.b.default")) == OpRule(alias=True)
    assert registry.rule_for(call("lib.c.default")) is None


def test_an_annotation_carries_linear_sets_and_a_rewrite() -> None:
    def rewrite(local: Local) -> LocalCall:
        return local.default()

    registry.rule("lib::op", "a -> a", linear=[[0]], rewrite=rewrite)
    rule = registry.rule_for(call("lib.op.default"))
    assert rule == OpRule((Factor("a", 6, (Cut(0),), (Cut(0),)),), linear=(frozenset({0}),), rewrite=rewrite)


def test_a_malformed_annotation_is_rejected_at_registration() -> None:
    with pytest.raises(RuleError, match="is not closed"):
        registry.rule("lib::op", "(a b -> a b")
    assert registry.registered() == ()


def test_duplicates_are_rejected_whatever_the_spelling() -> None:
    registry.rule("lib::op", "a -> a")
    with pytest.raises(RuleError, match=r"lib\.op\.default has a rule already; remove it first"):
        registry.rule("lib.op.default", "a -> a")


def test_unregister() -> None:
    registry.rule("lib::op", "a -> a")
    registry.unregister("lib::op")
    assert registry.rule_function("lib.op.default") is None
    with pytest.raises(RuleError, match=r"lib\.op\.default has no rule of its own"):
        registry.unregister("lib::op")
    registry.rule("lib::op", "a -> a")


def test_a_family_serves_ops_without_a_rule_of_their_own() -> None:
    registry.family("one", lambda op: op.startswith("lib."), lambda _: OpRule(alias=True))
    registry.family("two", lambda op: op.startswith(("lib.", "other.")), lambda _: OpRule(random=True))
    assert registry.rule_for(call("lib.x.default")) == OpRule(alias=True)  # the first family that fits
    assert registry.rule_for(call("other.x.default")) == OpRule(random=True)
    registry.rule("lib::x", "a -> a")
    own = registry.rule_for(call("lib.x.default"))
    assert own is not None
    assert [f.name for f in own.factors] == ["a"]
    assert registry.registered() == ("lib.x.default",)
    with pytest.raises(RuleError, match="the family 'one' is registered already"):
        registry.family("one", lambda _: True, lambda _: OpRule())


def test_a_rule_that_does_not_fit_is_an_error_not_an_answer() -> None:
    @registry.rule("lib::op")
    def _(_: Call) -> OpRule:
        return OpRule((Factor("a", 5, (Cut(0),), (Cut(0),)),))

    with pytest.raises(RuleError, match="5 units of 1, but dim 0 of input 0 has 6"):
        registry.rule_for(call("lib.op.default"))
