"""Machines of several accelerators: cluster files, figures of virtual devices, what is added inside, memory."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import hetspmd
from hetspmd.cluster.cluster import Cluster
from hetspmd.cluster.devices import Device, Network, virtual_device
from hetspmd.cluster.machines import flat, machine_of, ranks_of
from hetspmd.cost.level_costs import inside_seconds
from hetspmd.cost.level_memory import inside_bytes
from hetspmd.cost.model import CostModel
from hetspmd.errors import ClusterError, MemoryLimitError
from hetspmd.program.lengths import lengths_for
from hetspmd.program.level_layout import LevelLayout
from hetspmd.program.levels import Across, Both, InsideCollective, between, within
from hetspmd.rules.theory import derive
from hetspmd.search import constraints as known
from hetspmd.search.search import Limits, search
from hetspmd.search.space import search_space
from hetspmd.trace.trace import trace
from memory_cases import stack
from scheduled import nested_steps

FILE = """\
devices:
  - {name: node, count: 2, accelerators: 4, flops: 10e12, memory: 16GiB, memory_bandwidth: 1TB/s,
     inside: {bandwidth: 100GB/s, latency: 5us}}
  - {name: lone, flops: 20e12}
network: {bandwidth: 10GB/s, latency: 50us}
"""


def test_reads_machines() -> None:
    cluster = Cluster.from_text(FILE)
    each = Device("node", {"default": 10e12}, 16 * 2**30, 1e12)
    node, lone = cluster.devices[0], cluster.devices[2]
    assert node == virtual_device(each, 4, Network(100e9, 5e-6))
    assert (node.rate("float32"), node.memory, node.memory_bandwidth) == (40e12, 64 * 2**30, 4e12)
    assert node.update == pytest.approx(1 / (20 / 1e12 + 2 * 3 / 4 / 100e9))
    assert lone.machine is None
    assert (cluster.world, cluster.ranks, cluster.accelerators) == (3, 9, (4, 4, 1))
    assert machine_of(cluster) == (0, 0, 0, 0, 1, 1, 1, 1, 2)
    assert ranks_of(cluster, (0, 2)) == (0, 1, 2, 3, 8)
    assert Cluster.load(cluster.to_dict()) == Cluster.from_text(cluster.to_text()) == cluster
    assert flat(cluster) == Cluster((each,) * 8 + (lone,), Network(10e9, 50e-6))
    assert flat(flat(cluster)) == flat(cluster)
    assert "node (4)" in str(cluster)
    alone = cluster.part((1,))
    assert flat(alone).network == Network(100e9, 5e-6), "nothing crosses the network between machines"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{accelerators: 4, flops: 1e12}", "accelerators and lacks the key 'inside'; add inside"),
        ("{inside: {bandwidth: 1GB/s}, flops: 1e12}", "inside joins several accelerators, and there is one"),
        ("{accelerators: 0, flops: 1e12}", "whole number from 1"),
        ("{accelerators: 2, inside: {latency: 1us}, flops: 1e12}", "inside lacks the key 'bandwidth'"),
        ("{accelerators: 2, inside: {bandwidth: 1GB/s, lag: 1}, flops: 1e12}", "inside has the unknown key 'lag'"),
    ],
)  # fmt: skip
def test_mistakes_are_named(text: str, message: str) -> None:
    with pytest.raises(ClusterError, match="<cluster>:1:") as caught:
        Cluster.from_text(f"devices: [{text}]")
    assert message in str(caught.value)


def test_measured_figures_are_not_of_machines() -> None:
    measured = "measured: {version: 1, about: {}, collectives: [], ops: []}"
    with pytest.raises(ClusterError, match="list each accelerator by itself"):
        Cluster.from_text(FILE + measured)
    with pytest.raises(ClusterError, match="two or more"):
        virtual_device(Device("d", {"default": 1.0}), 1, Network(1.0))


class Linear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(16, 8, bias=False)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(self.a(x), y, reduction="sum")


def linear(rows: int = 12) -> tuple[nn.Module, tuple[torch.Tensor, torch.Tensor]]:
    return Linear(), (torch.randn(rows, 16), torch.randn(rows, 8))


def test_data_parallel_in_closed_form() -> None:
    """Two machines of four: gradients of 512 bytes and a loss are summed inside, between, and handed out."""
    model, example = linear()
    theory = derive(trace(model, example, {}))
    each = Device("d", {"default": 1e12}, launch=1e-9)
    inside = Network(1e9, 1e-6)
    cluster = Cluster((virtual_device(each, 4, inside),) * 2, Network(1e8, 1e-5))
    costs = CostModel(theory, cluster)
    lengths = lengths_for(theory.axes, (0.5, 0.5))
    outer = search(search_space(theory, known.data_parallel(theory)), costs, lengths, Limits()).program
    nested = nested_steps(theory, outer, outer)
    layout = LevelLayout(theory, lengths, (4, 4))
    steps = (*nested.forward, *nested.backward)
    sums = [s for s in steps if isinstance(s, Across)]
    assert not any(isinstance(s, InsideCollective) for s in steps), (
        "sums inside are the first step of those between machines"
    )
    assert sorted(theory.graph.tensors[s.tensor].nbytes for s in sums) == [4, 512]
    alike = [s for s in steps if isinstance(s, Both) and s.inner.factor is None]
    # Down and up: two latencies; a gradient's bytes count as computation, the loss's here.
    want = 2 * 2e-6 + 2 * 4 / 1e9
    assert all(theory.rules[s.instruction].flops == 0 for s in alike)
    assert inside_seconds(costs, lengths, nested, layout) == pytest.approx(want, rel=1e-6)
    parameters = 512 * (1 + 1) + 128 * 8
    batch = 12 * (16 + 8) * 4
    held = inside_bytes(layout, nested)
    assert held[0] == held[1]
    # Beside them at most what the gradient's collective holds and the divided activations.
    assert parameters + batch <= held[0] <= parameters + batch + 3 * 512 + 3 * 12 * 8 * 4 / 8 + 600


class Layers(nn.Module):
    """Four weights of one dtype, whose gradients may share a bucket."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x.sum()


