"""Constraints: globs to forms, and every way in which they can be impossible."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import cost_graphs
import pytest
import torch
from small_models import MLP, case

import hetspmd.rules.ops  # noqa: F401  # registers the rules
from hetspmd.errors import InfeasibleError
from hetspmd.forms import ALL_REDUCE, IDENTITY, all_gather, is_sharded
from hetspmd.plan import Plan
from hetspmd.rules.rule import Row
from hetspmd.rules.theory import Theory
from hetspmd.synth.constraints import (
    Constraints,
    batch_axes,
    data_parallel,
    named_tensors,
    resolve,
    tensor_parallel,
    zero_like,
)
from hetspmd.synth.program import Communicate, Compute
from hetspmd.synth.space import search_space
from workbench import cluster

try:
    from hetspmd.compiler import compile_plan, plan_for
except ImportError:
    from hetspmd.compile import compile_plan, plan_for

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
        names["a.weight"]: all_gather(0), names["b.weight"]: all_gather(0), names["a.bias"]: IDENTITY,
        names["output[1]"]: all_gather(0), names["x"]: all_gather(0),
    }  # fmt: skip
    assert found.row_filter is None
    assert resolve(theory, None) == Constraints()


def test_all_names_of_a_tied_parameter_match_and_agree() -> None:
    theory = theory_of("attention")
    names = named_tensors(theory)
    assert names["tokens.weight"] == names["head.weight"]
    assert resolve(theory, {"head.weight": "shard(1)"}).forms == {names["tokens.weight"]: all_gather(1)}
    assert len(resolve(theory, {"head.*": "shard(1)", "tokens.*": "shard(1)"}).forms) == 1
    with pytest.raises(
        InfeasibleError, match=r"'head.weight' \(All-Gather\(1\)\) and 'tokens.weight' \(Identity\)"
    ):
        resolve(theory, {"head.weight": "shard(1)", "tokens.weight": "replicated"})


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (
            {"a.wieght": "shard(0)"},
            r"'a.wieght' matches no parameter, input or output; did you mean 'a.weight'\?",
        ),
        ({"zzz": "shard(0)"}, r"'zzz' matches no parameter, input or output$"),
        ({"a.weight": "sharded"}, r"constraint 'a.weight': .*sharded"),
        ({"a.weight": "partial"}, r"a.weight cannot be kept as summands; use replicated or shard\(d\)"),
        ({"a.weight": "shard(2)"}, r"a.weight has shape \[10, 6\]: there is no dim 2 to shard"),
        (
            {"unused": "shard(0)"},
            r"unused cannot be sharded along dim 0 \(shape \[3\]\): no rule of an op that reads it",
        ),
        ({"output[0]": "shard(0)"}, r"output\[0\] has shape \[\]: there is no dim 0"),
        (
            {"a.*": "shard(0)", "*.weight": "shard(1)"},
            r"'a.\*' \(All-Gather\(0\)\) and '\*.weight' \(All-Gather\(1\)\) both match a.weight; keep one",
        ),
    ],
)
def test_impossible_constraints_say_why(spec: dict[str, str], message: str) -> None:
    if any("[" in key for key in spec):
        spec = {key.replace("[", "[[]"): form for key, form in spec.items()}
    with pytest.raises(InfeasibleError, match=message):
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

    def nothing(instruction: int, row: Row, axis: int | None) -> bool:
        return instruction != target.id

    with pytest.raises(
        InfeasibleError, match=f"{target.name}: no triple is left; loosen the constraints on it"
    ):
        search_space(theory, Constraints({}, nothing))
    with pytest.raises(InfeasibleError, match=r"a.weight: no triple is left in the form All-Gather\(7\)"):
        search_space(theory, Constraints({names["a.weight"]: all_gather(7)}))


def test_constraints_that_no_program_satisfies() -> None:
    """Every triple by itself is allowed, together they are not: the loss is a sum over devices that nothing may
    reduce."""
    theory = theory_of("mlp")
    batch = batch_axes(theory)

    def allowed(instruction: int, row: Row, axis: int | None) -> bool:
        return theory.graph.instructions[instruction].is_source or axis in batch or ALL_REDUCE in row.pre

    with pytest.raises(InfeasibleError, match=r"no triple is left|no program satisfies the constraints"):
        planned("mlp", Constraints({}, allowed))


@pytest.mark.parametrize("name", ["mlp", "conv", "attention"])
def test_known_styles_mean_what_they_say(name: str) -> None:
    theory = theory_of(name)
    batch = batch_axes(theory)

    def divided(plan: Plan) -> set[int | None]:
        return {
            theory.row_axes[s.instruction][theory.rows[s.instruction].index(s.row)]
            for s in plan.program.steps
            if isinstance(s, Compute) and not theory.graph.instructions[s.instruction].is_source
        }

    replicated = planned(name, data_parallel(theory))
    assert divided(replicated) <= {None, *batch}
    assert all(form == IDENTITY for form, _ in replicated.parameter_layout().values())
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
    plan = compile_plan(model, (), batch, CLUSTER, constraints={"?.weight": form})
    wanted = {"replicated": IDENTITY, "shard(0)": all_gather(0), "shard(1)": all_gather(1)}[form]
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
    assert read == {all_gather(0) if batch else IDENTITY}


@pytest.mark.parametrize("form", ["replicated", "shard(0)", "shard(1)"])
def test_an_output_is_left_as_asked(form: str) -> None:
    theory = theory_of("mlp")
    plan = planned("mlp", resolve(theory, {"output[[]1]": form}))
    logits = named_tensors(theory)["output[1]"]
    (result,) = (r for r in plan.program.outputs if r.tensor == logits)
    wanted = {"replicated": IDENTITY, "shard(0)": all_gather(0), "shard(1)": all_gather(1)}[form]
    assert result.form == wanted
    provided = {s.target for s in plan.program.steps if isinstance(s, Communicate) and s.tensor == logits}
    produced = {
        f for s in plan.program.steps if isinstance(s, Compute)
        for t, f in zip(theory.graph.instructions[s.instruction].outputs, s.row.post, strict=True) if t == logits
    }  # fmt: skip
    assert wanted in provided | produced or IDENTITY in provided | produced
