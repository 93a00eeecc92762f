"""No other wrapper is put around a HAP module: it would take shards for the whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import lone, loss_of, on_ranks
from small_models import case
from small_plans import random_plan
from torch import nn

from hetspmd.errors import ExampleError, ShardError
from hetspmd.run.module import HAP

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
                told.append(str(e.value))
        loss_of(hap(**c.batch)).backward()
        return told

    first, *others = on_ranks(c, random_plan(c, 3, 2), body)
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