def test_gradients_share_a_bucket_between_machines() -> None:
    """Four gradients of 1024 bytes are one transfer, and have one latency down and one up."""
    theory = derive(trace(Layers(), (torch.randn(12, 16),), {}))
    inside = Network(1e9, 1e-6)
    machine = virtual_device(Device("d", {"default": 1e12}, launch=1e-9), 4, inside)
    costs = CostModel(theory, Cluster((machine,) * 2, Network(1e8, 1e-5)))
    lengths = lengths_for(theory.axes, (0.5, 0.5))
    outer = search(search_space(theory, known.data_parallel(theory)), costs, lengths, Limits()).program
    layout = LevelLayout(theory, lengths, (4, 4))
    found = {}
    for size in (0, 3000, 10_000):
        nested = nested_steps(theory, outer, outer, size)
        moves = [between(s) for s in nested.backward if between(s)]
        assert sorted(m.tensor for of in moves for m in of) == sorted(g.tensor for g in outer.gradients), (
            "every gradient crosses once"
        )
        found[size] = [len(of) for of in moves], inside_seconds(costs, lengths, nested, layout)
    assert [counts for counts, _ in found.values()] == [[1, 1, 1, 1], [2, 2], [4]]
    assert found[0][1] - found[3000][1] == pytest.approx(2 * 2e-6)
    assert found[0][1] - found[10_000][1] == pytest.approx(3 * 2e-6)


