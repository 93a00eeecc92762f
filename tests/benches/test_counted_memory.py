"""The predicted peak memory against the bytes that each rank is counted to hold, all ranks in one process.

Links are prompt ones of :mod:`counted_ranks`: :mod:`test_trusted_memory` has late ones.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from counted_ranks import counted_bytes

from emulated.memory import LiveBytes
from hetspmd.cluster.cluster import Cluster
from hetspmd.cost.machine_turn_memory import inside_bytes_in_turns
from hetspmd.dist.communicator import Communicator
from hetspmd.dist.simulated_world import run_ranks
from hetspmd.lower import active_ranks
from hetspmd.lower.lowering import turns_of
from hetspmd.optimize.compile_options import CompileOptions
from hetspmd.optimize.compiler import compile_plan, plan_for
from hetspmd.optimize.in_micro_batches import in_micro_batches
from hetspmd.optimize.partition import partition, segmented
from hetspmd.optimize.zero_levels import repeated_in
from hetspmd.plan.plan import Plan
from hetspmd.plan.reports import Inside
from hetspmd.program.levels import Both, between
from hetspmd.program.machine_turn_layout import MachineTurnLayout
from hetspmd.program.micro_batches import micro_batches
from hetspmd.program.program import Communicate
from hetspmd.rules.theory import Theory, derive
from hetspmd.run.module import HAP
from hetspmd.run.shard_tensors import plain
from hetspmd.search import constraints as known
from hetspmd.trace.blocks import chooser
from hetspmd.trace.trace import trace
from trust.models import MODELS, Built
from workbench import cluster

CLOSE, SPARED = 0.05, 0.05
"""Tolerances: nothing holds more than 5 % over what is predicted, nor less. Ranks are threads here, and when one
sees that a sum is complete depends on the others (3.5 % more in some runs: GPT-2, data parallel; 5.7 % in one of
many: ViT, data parallel), so that a step that holds more is counted again; a gather of ZeRO may be let go of an
instruction earlier than predicted (4.0 % less: the mixture of experts)."""
AGAIN = 2
"""Times that a step is counted again."""
SIZES: dict[str, dict[str, int]] = {
    "GPT-2": {"batch": 12, "tokens": 32}, "Llama": {"batch": 12, "tokens": 32}, "ViT": {"batch": 7},
    "BERT": {"batch": 12, "tokens": 32}, "ResNet-50": {"batch": 10, "size": 64},
    "VGG19": {"batch": 8, "size": 64}, "BERT-MoE": {"batch": 12, "tokens": 32},
}  # fmt: skip
KINDS = {
    "data parallel": known.data_parallel, "ZeRO": known.zero_like, "tensor parallel": known.tensor_parallel,
}  # fmt: skip


@cache
def built(name: str) -> Built:
    torch.manual_seed(0)
    model, batch = MODELS[name](**SIZES[name])
    return model.train(), batch


@cache
def theory_of(name: str) -> Theory:
    model, batch = built(name)
    return derive(trace(model, (), batch))


def plan_of(name: str, kind: str, speeds: tuple[float, ...]) -> Plan:
    devices = cluster(*speeds)
    if kind == "compiled":
        model, batch = built(name)
        return compile_plan(model, (), batch, devices)
    shares = tuple(s / sum(speeds) for s in speeds)
    return plan_for(theory_of(name), devices, KINDS[kind](theory_of(name)), shares)


def counted(name: str, plan: Plan) -> list[int]:
    """The most bytes that each rank holds, on prompt links."""
    return counted_bytes(plan, built(name))


def check(name: str, kind: str, speeds: tuple[float, ...]) -> None:
    plan = plan_of(name, kind, speeds)
    predicted = plan.cost.memory_bytes
    held = counted(name, plan)
    for _ in range(AGAIN):
        if all(held[rank] <= predicted[rank] * (1 + CLOSE) for rank in plan.active):
            break
        held = [min(pair) for pair in zip(held, counted(name, plan), strict=True)]
    for rank in plan.active:
        assert held[rank] <= predicted[rank] * (1 + CLOSE), (name, kind, rank)
        assert held[rank] >= predicted[rank] * (1 - SPARED), (name, kind, rank)


@pytest.mark.parametrize("kind", [*KINDS, "compiled"])
def test_predicted_as_counted(kind: str) -> None:
    check("GPT-2", kind, (4, 2, 1))


class Attention(torch.nn.Module):
    """Two layers of torch's own, which copy what they transpose."""

    def __init__(self) -> None:
        super().__init__()
        layer = torch.nn.TransformerEncoderLayer(128, 4, 256, dropout=0.0, batch_first=True)
        self.layers = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.layers(x)
        return y.square().mean()


def test_copies_of_transposed_tensors_as_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, batch = Attention(), {"x": torch.randn(96, 64, 128)}
    monkeypatch.setitem(globals(), "built", lambda _name: (model, batch))
    theory = derive(trace(model, (), batch))
    plan = plan_for(theory, cluster(4, 2), known.data_parallel(theory), (2 / 3, 1 / 3))
    for held, predicted in zip(counted("", plan), plan.cost.memory_bytes, strict=True):
        assert predicted * (1 - SPARED) <= held <= predicted * 1.02


