"""ZeRO 0 to 3: forced, and chosen for each parameter where memory is short."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import hetspmd
from hetspmd.errors import ConstraintError, MemoryLimitError, OptionError, PlanError, ProofError
from hetspmd.placement import is_sharded
from hetspmd.plan.plan import Plan
from hetspmd.program.levels import InsideCollective, Together, within
from hetspmd.program.loop_steps import repeatable
from hetspmd.program.micro_batch_check import check_repeated
from hetspmd.program.program import Compute
from hetspmd.program.turn_steps import turn_steps
from hetspmd.report.zero_text import zero_levels

SPEEDS = (4e9, 2e9, 1e9, 1e9)


def devices(memory: float = 1e12) -> dict[str, Any]:
    each = [
        {"name": f"d{i}", "flops": s, "memory": int(memory), "memory_bandwidth": 5e10}
        for i, s in enumerate(SPEEDS)
    ]
    return {"devices": each, "network": {"bandwidth": 1e9, "latency": 1e-5}}


class Net(nn.Module):
    """Equal layers; ``shown``: the loss has a part that reads the first weight alone, which is an output, too."""

    def __init__(self, width: int = 128, layers: int = 4, shown: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.last, self.shown = nn.Linear(width, 10), shown

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        for layer in self.layers:
            x = F.relu(layer(x))
        loss = F.cross_entropy(self.last(x), y)
        square = self.layers[0].weight.square()
        return {"loss": loss + 0.1 * square.sum(), "square": square} if self.shown else loss


def batch(rows: int = 33, width: int = 128) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(1)
    return {"x": torch.randn(rows, width, generator=draw), "y": torch.randint(0, 10, (rows,), generator=draw)}


def in_turn(plan: Plan) -> tuple[int, int, int]:
    """Collectives of large tensors before the loop, in each micro-batch, and after it."""
    assert plan.batches is not None
    steps = turn_steps(plan.theory, plan.program, plan.schedule, plan.batches)
    before, turn, after = (
        sum(
            plan.graph.tensors[one.tensor].numel >= 128 * 128
            for step in part
            if isinstance(step, (InsideCollective, Together))
            for one in within(step)
        )
        for part in (steps.before, steps.turn, steps.after)
    )
    return before, turn, after


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("level", [0, 1, 2, 3])
def test_levels_that_are_asked_for_compute_what_one_device_computes(level: int, count: int) -> None:
    report = hetspmd.verify(
        Net(shown=True), batch(), devices(), dtype="float64", steps=2, zero=level, micro_batches=count
    )
    assert report.ok
    assert max(report.loss_error, report.gradient_error, report.parameter_error) < 1e-12


def test_where_the_collectives_of_each_level_are() -> None:
    plans = [hetspmd.compile(Net(), batch(), devices(), zero=level, micro_batches=3) for level in range(4)]
    assert [in_turn(plan) for plan in plans] == [(0, 0, 4), (4, 0, 4), (4, 4, 0), (0, 4 + 3 + 4, 0)]
    large = [f"layers.{n}.weight" for n in range(4)]
    for level, plan in enumerate(plans):
        assert {zero_levels(plan)[name] for name in large} == {level}
    held = [max(plan.cost.memory_bytes) for plan in plans]
    assert held == sorted(held, reverse=True)
    assert held[3] < 0.6 * held[0]
    seconds = [plan.cost.step_seconds for plan in plans[1:]]
    assert seconds == sorted(seconds)


def test_a_weight_that_is_read_beside_the_loop_is_gathered_before_it() -> None:
    plan = hetspmd.compile(Net(shown=True), batch(), devices(), zero=3, micro_batches=3)
    names = {p.tensor: p.name for p in plan.graph.parameters}
    repeated = {names[plan.graph.parameter_of[t]] for t in plan.repeated if t in plan.graph.parameter_of}
    assert "layers.1.weight" in repeated
    assert "layers.0.weight" not in {names[t] for t in plan.repeated if t in names}


def test_without_a_loop_the_backward_gathers_again_at_level_3() -> None:
    for level, again in ((1, False), (3, True)):
        plan = hetspmd.compile(Net(), batch(), devices(), zero=level)
        reads = [
            is_sharded(step.row.pre[0])
            for step in plan.program.steps
            if isinstance(step, Compute)
            and plan.graph.second_reads.get(step.instruction) is not None
            and plan.graph.tensors[plan.graph.second_reads[step.instruction]].numel >= 128 * 128
        ]
        assert reads
        assert set(reads) == {again}


def test_memory_decides_the_level_of_each_parameter() -> None:
    """Between what ZeRO-3 and ZeRO-1 need, some parameters are gathered once and others in each micro-batch."""
    need = [
        max(hetspmd.compile(Net(layers=6), batch(600), devices(), zero=n, micro_batches=4).cost.memory_bytes)
        for n in (1, 2, 3)
    ]
    mixed: list[Plan] = []
    for part in (0.1, 0.3, 0.6):
        memory = need[2] + part * (need[0] - need[2])
        plan = hetspmd.compile(Net(layers=6), batch(600), devices(memory), micro_batches=4)
        assert max(plan.cost.memory_bytes) <= memory
        mixed.append(plan)
    levels = [set(zero_levels(plan).values()) for plan in mixed]
    assert any(len({level for level in of if level}) > 1 for of in levels), levels
    seconds = [plan.cost.step_seconds for plan in mixed]
    for less, more in pairwise(seconds):
        assert more <= less * 1.002
    forced = hetspmd.compile(Net(layers=6), batch(600), devices(), zero=3, micro_batches=4).cost.step_seconds
    assert max(seconds) <= forced * 1.001
    for plan in mixed:
        assert plan.search.lower_bound <= plan.search.cost
        assert {"zero_1", "zero_2", "zero_3"} <= plan.baselines.keys()
        assert len([c for c in plan.considered if c.verdict == "taken"]) == 1
        again = hetspmd.compile(Net(layers=6), batch(600), plan.cluster, micro_batches=4)
        assert again.digest == plan.digest


def test_shards_lie_where_there_is_room_and_are_gathered_again_in_one_micro_batch() -> None:
    """Without micro-batches too: a step whose shares follow the speeds, and its shards the memory."""
    least = hetspmd.compile(Net(layers=6), batch(), devices(), zero=3)
    plan = hetspmd.compile(Net(layers=6), batch(), devices(1.15 * max(least.cost.memory_bytes)))
    assert plan.cost.step_seconds <= least.cost.step_seconds * 1.001
    assert max(plan.cost.memory_bytes) <= plan.cluster.devices[0].memory


def test_the_number_of_micro_batches_is_the_one_of_the_fastest_step() -> None:
    need = max(hetspmd.compile(Net(), batch(64), devices(), zero=3).cost.memory_bytes)
    tight = devices(0.9 * need)
    plan = hetspmd.compile(Net(), batch(64), tight, micro_batches="auto")
    seconds = {}
    for count in (1, 2, 4, 8):
        try:
            seconds[count] = hetspmd.compile(Net(), batch(64), tight, micro_batches=count).cost.step_seconds
        except MemoryLimitError:
            continue
    before = [s for n, s in seconds.items() if n <= plan.micro_batches]
    # A number that is asked for is searched another way, which may come to a step that is hardly another.
    assert plan.cost.step_seconds == pytest.approx(seconds[plan.micro_batches], rel=1e-3)
    assert plan.cost.step_seconds <= min(before) * 1.001
    assert hetspmd.compile(Net(), batch(), devices(), micro_batches="auto").micro_batches == 1


@pytest.mark.parametrize(("level", "count"), [(1, 1), (3, 4)])
def test_a_level_that_is_asked_for_is_no_slower_than_as_a_baseline(level: int, count: int) -> None:
    """Whatever the memory: a level's ways to store parameters are tried where it is asked for, too."""
    need = max(hetspmd.compile(Net(), batch(), devices(), zero=level, micro_batches=count).cost.memory_bytes)
    for memory in (1e12, need):
        asked = hetspmd.compile(Net(), batch(), devices(memory), zero=level, micro_batches=count)
        assert max(asked.cost.memory_bytes) <= memory
        assert len([c for c in asked.considered if c.verdict == "taken"]) == 1
        free = hetspmd.compile(Net(), batch(), devices(memory), micro_batches=count)
        name = f"zero_{level}"
        assert free.baselines.keys() >= {name} or memory > need
        if name in free.baselines and name not in free.over_memory:
            assert asked.cost.step_seconds <= free.baselines[name] * 1.0001


