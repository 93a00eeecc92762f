"""What is known of a program's memory before its step is simulated is never more than what it holds."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from program_builder import cheap_random_program, data_parallel, random_program, uneven
from small_models import case

from hetspmd.cluster.cluster import Cluster
from hetspmd.cost.lasting_bytes import lasting_bytes
from hetspmd.cost.model import CostModel
from hetspmd.cost.step import StepModel
from hetspmd.optimize.in_micro_batches import in_micro_batches


def cluster_of(world: int, bandwidth: float) -> Cluster:
    return Cluster.load(
        {
            "devices": [{"name": f"d{i}", "flops": 1e9 * (i + 1)} for i in range(world)],
            "network": {"bandwidth": bandwidth, "latency": 1e-5},
        }
    )


@pytest.mark.filterwarnings("ignore::hetspmd.errors.DroppedOutputWarning")
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("name", ["mlp", "attention"])
def test_what_fits_may_fit(name: str, count: int) -> None:
    """On devices whose memory is just what a program holds, or less, nothing is ruled out that fits."""
    theory, batches = in_micro_batches(case(name).theory, count)
    dice, ruled_out = random.Random(count), 0
    for seed in range(12):
        program = (random_program, cheap_random_program)[seed % 2](theory, seed)
        world = dice.choice((2, 3, 5))
        lengths = uneven(theory, world, seed)
        cluster = cluster_of(world, dice.choice((1e6, 1e9)))
        peaks = StepModel(CostModel(theory, cluster, batches), program).held(lengths).peaks
        for part in (1.0, 0.999, 0.7, 0.3):
            devices = tuple(
                replace(d, memory=max(float(int(part * n)), 1.0))
                for d, n in zip(cluster.devices, peaks, strict=True)
            )
            step = StepModel(CostModel(theory, replace(cluster, devices=devices), batches), program)
            fits = not step.held(lengths).lacking(step.model.capacity).any()
            assert fits == (part == 1.0) or not max(peaks)
            assert step.may_fit(lengths) or not fits
            ruled_out += not step.may_fit(lengths)
    assert ruled_out > 12


def test_by_hand() -> None:
    """A float64 parameter and its two moments are 16 bytes an element, a gradient is 8 more where it has storage of
    its own."""
    theory = case("mlp").theory
    program = data_parallel(theory, theory.graph.inputs[0].tensor)
    elements = sum(theory.graph.tensors[p.tensor].numel for p in theory.graph.parameters)
    (one, other) = lasting_bytes(theory, program, uneven(theory, 2, 0)).tolist()
    assert one == other
    assert 16 * elements < one <= 24 * elements
