"""No other wrapper is put around a HAP module: it would take shards for the whole."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import lone, loss_of, on_ranks
from small_models import Case, case
from small_plans import cluster, random_plan
from torch import nn
from torch.optim.swa_utils import AveragedModel

from hetspmd.errors import ExampleError, ShardError
from hetspmd.optimize.compiler import plan_for
from hetspmd.plan.plan import Plan
from hetspmd.run.module import HAP
from hetspmd.search.constraints import Constraints

WRAPPERS: list[Callable[[nn.Module], Any]] = [
    nn.parallel.DistributedDataParallel, nn.DataParallel, lambda m: nn.parallel.DistributedDataParallel(module=m),
]  # fmt: skip


def test_ddp_and_data_parallel_are_refused() -> None:
    """Also of a module that holds the HAP module, and of the model inside it."""
    c = case("mlp")

    def body(hap: HAP) -> list[str]:
        told = []
        for wrap in WRAPPERS:
            for module in (hap, hap.module, nn.Sequential(hap), nn.ModuleDict({"model": hap})):
                with pytest.raises(
                    ShardError, match=r"Parallel around a HAP module.*hetspmd\.hide_ranks"
                ) as e:
                    wrap(module)
                assert ("CUDA_VISIBLE_DEVICES" in str(e.value)) == (wrap is nn.DataParallel)
                told.append(str(e.value))
        loss_of(hap(**c.batch)).backward()
        return told

    first, *others = on_ranks(c, random_plan(c, 3, 2), body)
    assert all(told == first for told in others)


def idle_plans(c: Case) -> list[Plan]:
    """One active device of two, and two of three: where an active rank may hold the whole of all or some."""
    lone_plan = plan_for(c.theory, cluster(1, 3), Constraints({}), (1.0,), active=(1,))
    return [lone_plan, plan_for(c.theory, cluster(3, 1, 2), Constraints({}), (0.6, 0.4), active=(0, 2))]


@pytest.mark.parametrize("which", [0, 1])
def test_every_rank_refuses_alike(which: int) -> None:
    """Also one that holds the whole: of a part of the model, and an average that was made before."""
    c = case("mlp")
    plan = idle_plans(c)[which]
    assert plan.idle
    averages = [AveragedModel(copy.deepcopy(c.model)) for _ in range(3)]

    def body(hap: HAP) -> list[str]:
        told = []
        parts = [hap.module.get_submodule("a"), nn.ModuleList([hap.module.get_submodule("b")])]
        for act in (
            *(lambda m=m: nn.DataParallel(m) for m in parts),
            lambda: nn.parallel.DistributedDataParallel(parts[0]),
            lambda: averages[hap.rank].update_parameters(hap),
            lambda: averages[hap.rank].update_parameters(hap.module),
        ):
            with pytest.raises(ShardError) as e:
                act()
            told.append(str(e.value))
        average = AveragedModel(hap)
        average.update_parameters(hap)
        averages[hap.rank].update_parameters(hap.full_module())
        return told

    first, *others = on_ranks(c, plan, body)
    assert all(told == first for told in others)


def test_fsdp_marks_what_it_wraps() -> None:
    hap = lone(case("mlp"))
    with pytest.raises(ShardError, match="FSDP around a HAP module"):
        hap._is_fsdp_managed_module = True
    assert not hap._is_fsdp_managed_module


def test_other_modules_are_wrapped_as_ever() -> None:
    c = case("mlp")

    def body(hap: HAP) -> torch.Tensor:
        assert hap.rank < 2
        return nn.DataParallel(nn.Linear(2, 2))(torch.ones(1, 2)).sum()

    assert len(on_ranks(c, random_plan(c, 2, 2), body)) == 2


def test_it_is_compiled_by_an_argument() -> None:
    with pytest.raises(ExampleError, match=r"HAP\(model, cluster, example=batch, compile=True\)"):
        lone(case("mlp")).compile()