def prompt_peaks(plan: Plan) -> tuple[int, ...]:
    """What is predicted of a plan in micro-batches where collectives end at once, as they do here. Devices that do
    not wait for each other in the loop are apart at its end; then the first hold buffers until the last comes."""
    return plan.step.executed.at(plan.lengths).peaks


@pytest.mark.parametrize("kind", KINDS)
def test_micro_batches_as_counted(kind: str) -> None:
    """In micro-batches of the same number of samples, the sums of gradients among what is held."""
    speeds = (4, 2, 1)
    theory, batches = in_micro_batches(theory_of("GPT-2"), 3)
    shares = tuple(s / sum(speeds) for s in speeds)
    plan = plan_for(theory, cluster(*speeds), KINDS[kind](theory), shares, batches=batches)
    held = counted("GPT-2", plan)
    for rank, predicted in enumerate(prompt_peaks(plan)):
        assert predicted * (1 - SPARED) <= held[rank] <= predicted * (1 + CLOSE), (kind, rank)


@pytest.mark.parametrize("level", [1, 2, 3])
def test_levels_of_zero_as_counted(level: int) -> None:
    """With collectives outside of the loop and in it."""
    speeds = (4, 2, 1)
    theory, batches = in_micro_batches(theory_of("GPT-2"), 3)
    assert batches is not None
    batches = replace(batches, repeated=repeated_in(theory, batches, level))
    shares = tuple(s / sum(speeds) for s in speeds)
    plan = plan_for(theory, cluster(*speeds), known.zero(theory, level), shares, batches=batches)
    held = counted("GPT-2", plan)
    for rank, predicted in enumerate(prompt_peaks(plan)):
        assert predicted * (1 - SPARED) <= held[rank] <= predicted * (1 + CLOSE), (level, rank)


def test_segments_in_micro_batches_as_counted() -> None:
    """With ratios of their own, and what is exchanged in each micro-batch."""
    theory, _ = in_micro_batches(theory_of("GPT-2"), 3)
    theory = segmented(theory, partition(theory, [1.0] * len(theory.graph.instructions), 2))
    batches = micro_batches(theory, 3)
    ratios = ((0.6, 0.3, 0.1), (0.3, 0.3, 0.4))
    plan = plan_for(theory, cluster(4, 2, 1), known.data_parallel(theory), ratios, batches=batches)
    held = counted("GPT-2", plan)
    for rank, predicted in enumerate(prompt_peaks(plan)):
        assert predicted * (1 - SPARED) <= held[rank] <= predicted * (1 + CLOSE), rank


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_recomputation_as_counted(kind: str, count: int) -> None:
    """Blocks that are computed again, at once and in micro-batches: counted as predicted, and less."""
    speeds, (model, batch) = (4, 2, 1), built("GPT-2")
    shares = tuple(s / sum(speeds) for s in speeds)
    plans = []
    for how in ("none", "all"):
        theory, batches = in_micro_batches(derive(trace(model, (), batch, recompute=chooser(how))), count)
        plans.append(plan_for(theory, cluster(*speeds), KINDS[kind](theory), shares, batches=batches))
    plain, plan = plans
    assert len(plan.graph.recomputed) == 4
    held = counted("GPT-2", plan)
    for rank, predicted in enumerate(plan.cost.memory_bytes if count == 1 else prompt_peaks(plan)):
        assert predicted * (1 - SPARED) <= held[rank] <= predicted * (1 + CLOSE), (kind, rank)
        assert predicted <= plain.cost.memory_bytes[rank], (kind, rank)
    # The device with most of the batch; elsewhere, and in micro-batches, the optimizer's step is the peak.
    if count == 1:
        assert max(held[0], plan.cost.memory_bytes[0]) < 0.9 * plain.cost.memory_bytes[0]


