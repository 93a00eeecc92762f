"""Which collectives share a bucket, and that nothing else changes."""

from __future__ import annotations

from collections import Counter

import pytest
from cost_graphs import cluster
from program_builder import cheap_random_program, data_parallel, random_program
from small_models import case

import workbench  # isort: split

from hetspmd.cluster.cluster import Cluster
from hetspmd.cluster.collective_kinds import KINDS
from hetspmd.cluster.curves import Curve
from hetspmd.cluster.devices import Device, Network
from hetspmd.cost.coalesce import FULL, LARGEST, bucket_bytes
from hetspmd.cost.model import CostModel
from hetspmd.placement import PARTIAL, REPLICATE
from hetspmd.program.buckets import TINY, Bucket, Scheduled, bucketed, transfer_text
from hetspmd.program.dataflow import reads, writes
from hetspmd.program.program import Communicate, Compute, Program, Step
from scheduled import order_of

NAMES = ("mlp", "conv", "attention")


def flat(steps: tuple[Scheduled, ...]) -> list[Step]:
    return [m for s in steps for m in (s.members if isinstance(s, Bucket) else (s,))]


@pytest.mark.parametrize("size", [100, 1_000, 100_000])
def test_buckets_of_random_programs(size: int) -> None:
    """The same steps, computations in the same order; nothing is read before it is there; one kind, one dtype, no
    more bytes than a bucket has; nothing starts earlier than it would have."""
    found = 0
    for name in NAMES:
        theory = case(name).theory
        graph = theory.graph
        for seed in range(20):
            program = (random_program if seed % 2 else cheap_random_program)(theory, seed)
            plain, shared = order_of(theory, program), order_of(theory, program, size)
            made = set()
            for before, after in ((plain.forward, shared.forward), (plain.backward, shared.backward)):
                assert Counter(map(id, flat(after))) == Counter(map(id, before))
                assert [s for s in after if isinstance(s, Compute)] == [
                    s for s in before if isinstance(s, Compute)
                ]
                inside = {key for s in before for key in writes(graph, s)}
                for step in after:
                    for key in reads(graph, step):
                        whole = (key[0], REPLICATE)
                        assert key in made or whole in made or not {key, whole} & inside, (name, seed)
                    made.update(writes(graph, step))
                    if isinstance(step, Bucket):
                        found += 1
                        tensors = [graph.tensors[m.tensor] for m in step.members]
                        assert len(step.members) > 1
                        assert {m.kind for m in step.members} == {step.kind}
                        assert KINDS[step.kind].coalesces
                        assert len({t.dtype for t in tensors}) == 1
                        assert sum(t.nbytes for t in tensors) <= size
                for i, step in enumerate(after):
                    if isinstance(step, Bucket):
                        behind = after[i + 1 :]
                        first = before.index(step.members[-1])
                        assert all(before.index(s) > first for s in behind if isinstance(s, Compute))
    assert found > 20


def test_gradients_share_buckets_by_size() -> None:
    theory = workbench.traced("gpt2").theory
    graph = theory.graph
    program = data_parallel(theory, graph.inputs[0].tensor)
    gradients = {p.gradient for p in graph.parameters}
    sizes = {t: graph.tensors[t].nbytes for t in gradients if t is not None}
    for size in (10_000, 100_000, 10**9):
        backward = order_of(theory, program, size).backward
        alone = [s for s in backward if isinstance(s, Communicate) and graph.tensors[s.tensor].nbytes < size]
        buckets = [s for s in backward if isinstance(s, Bucket)]
        assert buckets
        together = [sum(graph.tensors[m.tensor].nbytes for m in b.members) for b in buckets]
        assert len(alone) + len(buckets) <= 2 * sum(sizes.values()) / size + 2
        assert max(together) <= size
    assert [s for s in order_of(theory, program, 0).backward if isinstance(s, Bucket)] == []


def test_both_sums_of_a_normalisation_share_one() -> None:
    """Batch norm's backward reduces two sums, the later of which is waited for first."""
    theory = workbench.traced("resnet50").theory
    program = data_parallel(theory, theory.graph.inputs[0].tensor)
    size = 10**6
    sums = [
        s
        for s in order_of(theory, program, size).backward
        if isinstance(s, Bucket)
        and len(s.members) == 2
        and sum(theory.graph.tensors[m.tensor].nbytes for m in s.members) * TINY <= size
    ]
    plain = order_of(theory, program).backward
    for bucket in sums:
        one, other = (plain.index(m) for m in bucket.members)
        assert one < other
    assert len(sums) >= 10


