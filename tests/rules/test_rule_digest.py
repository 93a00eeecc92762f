"""Digests tell rules apart by what they do, and ranks with unlike ones are told so."""

from __future__ import annotations

import subprocess
import sys
import types
from collections.abc import Iterator
from typing import Any, cast

import pytest
from small_plans import cluster

import hetspmd
from hetspmd.dist.communicator import Communicator
from hetspmd.dist.simulated_world import run_ranks
from hetspmd.errors import RuleError
from hetspmd.optimize.compile_options import CompileOptions
from hetspmd.rules.registry import rule_function, unregister
from hetspmd.rules.rule_digest import rule_digest, rule_digests
from hetspmd.run import same_options
from hetspmd.run.run_options import RunOptions

CODE = """
from hetspmd.rules.rule import Cut, Factor, OpRule

SIZE = 3

def shift(local):
    target, args, kwargs = local.default()
    return target, (args[0] + local.start,), kwargs

def made(unit=1):
    def rule(call):
        return OpRule((Factor("rows", call.inputs[0].shape[0] // unit, (Cut(0),), (Cut(0),)),), rewrite=shift)
    return rule

rule = made()

def sized(call):
    return SIZE, made(SIZE)
"""


def of(code: str, name: str = "rule") -> str:
    module = types.ModuleType("of_the_user")
    exec(code, vars(module))
    return rule_digest(getattr(module, name))


@pytest.mark.parametrize(
    ("name", "old", "new", "same"),
    [
        ("rule", "SIZE = 3", "SIZE = 3  # three", True),
        ("rule", "SIZE = 3", "SIZE = 4", True),  # which it does not read
        ("rule", "SIZE = 3", "SIZE = 3; start = 1", True),  # a variable that is called as an attribute is
        ("sized", "SIZE = 3", "SIZE = 4", False),
        ("rule", "+ local.start", "- local.start", False),  # in the function that rewrites
        ("rule", "made()", "made(2)", False),  # what it closes over
        ("sized", "unit=1", "unit=2", False),  # a default of one that it calls
        ("rule", "Cut(0),), (Cut(0)", "Cut(0),), (Cut(1)", False),
        ("rule", ", rewrite=shift", "", False),
    ],
)
def test_what_a_rule_does_counts(name: str, old: str, new: str, same: bool) -> None:
    assert old in CODE
    assert (of(CODE, name) == of(CODE.replace(old, new), name)) == same


@pytest.fixture
def registered() -> Iterator[None]:
    before = set(rule_digests())
    yield
    for op in set(rule_digests()) - before:
        unregister(op)


@pytest.mark.usefixtures("registered")
def test_annotations_and_functions_of_users_are_among_them() -> None:
    before = rule_digests()
    hetspmd.rule("digests::one", "a b -> a b")
    first = rule_digests().keys() - before.keys()
    assert first == {"digests.one.default"}
    one = rule_digests()["digests.one.default"]
    unregister("digests::one")
    hetspmd.rule("digests::one", "a! b -> a! b")
    assert rule_digests()["digests.one.default"] != one
    unregister("digests::one")
    hetspmd.rule("digests::one", "a b -> a b", linear=[[0]])
    assert rule_digests()["digests.one.default"] != one
    assert "aten.mm.default" not in rule_digests(), "hetspmd's own"
    assert rule_function("aten.mm.default") is not None


def test_they_are_the_same_in_every_process() -> None:
    code = (
        "import hetspmd; from hetspmd.rules.rule_digest import rule_digests;"
        "hetspmd.rule('digests::two', 'a b, b -> a b', linear=[[0, 1]]); print(rule_digests())"
    )
    run = [
        subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            check=True,
            timeout=120,
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
        ).stdout
        for seed in ("1", "2")
    ]
    assert run[0] == run[1]
    assert "digests.two.default" in run[0]


Told = list[tuple[str, dict[str, str]]]


@pytest.mark.parametrize(
    ("told", "said"),
    [
        ([("3.11", {"op": "a"}), ("3.11", {"op": "a"})], ""),
        ([("3.11", {"op": "a"}), ("3.12", {"op": "b"})], ""),
        ([("3.11", {"op": "a"}), ("3.11", {"op": "b"})], "rank 1 has another rule of op than rank 0"),
        ([("3.11", {"op": "a"}), ("3.12", {"op": "b"}), ("3.12", {"op": "c"})], "rank 2 has another rule"),
        (
            [("3.11", {}), ("3.11", {"op": "a"}), ("3.12", {"op": "b"})],
            "on ranks 1 and 2, and none on rank 0",
        ),
    ],
)
def test_ranks_with_unlike_rules_are_told_so(told: Told, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def body(communicator: Communicator) -> str:
        rank = communicator.rank

        class Own:
            """The communicator, by which this rank says what it has."""

            def exchange(self, value: tuple[Any, str, dict[str, str]]) -> Any:
                return communicator.exchange((value[0], *told[rank]))

        try:
            same_options.check_same_options(
                cast(Communicator, Own()),
                cluster(*[1] * len(told)),
                RunOptions(),
                CompileOptions(),
                with_plan=False,
            )
        except RuleError as error:
            return str(error)
        return ""

    texts = set(run_ranks(len(told), body))
    assert len(texts) == 1
    (text,) = texts
    assert bool(text) == bool(said)
    assert said in text