def test_gradients_share_a_bucket_inside() -> None:
    """Machines that hold all of the batch, which their accelerators divide: four gradients are summed inside."""
    theory = derive(trace(Layers(), (torch.randn(12, 16),), {}))
    machine = virtual_device(Device("d", {"default": 1e12}, launch=1e-9), 4, Network(1e9, 1e-6))
    costs = CostModel(theory, Cluster((machine,) * 2, Network(1e8, 1e-5)))
    lengths = lengths_for(theory.axes, (0.5, 0.5))
    space = search_space(theory, known.data_parallel(theory))
    inner = search(space, costs, lengths, Limits()).program
    whole = search(search_space(theory, known.single_device(theory, {})), costs, lengths, Limits()).program
    layout = LevelLayout(theory, lengths, (4, 4))
    found = {}
    for size in (0, 3000, 10_000):
        nested = nested_steps(theory, whole, inner, 0, size)
        moves = [within(s) for s in nested.backward if within(s)]
        assert sorted(m.tensor for of in moves for m in of) == sorted(g.tensor for g in whole.gradients)
        found[size] = [len(of) for of in moves], inside_seconds(costs, lengths, nested, layout)
    assert [counts for counts, _ in found.values()] == [[1, 1, 1, 1], [2, 2], [4]]
    assert found[0][1] - found[3000][1] == pytest.approx(2 * 2e-6)
    assert found[0][1] - found[10_000][1] == pytest.approx(3 * 2e-6)


def test_memory_follows_the_shares() -> None:
    """With a large batch, activations do: a machine with all of it holds the most, one with nothing the least."""
    model, example = linear(1200)
    theory = derive(trace(model, example, {}))
    costs = CostModel(theory, Cluster((Device("d", {"default": 1e12}),) * 2, Network(1e8, 1e-5)))
    lengths = lengths_for(theory.axes, (0.5, 0.5))
    program = search(search_space(theory, known.data_parallel(theory)), costs, lengths, Limits()).program
    nested = nested_steps(theory, program, program)

    def held(one: float, accelerators: tuple[int, int]) -> tuple[int, ...]:
        return inside_bytes(
            LevelLayout(theory, lengths_for(theory.axes, (one, 1 - one)), accelerators), nested
        )

    even = held(0.5, (4, 4))
    assert held(1.0, (4, 4))[0] > even[0] == even[1] > held(1.0, (4, 4))[1]
    assert held(0.5, (2, 4))[0] > even[0] > held(0.5, (8, 4))[0]


def test_memory_of_each_accelerator_counts() -> None:
    model, example = linear()
    cluster = Cluster.load({
        "devices": [{"name": "n", "count": 2, "accelerators": 2, "flops": 1e9, "memory": 1e6,
                     "inside": {"bandwidth": "10GB/s", "latency": "1us"}}],
        "network": {"bandwidth": "1GB/s", "latency": "1us"},
    })  # fmt: skip
    plan = hetspmd.compile(model, example, cluster, machines="virtual")
    assert plan.inside is not None
    most = max(plan.inside.memory_bytes)
    assert 0 < most < 1e6
    assert plan.cost.memory_bytes == tuple(2 * n for n in plan.inside.memory_bytes)

    def with_memory(n: float) -> Cluster:
        each = [d.machine for d in cluster.devices]
        made = [virtual_device(replace(m.each, memory=n), 2, m.inside) for m in each if m is not None]
        return replace(cluster, devices=tuple(made))

    enough = hetspmd.compile(model, example, with_memory(most), machines="virtual")
    assert enough.inside is not None
    assert max(enough.inside.memory_bytes) <= most
    with pytest.raises(MemoryLimitError, match="lacks"):
        hetspmd.compile(model, example, with_memory(1500.0), machines="virtual")
    assert math.isfinite(enough.cost.step_seconds)


def test_an_error_tells_the_memory_that_accelerators_have() -> None:
    """Machines are planned again with less memory than they have, which is nobody's."""
    model, example = stack(dtype=torch.float64)
    inside = Network(1e10, 1e-6)
    each = Device("n", {"default": 1e10}, memory=524_300.0, memory_bandwidth=1e11)
    machine = virtual_device(each, 2, inside)
    cluster = Cluster((machine, machine), Network(1e9, 1e-6))
    with pytest.raises(MemoryLimitError) as caught:
        hetspmd.compile(model, example, cluster, machines="virtual")
    assert caught.value.lacking
    assert {capacity for _, capacity in caught.value.lacking.values()} == {524_300}
