"""Parameters that are stored apart from their use: the graph's readers and gradients are copies."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hetspmd.rules.theory import derive
from hetspmd.trace.cuts import with_cuts
from hetspmd.trace.graph import REBALANCE, Graph
from hetspmd.trace.storage_axes import with_storage
from hetspmd.verify.reference import run_reference
from nets import by_name, parameter, traced
from workbench import randomness


def layers(net: Any, x: torch.Tensor) -> torch.Tensor:
    return (torch.tanh(x @ net.v) @ net.w).pow(2).sum()


def graph_of(training: bool = True) -> Graph:
    return traced(layers, torch.randn(4, 6), training=training, v=parameter(6, 8), w=parameter(8, 6))


def copies(graph: Graph) -> dict[int, int]:
    """What is copied to its copy."""
    return {i.inputs[0]: i.outputs[0] for i in graph.instructions if i.op == REBALANCE}


def test_readers_read_a_copy() -> None:
    graph = graph_of(training=False)
    v = by_name(graph)["v"].tensor
    parted = with_storage(graph, {v: 0})
    assert parted.stored_apart == {v: 0}
    assert "v: float32[6, 8] = hetspmd.parameter(stored=0)" in str(parted)
    (reader,) = parted.consumers[v]
    assert parted.instructions[reader].op == REBALANCE
    (before,) = graph.consumers[v]
    (after,) = parted.consumers[copies(parted)[v]]
    assert parted.instructions[after].op == graph.instructions[before].op
    assert len(parted.instructions) == len(graph.instructions) + 1
    assert parted.tensors[: len(graph.tensors)] == graph.tensors


def test_the_second_reading_and_the_gradient_are_copied_too() -> None:
    graph = graph_of()
    w = by_name(graph)["w"]
    parted = with_storage(graph, {w.tensor: 1})
    stored = by_name(parted)["w"]
    assert stored.gradient != w.gradient
    assert copies(parted)[w.gradient] == stored.gradient
    again = next(i for i, t in parted.second_reads.items() if t == w.tensor)
    (second,) = parted.instructions[again].outputs
    (reader,) = parted.consumers[second]
    assert parted.instructions[reader].op == REBALANCE
    assert set(parted.second_reads.values()) == set(graph.second_reads.values())
    assert [i.id for i in parted.instructions] == list(range(len(parted.instructions)))


def test_it_computes_the_same() -> None:
    graph = graph_of()
    values = {p.name: torch.randn(graph.tensors[p.tensor].shape) for p in graph.parameters}
    x = torch.randn(4, 6)
    want = run_reference(derive(graph), values, {}, [x], randomness=randomness())
    parted = with_storage(graph, {p.tensor: 0 for p in graph.parameters})
    got = run_reference(derive(parted), values, {}, [x], randomness=randomness())
    assert torch.equal(got.loss, want.loss)
    assert all(torch.equal(got.gradients[n], g) for n, g in want.gradients.items())


def test_one_gradient_of_two_parameters() -> None:
    """Only the one that is stored apart has a copy of it."""
    graph = traced(lambda n, x: (x * (n.v + n.w)).sum(), torch.randn(4), v=parameter(4), w=parameter(4))
    assert len({p.gradient for p in graph.parameters}) == 1
    v, w = (by_name(graph)[name] for name in "vw")
    parted = by_name(with_storage(graph, {v.tensor: 0}))
    assert parted["w"] == w
    assert parted["v"].gradient != v.gradient


def test_a_parameter_that_nothing_reads() -> None:
    graph = traced(lambda n, x: x.sum() * n.w.sum(), torch.randn(4), v=parameter(4), w=parameter(4))
    v = by_name(graph)["v"].tensor
    parted = with_storage(graph, {v: 0})
    assert parted.stored_apart == {v: 0}
    assert len(parted.instructions) == len(graph.instructions)


def test_segments_stay() -> None:
    graph = graph_of()
    half = len(graph.instructions) // 2
    cut = with_cuts(graph, [int(i >= half) for i in range(len(graph.instructions))], lambda _: True)
    parted = with_storage(cut, {p.tensor: 0 for p in cut.parameters})
    assert len(parted.segments) == len(parted.instructions)
    for p in parted.parameters:
        assert p.gradient is not None
        assert parted.segment(p.gradient) == parted.segment(p.tensor)
        used = copies(parted)[p.tensor]
        assert parted.segment(used) == parted.segment(p.tensor)


def test_what_cannot_be_stored_apart() -> None:
    graph = graph_of()
    v = by_name(graph)["v"].tensor
    assert with_storage(graph, {}) is graph
    for wrong in ({v: 2}, {v: -1}, {graph.inputs[0].tensor: 0}):
        with pytest.raises(ValueError, match="cannot be stored apart"):
            with_storage(graph, wrong)
    with pytest.raises(ValueError, match="cannot be stored apart"):
        with_storage(with_storage(graph, {v: 0}), {v: 1})
