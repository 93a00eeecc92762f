"""The core's optimum is HiGHS's optimum of the same problem as an integer program."""

from __future__ import annotations

import importlib.util
import json
import random
import statistics
import sys
import time
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from core_problems import random_problem

from hetspmd import _core
from hetspmd.cluster.cluster import Cluster
from hetspmd.cost.model import CostModel
from hetspmd.program.lengths import lengths_for
from hetspmd.search.constraints import Constraints
from hetspmd.search.search import Searcher
from hetspmd.search.space import search_space
from workbench import traced

MODELS = ("bert", "gpt2", "llama", "vit", "vgg19", "dlrm", "bert-moe", "resnet50")
QUICK = ("bert", "gpt2", "vgg19", "dlrm")
RATIOS = {"equal": (1, 1, 1, 1), "4:2:1:1": (4, 2, 1, 1), "8:1": (8, 1), "one idle": (5, 4, 0)}


@cache
def integer_program() -> ModuleType:
    path = Path(__file__).parents[2] / "benches/integer_program.py"
    spec = importlib.util.spec_from_file_location("integer_program", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def cluster(speeds: tuple[int, ...]) -> Cluster:
    """Slow devices on a network that neither always pays nor never."""
    devices: list[dict[str, Any]] = [
        {"name": f"d{i}", "flops": max(s, 1) * 2e8, "memory_bandwidth": max(s, 1) * 1e9, "launch": 1e-7}
        for i, s in enumerate(speeds)
    ]
    return Cluster.load({"devices": devices, "network": {"bandwidth": 2e9, "latency": 1e-6}})


@cache
def searcher(model: str) -> Searcher:
    return Searcher(search_space(traced(model).theory, Constraints()))


def document(model: str, speeds: tuple[int, ...]) -> dict[str, Any]:
    """The problem of a model's training step at ratios proportional to the speeds."""
    theory = traced(model).theory
    lengths = lengths_for(theory.axes, tuple(s / sum(speeds) for s in speeds))
    text = searcher(model).problem(CostModel(theory, cluster(speeds)), lengths)
    found: dict[str, Any] = json.loads(text)
    return found


def core(text: str, incumbent: str | None = None) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(
        _core.solve(text, time_limit=60.0, max_expansions=1_000_000, memory_limit=2**32, incumbent=incumbent)
    )
    return found


def compare(problem: dict[str, Any]) -> tuple[float, float]:
    """Asserts that both find one cost; CPU seconds of the core and of HiGHS."""
    text = json.dumps(problem)
    started = time.process_time()
    found = core(text)
    seconds = time.process_time() - started
    other = integer_program().optimum(text)
    assert found["stop_reason"] == "optimal"
    assert found["gap"] == 0.0
    assert found["cost"] == found["lower_bound"] == other.cost
    assert other.bound == pytest.approx(found["cost"], rel=1e-9)
    # The core checks an incumbent on its own: the program of HiGHS is one, of the cost that is claimed.
    again = core(text, json.dumps({"rows": other.rows, "moves": other.moves}))
    assert again["cost"] == other.cost
    return seconds, other.seconds


def prices(problem: dict[str, Any], seed: int) -> None:
    """Random prices of holding, of the size of the collectives' costs: they change what is best."""
    costs = [move[3] for tensor in problem["tensors"] for move in tensor["moves"]]
    most = int(statistics.median(costs))
    rng = random.Random(seed)
    for tensor in problem["tensors"]:
        for held in tensor["keep"]:
            held[1] = rng.randrange(most)


def cases(quick: set[str]) -> list[Any]:
    """All models at all ratios; slow but for the quick models at ``quick`` ratios."""
    return [
        pytest.param(m, r, marks=() if m in QUICK and r in quick else pytest.mark.slow)
        for m in MODELS
        for r in RATIOS
    ]


@pytest.mark.parametrize(("model", "name"), cases(set(RATIOS)))
def test_the_optimum_is_that_of_the_integer_program(model: str, name: str) -> None:
    problem = document(model, RATIOS[name])
    assert any(row.get("direct") for i in problem["instructions"] for row in i["rows"])
    ours, theirs = compare(problem)
    print(f"{model}, {name}: core {ours:.3f} s, HiGHS {theirs:.2f} s, {theirs / ours:.0f} times as long")


@pytest.mark.parametrize(("model", "name"), cases({"4:2:1:1"}))
def test_prices_of_holding_a_tensor(model: str, name: str) -> None:
    problem = document(model, RATIOS[name])
    before = core(json.dumps(problem))["cost"]
    prices(problem, list(RATIOS).index(name))
    assert core(json.dumps(problem))["cost"] > before
    ours, theirs = compare(problem)
    print(
        f"{model}, {name}, prices: core {ours:.3f} s, HiGHS {theirs:.2f} s, {theirs / ours:.0f} times as long"
    )


def test_random_problems() -> None:
    solved = 0
    for seed in range(100):
        problem = random_problem(seed)
        if core(json.dumps(problem))["stop_reason"] == "infeasible":
            with pytest.raises(RuntimeError, match="Infeasible"):
                integer_program().optimum(json.dumps(problem))
            continue
        compare(problem)
        solved += 1
    assert 30 < solved < 100


@pytest.mark.parametrize(
    ("direct", "keep", "cost"),
    [
        # x is stored as slices for 1 and gathered for 5, f runs whole for 3 and makes what g reads.
        (False, [0, 0], 1 + 5 + 3 + 3),
        # g may not read the gathered x: x is gathered, y too, and g reads slices of both.
        (True, [0, 0], 1 + 5 + 3 + 9),
        # Of slices and whole the cheaper is charged once the tensor has been gathered.
        (False, [7, 2], 1 + 5 + 3 + 3 + 2),
        (False, [4, 9], 1 + 5 + 3 + 3 + 4),
        (True, [4, 9], 1 + 5 + 3 + 9 + 4),
    ],
)
def test_costs_by_hand(direct: bool, keep: list[int], cost: int) -> None:
    problem: dict[str, Any] = {
        "version": 1,
        "tensors": [
            {"name": "x", "moves": [[2, 0, "all_gather", 5]], "keep": [[2, keep[0]], [0, keep[1]]]},
            {"name": "y", "moves": []},
            {"name": "z", "moves": []},
        ],
        "instructions": [
            {"name": "x", "inputs": [], "outputs": [0], "rows": [{"pre": [], "post": [2], "cost": 1}]},
            {"name": "f", "inputs": [0], "outputs": [1], "rows": [{"pre": [0], "post": [0], "cost": 3}]},
            {
                "name": "g",
                "inputs": [0, 1],
                "outputs": [2],
                "rows": [
                    {"pre": [0, 0], "post": [0], "cost": 3, "direct": direct},
                    {"pre": [2, 2], "post": [2], "cost": 9},
                ],
            },
        ],
        "requirements": [{"tensor": 2, "any_of": [0, 2]}],
        "ties": [],
    }
    assert core(json.dumps(problem))["cost"] == cost
    compare(problem)
