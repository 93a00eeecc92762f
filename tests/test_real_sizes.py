"""Models of real size on the meta device: compile time, a certified program, never worse than data parallel."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

import hetspmd
from hetspmd.synth.checker import check

EXAMPLES = Path(__file__).parent.parent / "examples"

UNLIKE = {
    "devices": [
        {"name": "new", "count": 2, "flops": "60 TFLOP/s", "memory": "80GiB", "memory_bandwidth": "2TB/s"},
        {"name": "middle", "count": 2, "flops": "30 TFLOP/s", "memory": "40GiB", "memory_bandwidth": "1TB/s"},
        {"name": "old", "count": 4, "flops": "10 TFLOP/s", "memory": "32GiB", "memory_bandwidth": "700GB/s"},
    ],
    "network": {"bandwidth": "10Gbit/s", "latency": "50us"},
}


def build(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.build()


@pytest.mark.parametrize("name", ["gpt2", "vgg19", "bert_moe"])
def test_plans_of_real_models_beat_data_parallelism(name: str) -> None:
    model, example = build(name)
    seconds: dict[str, float] = {}
    plan = hetspmd.compile(model, example, UNLIKE, timings=seconds)
    assert check(plan.theory, plan.program) > len(plan.graph.instructions)
    assert plan.cost.step_seconds <= plan.baselines["data_parallel_proportional"]
    assert plan.cost.step_seconds <= plan.baselines["data_parallel_even"]
    assert plan.search.lower_bound <= plan.search.cost
    assert plan.search.gap < 0.02
    if name == "gpt2":  # 5 s on an idle machine with two cores
        assert seconds["total"] < 30.0


def test_large_linear_layers_are_not_reduced() -> None:
    """VGG19's first linear layer holds most of the parameters: its gradient must not cross the network."""
    model, example = build("vgg19")
    plan = hetspmd.compile(model, example, EXAMPLES / "clusters/four-unlike.yaml")
    stored = plan.parameter_layout()
    assert stored["network.classifier.0.weight"][0] >= 2
    assert plan.cost.step_seconds < 0.7 * plan.baselines["data_parallel_proportional"]