def test_a_level_that_is_asked_for_is_no_slower_with_more_memory() -> None:
    """Its gathers start as far ahead as is best, however its parameters are stored."""
    enough = hetspmd.compile(Net(), batch(), devices(), zero=3, micro_batches=4).cost
    less = devices(0.997 * max(enough.memory_bytes))
    short = hetspmd.compile(Net(), batch(), less, zero=3, micro_batches=4).cost
    assert enough.step_seconds <= short.step_seconds * 1.0001


def test_bad_input_is_named() -> None:
    for bad in (4, -1, True, "3"):
        with pytest.raises(OptionError, match=r"zero=.*: give 0, 1, 2 or 3, or None"):
            hetspmd.compile(Net(), batch(), devices(), zero=bad)  # type: ignore[arg-type]  # that is the case
    with pytest.raises(OptionError, match="machines='flat'"):
        hetspmd.compile(Net(), batch(), devices(), zero=1, machines="virtual")
    with pytest.raises(ConstraintError, match=r"zero=1 stores last.weight shard\(0\), .* says replicated"):
        hetspmd.compile(Net(), batch(), devices(), zero=1, constraints={"last.weight": "replicated"})


def test_a_plan_file_keeps_where_collectives_are_and_damage_is_named(tmp_path: Any) -> None:
    plan = hetspmd.compile(Net(shown=True), batch(), devices(), zero=3, micro_batches=3)
    plan.save(tmp_path / "plan")
    assert Plan.load(tmp_path / "plan").repeated == plan.repeated != ()
    names = {t.name: t.id for t in plan.graph.tensors}
    for tensor in (names["layers.0.weight"], names["relu"], 10**6, -1):
        plan.with_step(repeated=(*plan.repeated, tensor)).save(tmp_path / "damaged")
        with pytest.raises(PlanError, match=r"said to run in the loop"):
            Plan.load(tmp_path / "damaged")


