"""Explanations agree with the search: the chosen form is the cheapest, and no other form beats it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import hetspmd
from hetspmd.codec.quantities import seconds_text
from hetspmd.errors import ConstraintError, InfeasibleError
from hetspmd.optimize.compiler import plan_for
from hetspmd.optimize.explain import Alternative, Explanation, explain
from hetspmd.placement import REPLICATE, shard
from hetspmd.search.constraints import Constraints, named_tensors
from hetspmd.search.search import Limits

CLUSTER: dict[str, Any] = {
    "devices": [{"name": "a", "flops": 4e9}, {"name": "b", "count": 2, "flops": 1e9}],
    "network": {"bandwidth": 1e9, "latency": 1e-6},
}


class Classifier(nn.Module):
    """A hidden layer so wide that its gradient is dear to reduce."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(512, 4096)
        self.head = nn.Linear(4096, 6)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.head(torch.relu(self.hidden(x)))
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


def compiled(cluster: dict[str, Any] = CLUSTER, **options: Any) -> hetspmd.Plan:
    return hetspmd.compile(Classifier(), (torch.randn(8, 512), torch.randint(0, 6, (8,))), cluster, **options)


@pytest.fixture(scope="module")
def plan() -> hetspmd.Plan:
    return compiled()


def seconds(found: Explanation) -> dict[int, float | None]:
    return {a.form: a.seconds for a in found.alternatives}


@pytest.mark.parametrize("name", ["hidden.weight", "hidden.bias", "head.weight"])
def test_the_chosen_form_is_the_cheapest(plan: hetspmd.Plan, name: str) -> None:
    found = plan.explain(name)
    assert found == explain(plan, name)
    assert found.chosen == plan.parameter_layout()[name][0]
    dims = len(plan.graph.tensors[named_tensors(plan.theory)[name]].shape)
    assert {a.form for a in found.alternatives} == {REPLICATE, *map(shard, range(dims))}
    least = found.alternatives[0]
    assert least.seconds == pytest.approx(plan.search.lower_bound), "the certified optimum"
    # The simulation may prefer a program that is a little dearer in the additive model.
    assert plan.search.cost <= least.seconds * 1.001
    assert least.form == found.chosen
    assert least.lower_bound == pytest.approx(plan.search.lower_bound)
    assert least.step_seconds == pytest.approx(plan.cost.step_seconds, rel=1e-3)
    costs = [a.seconds for a in found.alternatives if a.seconds is not None]
    assert costs == sorted(costs)


def test_a_dear_layer_is_explained(plan: hetspmd.Plan) -> None:
    """Replicating the wide layer costs the all-reduce of its gradient."""
    found = plan.explain("hidden.weight")
    assert found.chosen != REPLICATE
    replicated = seconds(found)[REPLICATE]
    assert replicated is not None
    assert replicated > plan.search.cost * 1.05


@pytest.mark.parametrize("name", ["hidden.weight", "head.bias", "output[1]", "args[0]"])
def test_every_alternative_is_the_plan_forced_to_it(plan: hetspmd.Plan, name: str) -> None:
    tensor = named_tensors(plan.theory)[name]
    for a in plan.explain(name).alternatives:
        forced = Constraints({tensor: a.form})
        if a.seconds is None:
            with pytest.raises(InfeasibleError):
                plan_for(plan.theory, plan.cluster, forced, plan.ratios, active=plan.active)
            continue
        other = plan_for(plan.theory, plan.cluster, forced, plan.ratios, active=plan.active)
        assert other.lengths == plan.lengths
        assert a.seconds == pytest.approx(other.search.cost)
        assert a.step_seconds == pytest.approx(other.cost.step_seconds)
        assert a.lower_bound is not None
        assert a.lower_bound <= a.seconds


def test_text(plan: hetspmd.Plan) -> None:
    lines = str(plan.explain("hidden.weight")).splitlines()
    assert lines[0].startswith("hidden.weight (float32[4096, 512]): shard(")
    assert lines[1].split() == ["the", "best", "program", "with", "cost", "lower", "bound", "step"]
    assert [line[2] for line in lines[2:5]] == ["*", " ", " "]
    assert lines[2].endswith("the least")
    assert all(line.endswith(" more") for line in lines[3:5])
    assert lines[5:] == [
        "  *: the plan's form; cost: all computations and collectives, added up, at the plan's shares",
        lines[6],
    ]
    assert lines[6].startswith("  step: in the simulation, where this plan takes ")


def test_inputs_and_outputs(plan: hetspmd.Plan) -> None:
    """An input's form is the one in which the program reads it, an output's the one in which it is left."""
    x = plan.explain("args[0]")
    assert x.chosen is None or x.chosen in seconds(x)
    logits = plan.explain("output[1]")
    (result,) = (r for r in plan.program.outputs if r.tensor == named_tensors(plan.theory)["output[1]"])
    assert logits.chosen == result.form
    loss = plan.explain("output[0]")
    assert [(a.form, a.seconds) for a in loss.alternatives] == [
        (REPLICATE, pytest.approx(plan.search.lower_bound))
    ]
    assert loss.chosen == REPLICATE


@pytest.mark.parametrize("form", ["replicated", "shard(0)", "shard(1)"])
def test_the_chosen_form_of_an_input_is_how_it_is_read(form: str) -> None:
    made = compiled(constraints={"args[0]": form})
    found = made.explain("args[0]", constraints={"args[0]": form})
    assert found.chosen == {"replicated": REPLICATE, "shard(0)": shard(0), "shard(1)": shard(1)}[form]
    assert found.asked == "args[0]"
    assert f": {form}, as the constraint 'args[0]' asks\n" in str(found)


