"""Where a wrong program parts from one device is named: tensor, rank, instruction and line of the model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from small_models import MLP, case
from small_plans import cluster, random_plan

from hetspmd.dist import collectives
from hetspmd.dist.pending import Pending
from hetspmd.dist.runtime import Runtime
from hetspmd.optimize.compiler import compile as compile_plan
from hetspmd.verify.comparison import verify


def test_nothing_is_located_where_all_is_equal() -> None:
    c = case("mlp", torch.float32)
    assert verify(c.model, c.batch, cluster(4, 2, 1), locate=True, optimizers=("sgd",)).located == ""


def test_a_wrong_collective_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    right = collectives.start_all_reduce

    def wrong(runtime: Runtime, tensor: torch.Tensor, **how: Any) -> Pending[torch.Tensor]:
        result = right(runtime, tensor, **how).wait()
        return Pending((), lambda: result * 1.001 if result.is_floating_point() else result)

    c = case("mlp", torch.float32)
    plans = [random_plan(c, 3, seed) for seed in range(4)]
    monkeypatch.setitem(
        collectives.STARTS, "all_reduce", replace(collectives.STARTS["all_reduce"], one=wrong)
    )
    found = [verify(c.model, c.batch, p.cluster, plan=p, locate=True, optimizers=("sgd",)) for p in plans]
    report = next(r for r in found if not r.ok)
    assert "is the first value that differs, on rank" in report.located, report.text
    assert "small_models.py" in report.located
    assert "it is the trace" not in report.located
    assert "located    " in report.text


def test_a_wrong_graph_is_the_trace() -> None:
    c, other = case("mlp", torch.float32), case("mlp", torch.float32)

    class Other(MLP):
        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            logits = self.b(torch.tanh(self.a(x)) * self.scale)
            return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}

    other.model.__class__ = Other
    plan = compile_plan(c.model, c.batch, cluster(4, 2, 1))
    report = verify(other.model, other.batch, cluster(4, 2, 1), plan=plan, locate=True, optimizers=("sgd",))
    assert not report.ok
    assert "the graph differs from eager PyTorch" in report.located, report.text
    assert "no value of the first step of the program differs" in report.located