def test_what_may_not_be_in_the_loop_is_refused_by_the_proof() -> None:
    """Each tensor of a step: the proof allows it where the pass says that it can be, and nowhere else but where
    nothing is changed by it."""
    for model in (Net(), Net(shown=True)):
        plan = hetspmd.compile(model, batch(), devices(), micro_batches=2)
        assert plan.batches is not None
        able = repeatable(plan.theory, plan.batches)
        check_repeated(plan.theory, plan.batches.loop, able)
        refused = []
        for tensor in plan.graph.tensors:
            try:
                check_repeated(plan.theory, plan.batches.loop, [tensor.id])
            except ProofError:
                refused.append(tensor.id)
        assert able.isdisjoint(refused)
        assert len(refused) > len(plan.graph.tensors) // 3


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_random_memory(seed: int) -> None:
    """Whatever the memory: what is planned fits, is equal, and is no slower with more memory."""
    draw = random.Random(seed)
    width, layers, rows = draw.choice((32, 64, 96)), draw.randrange(2, 7), draw.randrange(4, 60)
    model, example = Net(width, layers, draw.random() < 0.5), batch(rows, width)
    count = draw.choice((1, 2, 3, 4))
    whole = max(hetspmd.compile(model, example, devices(), micro_batches=count).cost.memory_bytes)
    for part in (0.9, 0.6, 0.45):
        cluster = devices(part * whole)
        try:
            plan = hetspmd.compile(model, example, cluster, micro_batches=count)
        except MemoryLimitError:
            continue
        assert max(plan.cost.memory_bytes) <= part * whole
        report = hetspmd.verify(model, example, cluster, dtype="float64", steps=2, micro_batches=count)
        assert report.ok
        assert max(report.loss_error, report.gradient_error, report.parameter_error) < 1e-11
