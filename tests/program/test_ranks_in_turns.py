"""Programs of several devices in micro-batches: every rank computes what one device computes of the whole batch."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import replace

import pytest
import torch
from program_builder import cheap_random_program, random_program, uneven
from ranks_in_turns import error_in_turns
from torch.utils import _pytree as pytree

import zoo
from hetspmd.errors import MicroBatchError
from hetspmd.optimize.compiler import plan_for
from hetspmd.program.loop_steps import repeatable
from hetspmd.program.micro_batch_check import check_repeated
from hetspmd.program.micro_batches import MicroBatches, micro_batches
from hetspmd.program.schedule import make_schedule
from hetspmd.program.turn_lengths import in_turns, turn_lengths
from hetspmd.rules.theory import Theory
from hetspmd.search import constraints as known
from hetspmd.trace.trace import split_example
from test_random_programs import subject
from workbench import Traced, cluster, single_device, sufficient_factors, traced

RATIOS = (0.5, 0.0, 0.3, 0.2)
CLUSTER = cluster(5, 1, 3, 2)
KINDS = {
    "data parallel": known.data_parallel,
    "sharded parameters": known.zero_like,
    "tensor parallel": known.tensor_parallel,
    "sufficient factors": sufficient_factors,
}
PARTS = ((0.5, 0.34, 0.16), (0.0, 0.7, 0.3), (1.0,))
"""The part of the samples in each micro-batch: uneven, one of nothing, all at once."""

MODELS = [
    pytest.param(name, marks=() if name == "gpt2" else pytest.mark.slow)
    for name in (
        "bert",
        "gpt2",
        "llama",
        "vit",
        "vgg19",
        "t5",
        "bart",
        "gemma2",
        "unet",
        "albert",
        "bert-moe",
    )
]


def inputs_of(t: Traced) -> list[torch.Tensor]:
    leaves = pytree.tree_leaves(split_example(t.example))
    return [leaves[i.leaf] for i in t.theory.graph.inputs]


def in_loop(theory: Theory, batches: MicroBatches, part: float, seed: int = 0) -> MicroBatches:
    """The loop with so large a part of the collectives in it that can run there."""
    able = sorted(repeatable(theory, batches))
    repeated = random.Random(seed).sample(able, round(part * len(able)))
    check_repeated(theory, batches.loop, repeated)
    return replace(batches, repeated=frozenset(repeated))


def check(t: Traced, kind: str, turns_with: Iterable[tuple[tuple[float, ...], float]]) -> None:
    """A known program computes what one device computes: in turns of these parts of the samples, with such a part
    of the collectives in the loop that can be there."""
    plan = plan_for(t.theory, CLUSTER, KINDS[kind](t.theory), RATIOS)
    want = single_device(t.theory, t.model, inputs_of(t))
    single = any(tensor.dtype == "float32" for tensor in t.theory.graph.tensors)  # the losses of some models
    for parts, part in turns_with:
        batches = in_loop(t.theory, micro_batches(t.theory, 2), part)
        turns = turn_lengths(t.theory, batches.loop.axes, parts)
        error = error_in_turns(
            t.theory,
            plan.program,
            plan.schedule,
            replace(batches, count=len(parts), turns=turns),
            plan.lengths,
            t.model,
            inputs_of(t),
            want,
        )
        assert error < (1e-6 if single else 1e-9), (kind, parts)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", MODELS)
def test_known_programs(name: str, kind: str) -> None:
    check(traced(name), kind, zip((PARTS[0], *PARTS), (0.0, 1.0, 0.5, 1.0), strict=True))


@pytest.mark.parametrize("name", ["mlp", "attention", "vocabulary", "experts"])
def test_random_programs(name: str) -> None:
    of = subject(name)
    for seed in range(12):
        batches = in_loop(of.theory, micro_batches(of.theory, 2), seed % 3 / 2, seed)
        program = (random_program if seed % 2 else cheap_random_program)(of.theory, seed)
        turns = turn_lengths(of.theory, batches.loop.axes, parts := PARTS[seed % 2])
        error = error_in_turns(
            of.theory,
            program,
            make_schedule(of.theory, program, 1000.0),
            replace(batches, count=len(parts), turns=turns),
            uneven(of.theory, 3, seed),
            of.model,
            of.inputs,
            of.want,
        )
        assert error < 1e-9, seed


def test_a_device_has_its_units_over_all_turns() -> None:
    draw = random.Random(5)
    for _ in range(300):
        devices = [draw.choice((0, 1, 2, 5, 17)) for _ in range(draw.randrange(1, 6))]
        total = sum(devices)
        cuts = sorted(draw.randrange(total + 1) for _ in range(draw.randrange(5)))
        turns = [b - a for a, b in zip([0, *cuts], [*cuts, total], strict=True)]
        table = in_turns(turns, devices)
        assert [sum(row) for row in table] == turns
        assert [sum(row[j] for row in table) for j in range(len(devices))] == devices
        assert min((n for row in table for n in row), default=0) >= 0


def test_turns_of_one_sample_go_round() -> None:
    """Each device has its part of the samples, though each micro-batch has one of them alone."""
    first, second, third = (1, 0, 0), (0, 1, 0), (0, 0, 1)
    assert in_turns((1,) * 6, (3, 2, 1)) == (first, second, first, third, second, first)


def test_more_micro_batches_than_samples() -> None:
    t = traced("gpt2")
    with pytest.raises(MicroBatchError, match=f"micro_batches=7: the batch has {zoo.BATCH} samples"):
        micro_batches(t.theory, zoo.BATCH + 1)
