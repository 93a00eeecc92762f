"""The core's optimum is HiGHS's optimum of the same problem as an integer program."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import zoo
from hetspmd import _core
from hetspmd.balance.lengths import lengths_for
from hetspmd.cost.cluster import Cluster
from hetspmd.cost.model import CostModel
from hetspmd.rules.theory import Theory, derive
from hetspmd.synth.constraints import Constraints
from hetspmd.synth.search import Searcher
from hetspmd.synth.space import search_space
from hetspmd.trace.trace import split_example, trace

MODELS = ("bert", "gpt2", "llama", "vit", "vgg19", "dlrm")
RATIOS = {"equal": (1, 1, 1, 1), "4:2:1:1": (4, 2, 1, 1), "8:1": (8, 1), "one idle": (5, 4, 0)}


def integer_program() -> ModuleType:
    path = Path(__file__).parents[2] / "benches/integer_program.py"
    spec = importlib.util.spec_from_file_location("integer_program", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def cluster(speeds: tuple[int, ...]) -> Cluster:
    """Slow devices on a network that neither always pays nor never."""
    devices: list[dict[str, Any]] = [
        {"name": f"d{i}", "flops": max(s, 1) * 2e8, "memory_bandwidth": max(s, 1) * 1e9, "launch": 1e-7}
        for i, s in enumerate(speeds)
    ]
    return Cluster.load({"devices": devices, "network": {"bandwidth": 2e9, "latency": 1e-6}})


@pytest.fixture(
    scope="module",
    params=[pytest.param(m, marks=pytest.mark.slow if m in ("llama", "vit") else ()) for m in MODELS],
)
def theory(request: pytest.FixtureRequest) -> Theory:
    model, example, loss = zoo.build(request.param)
    args, kwargs = split_example(example)
    return derive(trace(model, args, kwargs, loss=loss))


@pytest.mark.parametrize("name", RATIOS)
def test_the_optimum_is_that_of_the_integer_program(theory: Theory, name: str) -> None:
    speeds = RATIOS[name]
    lengths = lengths_for(theory.axes, tuple(s / sum(speeds) for s in speeds))
    space = search_space(theory, Constraints())
    problem = Searcher(space).problem(CostModel(theory, cluster(speeds)), lengths)
    found = json.loads(_core.solve(problem, time_limit=60.0, max_expansions=1_000_000, memory_limit=2**32))
    expected, _ = integer_program().optimum(problem)
    assert found["lower_bound"] <= expected * (1 + 1e-9)
    assert found["cost"] >= expected * (1 - 1e-9)
    if found["stop_reason"] == "optimal":
        assert found["cost"] == pytest.approx(expected, rel=1e-9)
    assert found["gap"] < 1e-3
