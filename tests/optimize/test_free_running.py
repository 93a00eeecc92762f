"""Devices in turns of their own: where that is faster, within the memory, and near the best of all choices."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from test_zero_levels import Net, batch
from torch import nn

import hetspmd
from hetspmd.errors import PlanError
from hetspmd.optimize.alternation import with_best_ratios
from hetspmd.optimize.compile_options import CompileOptions
from hetspmd.optimize.compiler import compile_plan
from hetspmd.optimize.free_running import in_own_turns
from hetspmd.plan.plan import Plan
from hetspmd.program.loop_steps import waits_in_loop

SPEEDS = (4e10, 2e10, 1e10)


def devices(*memory: float, launch: float = 1e-5) -> dict[str, Any]:
    each = [
        {"name": f"d{i}", "flops": s, "memory": int(m), "memory_bandwidth": 1e10, "launch": launch}
        for i, (s, m) in enumerate(zip(SPEEDS, memory, strict=True))
    ]
    return {"devices": each, "network": {"bandwidth": 1e10, "latency": 1e-6}}


class Wide(nn.Module):
    """Layers whose activations take more bytes than their weights."""

    def __init__(self, width: int = 32, layers: int = 3) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.Linear(width, 3 * width), nn.ReLU(), nn.Dropout(0.1), nn.Linear(3 * width, width)
            )
            for _ in range(layers)
        )

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return nn.functional.mse_loss(x, y)


def rows(count: int = 60) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(2)
    return {name: torch.randn(count, 100, 32, generator=draw) for name in "xy"}


def needs() -> tuple[int, ...]:
    """Bytes that the devices hold in one micro-batch."""
    return hetspmd.compile(Wide(), rows(), devices(1e12, 1e12, 1e12)).cost.memory_bytes


def planned(*parts: float, **options: Any) -> Plan:
    """The plan on devices with so large a part of what they hold in one micro-batch."""
    memory = [part * need for part, need in zip(parts, needs(), strict=True)]
    return hetspmd.compile(Wide(), rows(), devices(*memory), **options)


@pytest.mark.parametrize("parts", [(2, 0.6, 0.6), (2, 0.5, 0.4), (0.45, 2, 2)])
def test_each_device_takes_as_many_turns_as_its_memory_asks(parts: tuple[float, ...]) -> None:
    plan = planned(*parts, micro_batches="auto")
    assert len(plan.own_turns) == 3
    assert max(plan.own_turns) == plan.micro_batches > 1
    for turns, part, held, need in zip(plan.own_turns, parts, plan.cost.memory_bytes, needs(), strict=True):
        assert held <= part * need
        assert (turns > 1) == (part < 1)
    assert plan.batches is not None
    assert not waits_in_loop(plan.graph, plan.batches, plan.program)
    for count in (2, 3, 4, 8, 16):
        try:
            alike = planned(*parts, micro_batches=count)
        except hetspmd.errors.MemoryLimitError:
            continue
        assert alike.own_turns == ()
        assert plan.cost.step_seconds <= alike.cost.step_seconds
    text = str(plan)
    assert "No device waits for another one in the loop" in text
    for rank, turns in enumerate(plan.own_turns):
        assert f"{turns} x " in next(
            line for line in text.splitlines() if f" d{rank} " in line and "%" in line
        )


def test_turns_are_near_the_best_of_all() -> None:
    """Beside every number of turns from 1 to 6 of each device, each with its best shares."""
    parts = (2.0, 0.6, 0.5)
    plan = planned(*parts, micro_batches="auto")
    memory = [part * need for part, need in zip(parts, needs(), strict=True)]
    cluster = hetspmd.Cluster.load(devices(*memory))
    free = hetspmd.compile(Wide(), rows(), devices(1e12, 1e12, 1e12), micro_batches=6)
    candidate, best, fitting = _candidate(free, cluster), float("inf"), 0
    for turns in itertools.product(range(1, 7), repeat=3):
        if max(turns) == 1:
            continue
        own = in_own_turns(candidate, turns)
        ratios, lengths = with_best_ratios(own.evaluator, own.step.model, own.ratios, own.lengths)
        for each in (own, own.evaluator(ratios, lengths)):
            if each.fits:
                best, fitting = min(best, each.seconds), fitting + 1
    assert fitting > 50
    assert plan.cost.step_seconds <= best * 1.01


def _candidate(plan: Plan, cluster: hetspmd.Cluster) -> Any:
    from hetspmd.optimize.candidate import searched_within
    from hetspmd.optimize.synthesis import Synthesis
    from hetspmd.search.constraints import Constraints
    from hetspmd.search.search import Limits

    loop = plan.batches
    assert loop is not None

    def allowed(instruction: int, row: Any, _axis: int | None) -> bool:
        return loop.loop.phases[instruction] != "in" or row == loop.loop.rows[instruction]

    ctx = Synthesis(plan.theory, cluster, Constraints({}), Limits(), batches=loop)
    found = searched_within(ctx, (0, 1, 2), Constraints({}, allowed), (plan.ratios, plan.lengths), "")
    assert found is not None
    return found


def test_a_number_that_is_asked_for_is_every_devices() -> None:
    assert planned(2, 0.6, 0.6, micro_batches=4).own_turns == ()


@pytest.mark.parametrize("level", [2, 3])
def test_levels_with_collectives_in_the_loop_have_turns_in_common(level: int) -> None:
    assert planned(2, 0.5, 0.5, micro_batches="auto", zero=level).own_turns == ()


@pytest.mark.parametrize("level", [0, 1, None])
def test_it_computes_what_one_device_computes(level: int | None) -> None:
    memory = [part * need for part, need in zip((2, 0.7, 0.7), needs(), strict=True)]
    plan = hetspmd.compile(Wide(), rows(), devices(*memory), micro_batches="auto", zero=level)
    assert len(set(plan.own_turns)) > 1
    assert hetspmd.verify(Wide(), rows(), devices(*memory), plan=plan).ok


def test_a_plan_file_keeps_the_turns_and_damage_is_named(tmp_path: Any) -> None:
    plan = planned(2, 0.6, 0.4, micro_batches="auto")
    plan.save(tmp_path / "plan")
    assert Plan.load(tmp_path / "plan").own_turns == plan.own_turns != ()
    for turns in ((1, 2), (0, *plan.own_turns[1:]), (1, 1, 1), (*plan.own_turns[:2], plan.micro_batches + 1)):
        plan.with_step(own_turns=turns).save(tmp_path / "damaged")
        with pytest.raises(PlanError, match="turns of their own"):
            Plan.load(tmp_path / "damaged")
    for other in (planned(1, 1, 1, micro_batches=2, zero=3),):
        other.with_step(own_turns=(2, 1, 2)).save(tmp_path / "damaged")
        with pytest.raises(PlanError, match="is in the loop, which devices run in turns of their own"):
            Plan.load(tmp_path / "damaged")


def test_another_batch_keeps_the_turns_as_far_as_it_has_rows() -> None:
    plan = planned(2, 0.6, 0.4, micro_batches="auto")
    for count in (31, 4, 2):
        other = compile_plan(Wide(), (), rows(count), plan.cluster, CompileOptions(), like=plan)
        if not other.own_turns:
            assert other.micro_batches <= count
            continue
        assert all(own <= most for own, most in zip(other.own_turns, plan.own_turns, strict=True))
        assert hetspmd.verify(Wide(), rows(count), plan.cluster, plan=other).ok


def test_where_memory_suffices_there_is_one_turn() -> None:
    assert planned(1, 1, 1, micro_batches="auto").micro_batches == 1
    assert hetspmd.compile(Net(), batch(), devices(1e12, 1e12, 1e12), micro_batches="auto").own_turns == ()