def in_turn() -> list[tuple[str, str, tuple[float, ...]]]:
    """Each model with two kinds of program in turn, on two devices and on four."""
    speeds: tuple[tuple[float, ...], ...] = ((6, 1, 1, 1), (2, 1))
    kinds = [*KINDS, "compiled"]
    return [(m, k, speeds[(i + j) % 2]) for i, m in enumerate(SIZES) for j, k in enumerate(kinds)
            if (i + j // 2) % 2 == 0]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("name", "kind", "speeds"), in_turn())
def test_predicted_as_counted_of_each_model(name: str, kind: str, speeds: tuple[float, ...]) -> None:
    check(name, kind, speeds)


def test_a_meta_model_takes_the_memory_of_its_shards() -> None:
    """Whole parameters would be three times as much as the smallest rank's shards and more."""
    plan = plan_of("GPT-2", "ZeRO", (4, 2, 1))
    model, _ = built("GPT-2")
    models = [copy.deepcopy(model) for _ in active_ranks(plan)]
    for each in models:
        made = {p: torch.nn.Parameter(p.to("meta")) for p in each.parameters()}  # tied ones stay tied
        for module in each.modules():
            module._parameters.update({k: made[p] for k, p in module._parameters.items() if p is not None})
    _ = plan.theory, plan.digest

    def body(communicator: Communicator) -> tuple[int, int]:
        with LiveBytes() as counter:
            hap = HAP(models[communicator.rank], plan.cluster, plan=plan, process_group=communicator)
            return counter.peak, sum(p.nbytes for p in plain(hap.parameters()))

    whole = sum(p.nbytes for p in model.parameters())
    found = run_ranks(plan.world, body)
    assert min(own for _, own in found) < 0.3 * whole
    for peak, own in found:
        assert own <= peak <= own + 2**17  # constants of the graphs


def machines(*accelerators: int) -> Cluster:
    """Machines of so many accelerators, each slower than the one before, on a fast network: all take part."""
    entries: list[dict[str, Any]] = []
    for i, count in enumerate(accelerators):
        entry: dict[str, Any] = {"name": f"n{i}", "flops": 2e9 / (i + 1), "memory": "16GiB"}
        if count > 1:
            entry |= {"accelerators": count, "inside": {"bandwidth": "40GB/s", "latency": "1us"}}
        entries.append(entry)
    return Cluster.load({"devices": entries, "network": {"bandwidth": "10GB/s", "latency": "10us"}})


@pytest.mark.parametrize(
    "name", ["GPT-2", *(pytest.param(n, marks=pytest.mark.slow) for n in SIZES if n != "GPT-2")]
)
def test_accelerators_of_machines_as_counted(name: str) -> None:
    """The first accelerator of each machine holds the most, and what is predicted of it."""
    accelerators = (2, 3)
    model, batch = built(name)
    options = CompileOptions(machines="virtual")
    plan = compile_plan(model, (), batch, machines(*accelerators), options)
    assert plan.inside is not None
    assert plan.active == (0, 1)
    held = counted(name, plan)
    for _ in range(AGAIN):
        if close(plan.inside, held, accelerators):
            break
        held = [min(pair) for pair in zip(held, counted(name, plan), strict=True)]
    assert close(plan.inside, held, accelerators), (plan.inside.memory_bytes, held)


def prompt_peaks_of_machines(plan: Plan) -> tuple[int, ...]:
    """What is predicted of machines in micro-batches where collectives between them end before the next op."""
    assert plan.batches is not None
    steps, layout = turns_of(plan, plan.batches)
    assert isinstance(layout, MachineTurnLayout)
    arrivals: dict[Communicate, int] = {}
    waiting: list[Communicate] = []
    for _, step in steps.together(("before", "in", "after")):
        if isinstance(step, Both):
            arrivals |= dict.fromkeys(waiting, step.instruction)
            waiting = []
        else:
            waiting += [Communicate(m.tensor, m.kind, m.source, m.target) for m in between(step)]
    return inside_bytes_in_turns(layout, steps, arrivals)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::hetspmd.errors.DroppedOutputWarning")
@pytest.mark.parametrize("level", [0, 1, 2, 3])
@pytest.mark.parametrize(("count", "accelerators"), [(2, (2, 3)), (3, (1, 2)), (3, (4, 2))])
def test_accelerators_of_machines_in_micro_batches_as_counted(
    level: int, count: int, accelerators: tuple[int, ...]
) -> None:
    """At levels of ZeRO of the machines, with collectives before, in and after the loop, on prompt links."""
    theory, batches = in_micro_batches(theory_of("GPT-2"), count)
    assert batches is not None
    batches = replace(batches, repeated=repeated_in(theory, batches, level))
    devices = machines(*accelerators)
    speeds = [k / (i + 1) for i, k in enumerate(accelerators)]
    ratios = tuple(speed / sum(speeds) for speed in speeds)
    plan = plan_for(theory, devices, known.zero(theory, level), ratios, batches=batches)
    assert plan.inside is not None
    inside = replace(plan.inside, memory_bytes=prompt_peaks_of_machines(plan))
    assert all(a <= b for a, b in zip(inside.memory_bytes, plan.inside.memory_bytes, strict=True))
    held = counted("GPT-2", plan)
    for _ in range(AGAIN):
        if close(inside, held, accelerators):
            break
        held = [min(pair) for pair in zip(held, counted("GPT-2", plan), strict=True)]
    assert close(inside, held, accelerators), (inside.memory_bytes, held)


def close(inside: Inside, held: list[int], accelerators: tuple[int, ...]) -> bool:
    """Whether the most that an accelerator of each machine is counted to hold is what is predicted."""
    first = 0
    for predicted, count in zip(inside.memory_bytes, accelerators, strict=True):
        most = max(held[first : first + count])
        if most != held[first] or not predicted * (1 - SPARED) <= most <= predicted * (1 + CLOSE):
            return False
        first += count
    return True
