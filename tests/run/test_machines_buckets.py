"""Several collectives between machines as one equal each by itself, whatever is collected and handed out for it."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
import torch

from hetspmd.dist.communicator import Communicator
from hetspmd.dist.machine_levels import MachineRuntime
from hetspmd.dist.runtime import Runtime
from hetspmd.dist.simulated_world import run_ranks
from hetspmd.program.level_layout import Leg
from workbench import randomness

KINDS = ("all_reduce", "reduce_scatter", "all_gather")
Members = list[tuple[torch.Tensor, tuple[Any, ...], Leg]]


def cut(dice: random.Random, total: int, parts: int) -> list[int]:
    """Extents that add up to ``total``, some of them often 0."""
    stops = sorted(dice.randint(0, total) for _ in range(parts - 1))
    return [b - a for a, b in zip([0, *stops], [*stops, total], strict=True)]


def member(
    dice: random.Random, kind: str, accelerators: list[int], machine: int, inside: int, dtype: torch.dtype
) -> tuple[torch.Tensor, tuple[Any, ...], Leg]:
    """A tensor of this accelerator, the arguments of its collective, and its leg; the same dice on every rank."""
    shape = [dice.randint(1, 4) for _ in range(dice.randint(1, 3))]  # what is empty is in no bucket
    dim = dice.randrange(len(shape))
    extents = cut(dice, shape[dim], len(accelerators))
    here = [*shape[:dim], extents[machine], *shape[dim + 1 :]]
    before = here if kind == "all_gather" else shape
    after = here if kind == "reduce_scatter" else shape
    args = () if kind == "all_reduce" else (dim, extents)
    # Which dims are cut inside is the same on all machines, into how many parts is not.
    ways = dice.choice(("whole", "sum", "cut")), dice.choice(("whole", "cut"))
    places = dice.randrange(len(shape)), dice.randrange(len(shape))
    seed = dice.random()
    own = random.Random(f"{seed} {machine}")
    held: Any = None if ways[0] == "whole" else "sum"
    local = list(before)
    if ways[0] == "cut":
        held = places[0], cut(own, before[places[0]], accelerators[machine])
        local[places[0]] = held[1][inside]
    handed: Any = None
    if ways[1] == "cut":
        handed = places[1], cut(own, after[places[1]], accelerators[machine])
    values = torch.Generator().manual_seed(hash((seed, machine, inside if held is not None else 0)) % 2**32)
    tensor = torch.randint(-3, 4, local, generator=values).to(dtype)
    return tensor, args, (held, before, handed, after)


def both(kind: str, seed: int, seen: Counter[str]) -> None:
    dice = random.Random(seed)
    accelerators = [dice.choice((1, 2, 3)) for _ in range(dice.choice((1, 2, 3)))]
    places = [(m, i) for m, k in enumerate(accelerators) for i in range(k)]
    machines = [[r for r, (m, _) in enumerate(places) if m == j] for j in range(len(accelerators))]
    first = [of[0] for of in machines]
    others = [r for r in range(len(places)) if r not in first]
    count, dtype = dice.randint(1, 5), dice.choice((torch.float32, torch.bfloat16))

    def body(communicator: Communicator) -> Members:
        drawn = randomness(communicator.rank)
        inside = Runtime(communicator.split(machines), drawn)
        across = Runtime(communicator.split([part for part in (first, others) if part]), drawn)
        runtime = MachineRuntime(communicator, drawn, inside=inside, across=across)
        again = random.Random(seed)
        members = [member(again, kind, accelerators, *places[communicator.rank], dtype) for _ in range(count)]
        tensors = [tensor for tensor, _, _ in members]
        kept = [tensor.clone() for tensor in tensors]
        alone = [runtime.start_across(kind, t, args, leg).wait() for t, args, leg in members]
        bucket = runtime.start_bucket_across(
            kind, tensors, [args for _, args, _ in members], [leg for *_, leg in members]
        )
        order = list(range(count))
        random.Random(seed + 1).shuffle(order)
        together = {i: bucket.take(i) for i in order}
        for i, want in enumerate(alone):
            assert together[i].shape == want.shape
            assert together[i].dtype == want.dtype == dtype
            assert torch.equal(together[i], want)
            assert torch.equal(tensors[i], kept[i]), "inputs stay as they are"
        if kind != "all_gather":  # it has no use for an operand's memory
            for i, (_, args, leg) in enumerate(members):
                assert torch.equal(
                    runtime.start_across(kind, tensors[i], args, leg, spare=True).wait(), alone[i]
                )
        return members

    for _, _, (held, before, handed, after) in run_ranks(len(places), body)[0]:
        seen["sum" if held == "sum" else "whole" if held is None else "cut"] += 1
        seen["to all" if handed is None else "to parts"] += 1
        seen["empty"] += 0 in (*after, *before)
    seen["one machine"] += len(accelerators) == 1
    seen["lone accelerators"] += max(accelerators) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_together_as_alone(kind: str) -> None:
    seen: Counter[str] = Counter()
    for seed in range(60):
        both(kind, seed, seen)
    wanted = {"sum", "whole", "cut", "to all", "to parts", "empty", "one machine", "lone accelerators"}
    assert {name for name, count in seen.items() if count} == wanted - (
        {"empty"} if kind == "all_reduce" else set()
    )
