"""What any program of a step holds at least: never more than what some program holds, in any order and in turns."""

from __future__ import annotations

import random
from functools import cache

import numpy as np
import pytest
from program_builder import cheap_random_program, data_parallel, random_program, uneven
from small_models import case

from hetspmd.cost.lasting_bytes import lasting_bytes
from hetspmd.cost.least_memory import LeastMemory
from hetspmd.cost.memory import Holdings
from hetspmd.errors import MicroBatchError
from hetspmd.optimize.in_micro_batches import in_micro_batches
from hetspmd.program.micro_batches import MicroBatches
from hetspmd.program.program import Program
from hetspmd.program.schedule import make_schedule
from hetspmd.rules.theory import Theory
from memory_cases import stack_theory
from workbench import traced

SMALL = ("mlp", "conv", "attention", "residual", "stack")
LARGE = ("bert", "gpt2", "llama", "vit", "vgg19", "resnet50", "bert-moe", "dlrm", "lstm", "t5")
COUNTS = (1, 2, 3)

pytestmark = pytest.mark.filterwarnings("ignore::hetspmd.errors.DroppedOutputWarning")


def theory_of(name: str) -> Theory:
    if name == "stack":
        return stack_theory()
    return traced(name).theory if name in LARGE else case(name).theory


@cache
def in_turns(name: str, count: int) -> tuple[Theory, MicroBatches | None] | None:
    """The theory in so many micro-batches; None where it cannot be divided."""
    try:
        return in_micro_batches(theory_of(name), count)
    except MicroBatchError:
        return None


def programs(theory: Theory, seed: int) -> list[Program]:
    found = [random_program(theory, seed), cheap_random_program(theory, seed)]
    if theory.graph.inputs and theory.axes.axis(theory.graph.inputs[0].tensor, 0) is not None:
        found.append(data_parallel(theory, theory.graph.inputs[0].tensor, sharded_parameters=seed % 2 == 1))
    return found


def check_bound(theory: Theory, batches: MicroBatches | None, seed: int, worlds: int = 5) -> float:
    """The largest part of what programs hold over all devices that the bound knows. Fails where it is more."""
    dice = random.Random(seed)
    lengths = uneven(theory, 1 + seed % worlds, seed)
    least = LeastMemory(theory, batches)
    known = 0.0
    for program in programs(theory, seed):
        schedule = make_schedule(
            theory, program, dice.choice((0, 10**3, 10**6)), prefetch_distance=dice.choice((1, 2, 5))
        )
        for executed in (True, False) if batches is None else (True,):
            holdings = Holdings(theory, program, schedule, executed=executed, batches=batches)
            peaks = np.array(holdings.at(lengths).peaks, dtype=float)
            needed = least.needed(peaks)
            assert needed.missing == 0, (seed, needed, peaks)
            assert needed.total <= peaks.sum()
            assert (least.at(lengths) <= peaks).all(), (seed, least.at(lengths), peaks)
            known = max(known, needed.total / peaks.sum())
            lasting = lasting_bytes(theory, program, lengths, batches)
            assert (lasting <= peaks).all(), (seed, lasting, peaks)
            assert (lasting > 0).any(), "parameters are held in any case"
    return known


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("name", SMALL)
def test_no_program_holds_less(name: str, count: int) -> None:
    divided = in_turns(name, count)
    if divided is None:
        assert name in ("conv", "residual"), "batch norm needs the whole batch"
        return
    assert max(check_bound(*divided, seed) for seed in range(12)) > 0.5, "the bound says something"


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("name", LARGE)
def test_no_program_of_models_holds_less(name: str, count: int) -> None:
    divided = in_turns(name, count)
    if divided is not None:
        assert max(check_bound(*divided, seed) for seed in range(8)) > 0.4
