"""The rows of its inputs that a rank needs: with other rows in place of the rest every rank computes the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from machine_plans import busy_machines, machine_plan
from program_builder import divided_in_the_loop
from ranks import loss_of, on_ranks
from small_models import Case, case
from small_plans import cluster, random_plan, segmented_in_turns, segmented_plan

import hetspmd
from hetspmd.lower.input_rows import input_rows, merged
from hetspmd.optimize.compiler import plan_for
from hetspmd.optimize.in_micro_batches import in_micro_batches
from hetspmd.plan.plan import Plan
from hetspmd.program.micro_batches import in_own_turns
from hetspmd.run.module import HAP
from hetspmd.search import constraints as known


def spoiled(batch: dict[str, torch.Tensor], plan: Plan, rank: int) -> dict[str, torch.Tensor]:
    """The batch with another row in the place of each row that the rank does not need."""
    needed = input_rows(plan, rank)
    paths = [i.path for i in plan.graph.inputs]
    result = {}
    for name, tensor in batch.items():
        (rows,) = [r for r, path in zip(needed.rows, paths, strict=True) if name in path]
        kept = {row for start, stop in rows for row in range(start, stop)}
        result[name] = tensor.clone()
        for row in range(len(tensor)):
            if row not in kept:
                result[name][row] = tensor[(row + 1) % len(tensor)]
    return result


def results(hap: HAP, batch: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    loss = loss_of(hap(**batch))
    loss.backward()
    return [loss.detach(), *hap.full_gradients().values()]


def check(c: Case, plan: Plan) -> int:
    """The number of rows that are not needed, over all ranks and inputs."""

    def rank(hap: HAP, batch: Any) -> list[torch.Tensor]:
        return results(hap, batch(hap.rank))

    options: dict[str, Any] = {"check_batches": False}
    want = on_ranks(c, plan, lambda hap: rank(hap, lambda _: c.batch), **options)
    got = on_ranks(c, plan, lambda hap: rank(hap, lambda r: spoiled(c.batch, plan, r)), **options)
    for mine, whole in zip(got, want, strict=True):
        for a, b in zip(mine, whole, strict=True):
            torch.testing.assert_close(a, b, rtol=0.0, atol=0.0)
    spared = 0
    for rank in range(plan.cluster.ranks):
        for rows, i in zip(input_rows(plan, rank).rows, plan.graph.inputs, strict=True):
            spared += plan.graph.tensors[i.tensor].shape[0] - sum(b - a for a, b in rows)
    return spared


@pytest.mark.parametrize("name", ["mlp", "conv", "residual", "attention"])
def test_random_programs(name: str) -> None:
    options = {"dropout": 0.0} if name == "attention" else {}
    c = case(name, **options)
    assert sum(check(c, random_plan(c, 3, seed)) for seed in range(6)) > 0


def test_segments() -> None:
    c = case("mlp")
    assert check(c, segmented_plan(c, 3)) > 0


@pytest.mark.parametrize("name", ["mlp", "attention"])
@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.filterwarnings("ignore::hetspmd.errors.DroppedOutputWarning")
def test_compiled_plans(name: str, parts: int) -> None:
    """Of a plan that divides the batch no rank needs all."""
    c = case(name, **({"dropout": 0.0} if name == "attention" else {}))
    plan = hetspmd.compile(c.model, c.batch, cluster(3, 2, 1), micro_batches=parts)
    check(c, plan)


@pytest.mark.parametrize("name", ["mlp", "attention"])
@pytest.mark.filterwarnings("ignore::hetspmd.errors.DroppedOutputWarning")
def test_turns_of_their_own(name: str) -> None:
    """A device needs its rows of all of its turns, and no others."""
    c = case(name, **({"dropout": 0.0} if name == "attention" else {}))
    theory, batches = in_micro_batches(c.theory, 2)
    assert batches is not None
    own = in_own_turns(theory, batches, (1, 3, 2))
    plan = plan_for(theory, cluster(3, 2, 1), divided_in_the_loop(theory, 0), (0.5, 0.3, 0.2), batches=own)
    assert check(c, plan) > 0


@pytest.mark.parametrize("name", ["mlp", "attention"])
@pytest.mark.filterwarnings("ignore::hetspmd.errors.DroppedOutputWarning")
def test_segments_in_micro_batches(name: str) -> None:
    c = case(name, **({"dropout": 0.0} if name == "attention" else {}))
    assert check(c, segmented_in_turns(c, 3)) > 0


def test_an_idle_rank_needs_nothing() -> None:
    c = case("mlp")
    plan = hetspmd.compile(c.model, c.batch, cluster(1000, 1, 1))
    assert plan.idle
    for rank in plan.idle:
        assert input_rows(plan, rank).rows == ((), ())


def test_merged() -> None:
    assert merged([(3, 5), (0, 2), (2, 3), (7, 7), (8, 9)]) == ((0, 5), (8, 9))


@pytest.mark.parametrize("seed", range(4))
def test_accelerators_of_machines(seed: int) -> None:
    c = case("mlp")
    check(c, machine_plan(c, (2, 1, 2), seed))


@pytest.mark.parametrize("kind", ["data parallel", "tensor parallel"])
@pytest.mark.parametrize("name", ["mlp", pytest.param("attention", marks=pytest.mark.slow)])
@pytest.mark.filterwarnings("ignore::hetspmd.errors.DroppedOutputWarning")
def test_accelerators_of_machines_in_micro_batches(name: str, kind: str) -> None:
    """An accelerator needs its rows of its machine's rows of each micro-batch."""
    c = case(name, **({"dropout": 0.0} if name == "attention" else {}))
    theory, batches = in_micro_batches(c.theory, 2)
    asked = {"data parallel": known.data_parallel, "tensor parallel": known.tensor_parallel}[kind](theory)
    plan = plan_for(theory, busy_machines(2, 3), asked, (0.5, 0.5), batches=batches)
    assert plan.inside is not None
    assert check(c, plan) > 0
