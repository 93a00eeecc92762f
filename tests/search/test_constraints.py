"""Constraints: globs to forms, and every way in which they can be impossible."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import cost_graphs
import pytest
import torch
from small_models import MLP, case

import hetspmd.rules.ops  # noqa: F401  # registers the rules
from hetspmd.errors import ConstraintError, InfeasibleError
from hetspmd.optimize.compile_options import CompileOptions
from hetspmd.optimize.compiler import compile_plan, plan_for
from hetspmd.placement import PARTIAL, REPLICATE, is_sharded, shard
from hetspmd.plan.plan import Plan
from hetspmd.program.program import Communicate, Compute
from hetspmd.rules.rule import Triple
from hetspmd.rules.theory import Theory
from hetspmd.search.constraints import (
    ConstraintOrigin,
    Constraints,
    data_parallel,
    named_tensors,
    parse_wanted,
    resolve,
    spelling,
    tensor_parallel,
    zero_like,
)
from hetspmd.search.space import search_space
from workbench import cluster

RATIOS = (0.5, 0.25, 0.25)
CLUSTER = cluster(2, 1, 1)


@cache
def theory_of(name: str) -> Theory:
    return case(name).theory


def planned(name: str, constraints: Constraints) -> Plan:
    return plan_for(theory_of(name), CLUSTER, constraints, RATIOS)


def test_globs_match_parameters_inputs_and_outputs() -> None:
    theory = theory_of("mlp")
    names = named_tensors(theory)
    assert set(names) == {
        "a.weight", "a.bias", "b.weight", "b.bias", "scale", "unused", "x", "labels", "output[0]", "output[1]"
    }  # fmt: skip
    found = resolve(
        theory, {"?.weight": "shard(0)", "a.bias": "replicated", "output[[]1]": "shard(0)", "x": 2}
    )
    assert found.forms == {
        names["a.weight"]: shard(0), names["b.weight"]: shard(0), names["a.bias"]: REPLICATE,
        names["output[1]"]: shard(0), names["x"]: shard(0),
    }  # fmt: skip
    assert found.row_filter is None
    assert found.origins[names["b.weight"]] == ConstraintOrigin("?.weight", "b.weight")
    assert str(found.origins[names["b.weight"]]) == "b.weight (by '?.weight')"
    assert str(found.origins[names["x"]]) == "x"
    assert resolve(theory, None) == resolve(theory, {}) == Constraints()


@pytest.mark.parametrize("pattern", ["output[1]", "output[[]1]", "out*1?", "output[[][1-9]]"])
def test_brackets_stand_for_themselves_or_for_a_set(pattern: str) -> None:
    theory = theory_of("mlp")
    names = named_tensors(theory)
    assert resolve(theory, {pattern: "shard(0)"}).forms == {names["output[1]"]: shard(0)}
    assert resolve(theory, {"output[*]": "replicated"}).forms == {
        names["output[0]"]: REPLICATE, names["output[1]"]: REPLICATE,
    }  # fmt: skip
    assert resolve(theory, {"[ab].weight": "replicated"}).forms == {
        names["a.weight"]: REPLICATE, names["b.weight"]: REPLICATE,
    }  # fmt: skip


@pytest.mark.parametrize("form", [REPLICATE, PARTIAL, shard(0), shard(3)])
def test_spelling(form: int) -> None:
    assert parse_wanted(spelling(form)) == form
    assert parse_wanted(f" {spelling(form).upper()} ") == form


def test_all_names_of_a_tied_parameter_match_and_agree() -> None:
    theory = theory_of("attention")
    names = named_tensors(theory)
    assert names["tokens.weight"] == names["head.weight"]
    assert resolve(theory, {"head.weight": "shard(1)"}).forms == {names["tokens.weight"]: shard(1)}
    assert len(resolve(theory, {"head.*": "shard(1)", "tokens.*": "shard(1)"}).forms) == 1
    with pytest.raises(
        InfeasibleError,
        match=r"'head.weight' \(shard\(1\)\) and 'tokens.weight' \(replicated\) both match head.weight and "
        "tokens.weight, which are one tensor; keep one",
    ):
        resolve(theory, {"head.weight": "shard(1)", "tokens.weight": "replicated"})


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (
            {"a.wieght": "shard(0)"},
            r"'a.wieght' matches no parameter, input or output; did you mean 'a.weight'\?",
        ),
        ({"weight": "shard(0)"}, r"matches no parameter, input or output; did you mean '\*\.weight'\?"),
        ({"*.biass": "shard(0)"}, r"matches no parameter, input or output; did you mean '.\.bias'\?"),
        (
            {"zzz": "shard(0)"},
            r"'zzz' matches no parameter, input or output; there are scale, unused, a.weight, \.\.\.$",
        ),
        ({"": "shard(0)"}, r"constraint '' matches no parameter, input or output; there are "),
        (
            {"a.weight": "sharded"},
            r"constraint 'a.weight': 'sharded' is no placement; write replicated or shard\(d\), such as",
        ),
        ({"a.weight": "shard(-1)"}, r"'shard\(-1\)' is no placement; .*; dims count from 0$"),
        ({"a.weight": ""}, r"constraint 'a.weight': '' is no placement"),
        ({"a.weight": "partial"}, r"a.weight cannot be kept as summands; use replicated or shard\(d\)"),
        ({"a.weight": "shard(2)"}, r"a.weight has shape \[10, 6\]: there is no dim 2 to shard"),
        (
            {"unused": "shard(0)"},
            r"unused cannot be sharded along dim 0 \(shape \[3\]\): no rule of an op that reads it",
        ),
        ({"output[0]": "shard(0)"}, r"^output\[0\] has shape \[\]: there is no dim 0"),
        (
            {"?.bias": "shard(1)"},
            r"^constraint '\?.bias': a.bias has shape \[10\]: there is no dim 1 to shard; it fits 0 of the 2",
        ),
        (
            {"a.*": "shard(0)", "*.weight": "shard(1)"},
            r"'a.\*' \(shard\(0\)\) and '\*.weight' \(shard\(1\)\) both match a.weight; keep one",
        ),
    ],
)
def test_impossible_constraints_say_why(spec: dict[str, str], message: str) -> None:
    with pytest.raises(InfeasibleError, match=message):
        resolve(theory_of("mlp"), spec)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (["a.weight"], "constraints are a list; give a dict of names to forms"),
        ("a.weight", "constraints are a str; give a dict"),
        ({3: "shard(0)"}, "the constraint 3 is no name or glob; write a string"),
        ({"a.weight": None}, r"constraint 'a.weight': None is no placement; write replicated or shard\(d\)"),
        ({"a.weight": 1.5}, "constraint 'a.weight': 1.5 is no placement"),
        ({"a.weight": True}, "constraint 'a.weight': True is no placement"),
        ({"a.weight": -1}, "constraint 'a.weight': -1 is no placement"),
        ({"a.weight": ("shard", 0)}, r"constraint 'a.weight': \('shard', 0\) is no placement"),
    ],
)
def test_what_is_no_constraint_is_refused(spec: Any, message: str) -> None:
    with pytest.raises(ConstraintError, match=message):
        resolve(theory_of("mlp"), spec)


def test_a_dim_of_one_unit_is_indivisible() -> None:
    b = cost_graphs.Builder()
    x = b.input("x", (8, 4))
    w = b.parameter("w", (4, 3))
    theory = b.theory(b.mm("y", "bk,kn->bn", x, w, {"b": 8, "k": 4, "n": 3}), {})
    (axis,) = (a for a in theory.axes.axes if (w, 1) in a.members)
    narrow = replace(
        theory.axes, axes=tuple(replace(a, units=1) if a is axis else a for a in theory.axes.axes)
    )
    with pytest.raises(
        InfeasibleError, match=r"w cannot be sharded along dim 1 .*: it is one indivisible unit"
    ):
        resolve(replace(theory, axes=narrow), {"w": "shard(1)"})


def test_a_space_without_a_triple_names_the_instruction() -> None:
    theory = theory_of("mlp")
    names = named_tensors(theory)
    target = next(i for i in theory.graph.instructions if i.op == "aten.relu.default")

    def nothing(instruction: int, row: Triple, axis: int | None) -> bool:
        return instruction != target.id

    with pytest.raises(
        InfeasibleError, match=f"{target.name}: no triple is left; loosen the constraints on it"
    ):
        search_space(theory, Constraints({}, nothing))
    with pytest.raises(InfeasibleError, match=r"a.weight: no triple is left in the form shard\(7\)"):
        search_space(theory, Constraints({names["a.weight"]: shard(7)}))


def test_constraints_that_no_program_satisfies() -> None:
    """Every triple by itself is allowed, together they are not: the loss is a sum over devices that nothing may
    reduce."""
    theory = theory_of("mlp")
    batch = theory.batch_axes

    def allowed(instruction: int, row: Triple, axis: int | None) -> bool:
        return theory.graph.instructions[instruction].is_source or axis in batch or PARTIAL in row.pre

    with pytest.raises(InfeasibleError, match=r"no triple is left|no program satisfies the constraints"):
        planned("mlp", Constraints({}, allowed))


@pytest.mark.parametrize("name", ["mlp", "conv", "attention"])
def test_known_styles_mean_what_they_say(name: str) -> None:
    theory = theory_of(name)
    batch = theory.batch_axes

    def divided(plan: Plan) -> set[int | None]:
        return {
            theory.row_axes[s.instruction][theory.rows[s.instruction].index(s.row)]
            for s in plan.program.steps
            if isinstance(s, Compute) and not theory.graph.instructions[s.instruction].is_source
        }

    replicated = planned(name, data_parallel(theory))
    assert divided(replicated) <= {None, *batch}
    assert all(form == REPLICATE for form, _ in replicated.parameter_layout().values())
    zero = planned(name, zero_like(theory))
    assert divided(zero) <= {None, *batch}
    assert sum(is_sharded(form) for form, _ in zero.parameter_layout().values()) >= 4
    megatron = planned(name, tensor_parallel(theory))
    assert not divided(megatron) & batch
    assert len(divided(megatron)) > 1
    assert replicated.search.cost >= planned(name, Constraints()).search.cost


@pytest.mark.parametrize("form", ["replicated", "shard(0)", "shard(1)"])
def test_a_parameter_is_stored_as_asked(form: str) -> None:
    model, batch = MLP(), case("mlp", torch.float32).batch
    plan = compile_plan(model, (), batch, CLUSTER, CompileOptions(constraints={"?.weight": form}))
    wanted = {"replicated": REPLICATE, "shard(0)": shard(0), "shard(1)": shard(1)}[form]
    layout = plan.parameter_layout()
    assert layout["a.weight"][0] == layout["b.weight"][0] == wanted


@pytest.mark.parametrize(("form", "batch"), [("shard(0)", True), ("replicated", False)])
def test_an_input_is_read_as_asked(form: str, batch: bool) -> None:
    theory = theory_of("mlp")
    plan = planned("mlp", resolve(theory, {"x": form}))
    x = named_tensors(theory)["x"]
    read = {
        f for s in plan.program.steps if isinstance(s, Compute)
        for t, f in zip(theory.graph.instructions[s.instruction].inputs, s.row.pre, strict=True) if t == x
    }  # fmt: skip
    assert read == {shard(0) if batch else REPLICATE}


@pytest.mark.parametrize("speeds", [(2, 1, 1), (1000, 1, 1)])
@pytest.mark.parametrize("form", ["replicated", "shard(0)", "shard(1)"])
def test_a_plan_reads_its_inputs_as_asked(form: str, speeds: tuple[int, ...]) -> None:
    """Also where one device alone is best, which divides nothing else."""
    batch = case("mlp", torch.float32).batch
    devices = cluster(*speeds, fast=speeds[0] == 2)
    plan = compile_plan(MLP(), (), batch, devices, CompileOptions(constraints={"x": form}))
    assert plan.active == ((0, 1, 2) if speeds[0] == 2 else (0,))
    wanted = {"replicated": REPLICATE, "shard(0)": shard(0), "shard(1)": shard(1)}[form]
    assert plan.explain("x").chosen == wanted


@pytest.mark.parametrize("form", ["replicated", "shard(0)", "shard(1)"])
def test_an_output_is_left_as_asked(form: str) -> None:
    theory = theory_of("mlp")
    plan = planned("mlp", resolve(theory, {"output[[]1]": form}))
    logits = named_tensors(theory)["output[1]"]
    (result,) = (r for r in plan.program.outputs if r.tensor == logits)
    wanted = {"replicated": REPLICATE, "shard(0)": shard(0), "shard(1)": shard(1)}[form]
    assert result.form == wanted
    provided = {s.target for s in plan.program.steps if isinstance(s, Communicate) and s.tensor == logits}
    produced = {
        f for s in plan.program.steps if isinstance(s, Compute)
        for t, f in zip(theory.graph.instructions[s.instruction].outputs, s.row.post, strict=True) if t == logits
    }  # fmt: skip
    assert wanted in provided | produced or REPLICATE in provided | produced