def test_nothing_that_is_waited_for_sooner_is_put_off() -> None:
    """A collective whose result is read before the other's stays where it is."""
    theory = case("mlp").theory
    graph = theory.graph
    program = data_parallel(theory, graph.inputs[0].tensor)
    steps = list(order_of(theory, program).backward)
    moves = [s for s in steps if isinstance(s, Communicate)]
    reader = next(
        s for s in steps if isinstance(s, Compute) and not graph.instructions[s.instruction].is_source
    )
    tensors = graph.instructions[reader.instruction].inputs
    early = Communicate(tensors[0], "all_reduce", PARTIAL, REPLICATE)
    order = Program((early, reader, moves[0]), None, (), (), ())
    assert bucketed(graph, order, range(3), 10**9)[0] == (0,)


def test_the_size_follows_from_the_latency() -> None:
    def of(latency: float, bandwidth: float, **more: float) -> int:
        devices = tuple(Device(f"d{i}", {"default": 1e12}, **more) for i in range(4))
        return bucket_bytes(Cluster(devices, Network(bandwidth, latency)))

    assert of(50e-6, 1e9) == int(FULL * 100e-6 / (1.5 / 1e9))
    assert of(100e-6, 1e9) == pytest.approx(2 * of(50e-6, 1e9), abs=2)
    assert of(50e-6, 2e9) == pytest.approx(2 * of(50e-6, 1e9), abs=2)
    assert of(50e-6, 1e9, issue=100e-6) == pytest.approx(2 * of(50e-6, 1e9), abs=2)
    assert of(1.0, 1e9) == LARGEST
    assert bucket_bytes(Cluster((Device("d", {"default": 1e12}),))) == 0
    devices = tuple(Device(f"d{i}", {"default": 1e12}) for i in range(2))
    curves = (
        Curve("all_reduce", 2, latency=1e-3, per_byte=1e-8),
        Curve("all_reduce", 2, latency=0.0, per_byte=2e-8, above=1e6),
        Curve("all_gather", 2, latency=5.0, per_byte=1.0),
    )
    assert bucket_bytes(Cluster(devices, Network(1.0, 1.0), curves)) == pytest.approx(FULL * 1e-3 / 2e-8)


def test_one_latency_for_a_bucket_and_a_part_of_it_for_a_gradient() -> None:
    theory = case("mlp").theory
    graph = theory.graph
    model = CostModel(theory, cluster(1e8, 2e8, latency=1e-3, bandwidth=1e6))
    gradients = [p.gradient for p in graph.parameters if p.gradient is not None]
    assert set(gradients) <= theory.deferred
    assert graph.loss not in theory.deferred
    members = tuple(Communicate(g, "all_reduce", PARTIAL, REPLICATE) for g in gradients)
    alone = [model.transfer_forms(m)[0] for m in members]
    together = model.transfer_forms(Bucket(members))
    saved = sum(f.constant for f in alone) - sum(f.constant for f in together)
    assert saved == pytest.approx(2e-3 * (len(members) - 1))
    for move, form in zip(members, alone, strict=True):
        nbytes = graph.tensors[move.tensor].nbytes
        assert nbytes < model.bucket_bytes
        shared = model.shared_form(move.tensor, move.source, move.target, move.kind)
        assert form.constant - shared.constant == pytest.approx(2e-3 * (1 - nbytes / model.bucket_bytes))
    loss = model.shared_form(graph.loss or 0, PARTIAL, REPLICATE, "all_reduce")
    assert loss == model.move_form(graph.loss or 0, PARTIAL, REPLICATE, "all_reduce")


def test_a_bucket_for_people() -> None:
    members = tuple(Communicate(t, "all_reduce", PARTIAL, REPLICATE) for t in range(4))
    names = ["a", "b", "c", "d"]
    assert transfer_text(Bucket(members), names) == "All-Reduce(a, b and 2 more)"
    assert transfer_text(Bucket(members[:2]), names) == "All-Reduce(a, b)"
    assert transfer_text(members[1], names) == "All-Reduce(b)"


def test_forced_data_parallel_has_few_collectives() -> None:
    """What DistributedDataParallel does with buckets: not one collective per parameter."""
    theory = workbench.traced("gpt2").theory
    program = data_parallel(theory, theory.graph.inputs[0].tensor)
    model = CostModel(theory, cluster(1e12, 1e12, latency=1e-3, bandwidth=1e9))
    order = order_of(theory, program, model.bucket_bytes)
    plain = order_of(theory, program)
    count = sum(isinstance(s, (Communicate, Bucket)) for s in (*order.forward, *order.backward))
    assert count < 0.3 * sum(isinstance(s, Communicate) for s in (*plain.forward, *plain.backward))
