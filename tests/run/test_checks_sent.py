"""What checks of a step send and read beside the program: a short word, and a small part of what is replicated."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranks import loss_of, on_ranks
from small_models import case
from small_plans import random_plan

from hetspmd.dist.channel import NUMBERS
from hetspmd.dist.simulated_world import SimulatedChannel
from hetspmd.run.module import HAP
from hetspmd.run.replicas import ROUND_STEPS, Replica, Replicas

STEPS = 5


@pytest.mark.parametrize("name", ["mlp", "conv"])
def test_checks_add_no_collective_to_the_program(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches, calls and copies of a step are one word in the channel, which travels while the step runs."""
    c = case(name)
    plan = random_plan(c, 4, 2)
    words: list[tuple[int, int]] = []
    right = SimulatedChannel.start

    def start(channel: SimulatedChannel, numbers: Any, said: Any) -> Any:
        words.append((channel.rank, len(numbers)))
        return right(channel, numbers, said)

    monkeypatch.setattr(SimulatedChannel, "start", start)

    def body(hap: HAP) -> tuple[int, int]:
        optimizer = torch.optim.SGD(hap.parameters(), lr=0.1)

        def step() -> None:
            optimizer.zero_grad()
            loss_of(hap(**c.batch)).backward()
            optimizer.step()

        everyone: Any = hap.everyone
        step()
        collectives, said = everyone.count, sum(rank == hap.rank for rank, _ in words)
        for _ in range(STEPS):
            step()
        return everyone.count - collectives, sum(rank == hap.rank for rank, _ in words) - said

    checked = on_ranks(c, plan, body)
    unchecked = on_ranks(c, plan, body, check_batches=False)
    assert [collectives for collectives, _ in checked] == [collectives for collectives, _ in unchecked]
    assert [said for _, said in checked] == [STEPS] * 4
    assert [said for _, said in unchecked] == [0] * 4
    assert {length for _, length in words} == {NUMBERS}


@pytest.mark.parametrize("sizes", [(3, 5), (1 << 20, 7, 1 << 10), (1 << 16,) * 40, (11,) * 250])
def test_replicated_tensors_are_read_in_turn_a_little_in_each_step(sizes: tuple[int, ...]) -> None:
    """All of each within a round, and in one step no more than a hundredth of them, or 64 KiB."""
    tensors = {f"t{i}": torch.randn(size) for i, size in enumerate(sizes)}
    replicas = Replicas([Replica(name, lambda t=t: t, 0.0) for name, t in tensors.items()])
    total = sum(t.numel() * t.element_size() for t in tensors.values())
    most = max(1 << 16, -(-total // ROUND_STEPS))
    seen = dict.fromkeys(tensors, 0)
    for _ in range(2 * ROUND_STEPS):
        pieces = replicas.take()
        assert sum(piece.content.numel() * 4 for piece in pieces) <= most + 4, "an element more at most"
        for piece in pieces:
            seen[piece.name] += piece.content.numel()
    assert all(seen[name] >= t.numel() for name, t in tensors.items()), "each of them, whole"


def test_one_rank_in_a_hundred_steps_is_found_wherever_it_parts() -> None:
    """The elements of a round are all elements: none is left out between two pieces."""
    whole = torch.arange(1 << 18, dtype=torch.float32)
    replicas = Replicas([Replica("a", lambda: whole, 0.0), Replica("b", lambda: whole[:5], 0.0)])
    found = torch.zeros(len(whole), dtype=torch.bool)
    for _ in range(ROUND_STEPS):
        for piece in replicas.take():
            if piece.name == "a":
                found[piece.content.long()] = True
    assert bool(found.all())
