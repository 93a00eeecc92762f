"""Every model of the zoo and of examples/ with everything in shards that can be, along dim 0 and then along dim 1,
in other modes and with other batches: equal to one device."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from evaluations import (
    FOUR,
    SHARES,
    alone,
    ask,
    evaluated,
    inferred,
    module_of,
    sharded_plan,
    stepped,
    with_rows,
)
from small_plans import cluster
from torch import nn

import zoo
from hetspmd.trace.losses import Loss
from workbench import example_module

EXAMPLES = ("bert_moe",)
"""Those that the zoo does not have."""
TWO = cluster(3, 1)
"""Ranks are threads here, and each of them traces by itself: only quick models have four."""
QUICK = {"gpt2", "unet", "dlrm"}
DEEP = {"resnet50", "mobilenet-v2", "efficientnet-b0", "densenet121", "regnet", "mnasnet", "googlenet"}
"""Convolutional networks of up to a hundred layers. Each takes one to two minutes here, so they are cut along dim 0
alone; their kinds of layers are those of shufflenet, vgg19 and squeezenet, which are tested in every way."""
NAMES = (*zoo.ZOO, *(f"examples/{name}" for name in EXAMPLES))


def params(names: Iterable[str]) -> list[Any]:
    return [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in names]


pytestmark = [
    pytest.mark.filterwarnings("ignore:ops without a rule"),
    pytest.mark.filterwarnings("ignore:enable_nested_tensor"),
]


def built(name: str, dtype: torch.dtype = torch.float64) -> tuple[nn.Module, Any, Loss | None]:
    if not name.startswith("examples/"):
        return zoo.build(name, dtype)
    model, example = example_module(name.removeprefix("examples/")).small()
    return (
        model.to(dtype).train(),
        {k: v.to(dtype) if v.is_floating_point() else v for k, v in example.items()},
        None,
    )


def checked(name: str, dims: tuple[int, ...], *kinds: str) -> None:
    model, example, loss = built(name)

    def body(run: Any) -> list[torch.Tensor]:
        found: list[torch.Tensor] = []
        if "evaluation" in kinds:
            found += evaluated(run, example)
        if "one row" in kinds:
            found += inferred(run, with_rows(example, 1))
        if "another batch" in kinds:
            found += stepped(run, with_rows(example, 5))
        if "frozen parts" in kinds:
            for i, p in enumerate(module_of(run).parameters()):
                p.requires_grad_(i % 2 == 0)
            run.eval()
            found += stepped(run, example)
        return found

    devices, shares = (FOUR, SHARES) if name in QUICK else (TWO, (0.75, 0.25))
    plan = sharded_plan(model, example, dims, loss, devices, shares)
    # Some models compute their loss in float32, whatever their dtype.
    single = any(t.dtype == "float32" for t in plan.graph.tensors)
    found = ask(model, body, cluster=devices, plan=plan, loss=loss)
    assert found.error() < (1e-5 if single else 1e-9)
    assert len(found.plans) == 1 + len(kinds)


@pytest.mark.parametrize("name", params(NAMES))
def test_along_dim_0(name: str) -> None:
    checked(name, (0,), "evaluation", "one row", "another batch")


@pytest.mark.parametrize("name", params(n for n in NAMES if n not in DEEP))
def test_along_dim_1(name: str) -> None:
    checked(name, (1,), "evaluation", "one row", "frozen parts")


@pytest.mark.parametrize("name", params(n for n in NAMES if n not in DEEP))
def test_autocast(name: str) -> None:
    """Half of the models prefer dim 0, the others dim 1."""
    model, example, loss = built(name, torch.float32)
    dims = (0, 1) if NAMES.index(name) % 2 else (1, 0)

    def body(run: Any) -> list[torch.Tensor]:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return evaluated(run, example)

    try:
        body(alone(model, loss))
    except RuntimeError as error:
        if "could not create a primitive descriptor" in str(error):
            pytest.skip("oneDNN has no such layer in bfloat16 on this processor, on one device either")
        raise
    plan = sharded_plan(model, example, dims, loss, TWO, (0.75, 0.25))
    found = ask(model, body, cluster=TWO, plan=plan, loss=loss)
    assert found.error() < 5e-2
    assert [plan.graph.autocast for plan in found.plans] == ["", "bfloat16"]