def test_under_constraints_other_tensors_keep_to_them(plan: hetspmd.Plan) -> None:
    constraints = {"hid*.weight": "shard(1)", "output[1]": "shard(0)"}
    made = compiled(constraints=constraints)
    assert made.active == (0, 1, 2)
    own = made.explain("hidden.weight", constraints=constraints)
    assert own.chosen == shard(1)
    assert own.asked == "hid*.weight"
    assert own.alternatives[0].form == shard(0), "what the constraint costs"
    assert seconds(own)[shard(1)] == pytest.approx(made.search.cost)
    assert "not of the least cost" not in str(own), "the title says who asked for it"
    bias = made.explain("hidden.bias", constraints=constraints)
    assert bias.asked is None
    assert bias.alternatives[0].form == bias.chosen
    assert bias.alternatives[0].seconds == pytest.approx(made.search.cost)
    assert made.explain("hidden.bias") == bias, "the plan knows its constraints"
    free = made.explain("hidden.bias", constraints={})
    least = free.alternatives[0].seconds
    assert least is not None
    assert least < made.search.cost * 0.99
    with pytest.raises(InfeasibleError, match="matches no parameter"):
        made.explain("hidden.bias", constraints={"hiddn.*": "replicated"})


def test_a_constraint_that_is_set_aside_is_noticed() -> None:
    made = compiled(constraints={"hidden.weight": "shard(1)"})
    found = made.explain("hidden.weight", constraints={})
    assert "the plan's form is not of the least cost" in str(found)


IDLE = {
    "devices": [{"name": "fast", "count": 2, "flops": 4e9}, {"name": "slow", "flops": 1e6, "launch": 1e-3}],
    "network": {"bandwidth": 1e9, "latency": 1e-6},
}


def test_idle_devices() -> None:
    made = compiled(IDLE)
    assert made.active == (0, 1)
    for name in ("hidden.weight", "head.weight", "args[0]"):
        found = made.explain(name)
        chosen = next(a for a in found.alternatives if a.form == found.chosen)
        assert chosen.seconds == pytest.approx(made.search.cost)
        assert chosen.step_seconds == pytest.approx(made.cost.step_seconds), (
            "with what the idle device is sent"
        )
        assert "on the active devices; idle: rank 2" in str(found)
    logits = made.explain("output[1]")
    steps = {a.form: a.step_seconds for a in logits.alternatives}
    whole, rows = steps[REPLICATE], steps[shard(0)]
    assert whole is not None
    assert rows is not None
    sending = 1e-6 + 8 * 6 * 4 / 1e9
    assert whole - rows >= sending * (1 - 1e-9), "rows need not be sent"


def test_steps_across_machines_are_compared_without_what_goes_on_inside() -> None:
    devices = [{"name": "m", "count": 2, "accelerators": 2, "flops": 1e9,
                "inside": {"bandwidth": 1e7, "latency": 1e-3}}]  # fmt: skip
    plan = compiled({**CLUSTER, "devices": devices}, machines="virtual")
    assert plan.inside is not None
    assert plan.inside.seconds > 1e-3 * plan.cost.step_seconds
    found = explain(plan, "head.weight")
    (own,) = (a for a in found.alternatives if a.form == found.chosen)
    assert own.step_seconds is not None
    across = plan.cost.step_seconds - plan.inside.seconds
    assert own.step_seconds <= across * (1 + 1e-9)
    assert f"this plan takes {seconds_text(across)}; what goes on inside machines" in str(found)


def test_one_active_device() -> None:
    """Nothing is communicated, so that no form is better than another."""
    cluster = {**IDLE, "devices": [{"flops": 4e9}, {"count": 2, "flops": 1e6, "launch": 1e-3}]}
    made = compiled(cluster)
    assert made.active == (0,)
    found = made.explain("hidden.weight")
    assert found.chosen == REPLICATE
    assert list(seconds(found).values()) == [pytest.approx(made.search.cost)] * 3
    assert str(found).count("the least") == 3
    assert "only rank 0 is active: nothing is divided" in str(found)


def test_a_form_that_no_program_has() -> None:
    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(4))

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return ((x + y) * self.w).sum()

    x = torch.zeros(4, 4)
    made = hetspmd.compile(Sum(), (x, x), CLUSTER, constraints={"args[[]0]": "shard(0)"})
    found = made.explain("args[1]", constraints={"args[0]": "shard(0)"})
    missing = [a for a in found.alternatives if a.seconds is None]
    assert missing == [
        Alternative(REPLICATE, None, None, None, "no program has it"),
        Alternative(shard(1), None, None, None, "no program has it"),
    ]
    assert found.alternatives[0].form == found.chosen == shard(0)
    assert str(found).count("no program has it") == 2
    assert found.document()["alternatives"] == [
        {"form": "shard(0)", "cost": made.search.cost, "lower_bound": made.search.lower_bound,
         "step_seconds": made.cost.step_seconds},
        {"form": "replicated", "cost": None, "lower_bound": None, "step_seconds": None},
        {"form": "shard(1)", "cost": None, "lower_bound": None, "step_seconds": None},
    ]  # fmt: skip


def test_limits_are_those_of_each_search(plan: hetspmd.Plan) -> None:
    found = plan.explain("hidden.weight", limits=Limits(seconds=0.0))
    for a in found.alternatives:
        if a.seconds is None:
            assert a.reason == "none found within the limits"
        else:
            assert a.lower_bound is not None
            assert a.lower_bound <= a.seconds


def test_unknown_names_are_refused(plan: hetspmd.Plan) -> None:
    with pytest.raises(ConstraintError, match=r"did you mean 'hidden\.weight'"):
        plan.explain("hiden.weight")
