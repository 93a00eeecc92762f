"""HAP refuses what it cannot do, on every rank, before anything has changed."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace
from typing import Any

import pytest
import torch
from ranks import lone, on_ranks
from small_models import MLP, Attention, Branches, case
from small_plans import cluster, random_plan
from torch import nn

from hetspmd.dist.communicator import Communicator
from hetspmd.dist.simulated_world import run_ranks
from hetspmd.errors import (
    BatchMismatchError,
    DeviceError,
    ExampleError,
    OptionError,
    PlanMismatchError,
    RankFailedError,
    ShardError,
    TraceError,
    WorldSizeError,
)  # fmt: skip
from hetspmd.optimize.compiler import plan_for
from hetspmd.run.module import HAP
from hetspmd.search import constraints as known


def test_a_batch_that_cannot_be_planned_for() -> None:
    c = case("mlp")
    hap = lone(c)
    with pytest.raises(BatchMismatchError, match="x is float64"):
        hap(x=torch.zeros(9, 7, dtype=torch.float64), labels=c.batch["labels"])
    with pytest.raises(BatchMismatchError, match="keyword arguments"):
        hap(x=c.batch["x"])
    with pytest.raises(BatchMismatchError, match="requires a gradient"):
        hap(x=c.batch["x"].clone().requires_grad_(), labels=c.batch["labels"])


def test_world_size_is_checked_before_anything_else() -> None:
    model = MLP()
    before = [p.data_ptr() for p in model.parameters()]
    with pytest.raises(WorldSizeError, match="cluster has 3 devices, the process group 1"):
        HAP(model, cluster(1, 1, 1), example={"nonsense": 1})
    assert [p.data_ptr() for p in model.parameters()] == before


@pytest.mark.parametrize(
    ("given", "meant"), [("compiled", "compile"), ("constraint", "constraints"), ("exampel", "example")]
)
def test_an_argument_that_there_is_not_is_named_before_anything_else(given: str, meant: str) -> None:
    arguments: dict[str, Any] = {given: True}
    with pytest.raises(OptionError, match=f"there is no argument '{given}'; did you mean '{meant}'\\?"):
        HAP(MLP(), "missing.yaml", **arguments)
    with pytest.raises(OptionError, match=r"there is no argument 'zzz'$"):
        HAP(MLP(), "missing.yaml", zzz=1)


def test_ranks_with_different_plans_are_told() -> None:
    c = case("mlp")
    plans = [random_plan(c, 3, seed) for seed in (2, 2, 4)]

    def body(communicator: Communicator) -> str:
        plan = plans[communicator.rank]
        with pytest.raises(PlanMismatchError, match=r"on ranks \[0, 1\].*on ranks \[2\]") as caught:
            HAP(MLP().double(), plan.cluster, plan=plan, process_group=communicator)
        return str(caught.value)

    assert len(set(run_ranks(3, body))) == 1


def test_rank_zeros_error_is_raised_everywhere() -> None:
    def body(communicator: Communicator) -> str:
        with pytest.raises(TraceError) as caught:
            HAP(Branches(), cluster(1, 1), example=(torch.ones(3),), process_group=communicator)
        return str(caught.value)

    messages = run_ranks(2, body)
    assert messages[0] == messages[1]


def test_a_plan_for_another_model_or_cluster() -> None:
    c = case("mlp")
    plan = random_plan(c, 1, 0)
    with pytest.raises(PlanMismatchError, match=r"scale: float64\[10\], this one has float32\[10\]"):
        HAP(MLP(), plan.cluster, plan=plan)
    with pytest.raises(PlanMismatchError, match="does not have it"):
        HAP(Attention().double(), plan.cluster, plan=plan)
    with pytest.raises(PlanMismatchError, match="another cluster"):
        HAP(copy.deepcopy(c.model), cluster(7), plan=plan)


def test_a_model_on_two_devices() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    with pytest.raises(DeviceError, match="several devices"):
        HAP(model, cluster(1), example=(torch.zeros(1, 2),))


def test_neither_plan_nor_example() -> None:
    with pytest.raises(ExampleError, match="example="):
        HAP(MLP(), cluster(1))


def test_it_cannot_be_pickled() -> None:
    hap = lone(case("mlp"))
    with pytest.raises(ShardError, match="full_state_dict"):
        pickle.dumps(hap)


def test_ranks_with_batches_of_their_own_are_refused() -> None:
    """A loader that still deals out rows, as for DistributedDataParallel, must not train silently wrong."""
    c = case("mlp")
    plan = random_plan(c, 3, 1)

    def body(hap: HAP) -> str:
        batch = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in c.batch.items()}
        if hap.rank == 2:
            batch["x"] = batch["x"] + 1
        with pytest.raises(BatchMismatchError) as caught:
            hap(**batch)
        return str(caught.value)

    for message in on_ranks(c, plan, body):
        assert "rank 2 was given another x than ranks 0 and 1" in message
        assert "same global batch" in message


def test_a_rank_that_fails_while_outputs_are_handed_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The program itself is through; the error names the output."""
    c = case("mlp")
    plan = plan_for(c.theory, cluster(1, 2), known.data_parallel(c.theory), (1 / 3, 2 / 3))
    names = {plan.graph.tensors[o.tensor].name for o in plan.graph.outputs if o.tensor is not None}

    def body(communicator: Communicator) -> str:
        hap = HAP(
            copy.deepcopy(c.model), plan.cluster, plan=plan, process_group=communicator, gather_outputs=True
        )
        hap(**c.batch)
        runner = hap._plans.entries[0].runner
        forward = runner.program.forward

        def lost(*_: object) -> None:
            raise RankFailedError((1,), "rank 1 has died", communicator.rank, 1.0)

        def then_lose(*args: object) -> object:
            done = forward(*args)
            monkeypatch.setattr(hap.everyone, "all_gather", lost)
            return done

        runner.program = replace(runner.program, forward=then_lose)
        with pytest.raises(RankFailedError, match="in output") as caught:
            hap(**c.batch)
        return caught.value.where

    for where in run_ranks(2, body):
        assert any(where == f"output {name} of the step" for name in names)
