"""The search against closed forms: what it must choose, at exactly which cost, on an MLP whose numbers are known.

``y = relu(x U) V``, loss = sum(y), with the gradients of U and V; B samples, width K, H hidden. The five
matrix products have 2 B H K FLOPs each, on n equal devices of r FLOP/s with link bandwidth b and latency L.
"""

from __future__ import annotations

import json
from collections import Counter
from functools import cache

import cost_graphs
import pytest
from small_models import case

from hetspmd.cluster.cluster import Cluster
from hetspmd.cluster.collective_kinds import kinds_between
from hetspmd.cluster.devices import Device, Network
from hetspmd.cost.model import CostModel
from hetspmd.errors import InfeasibleError, SearchError
from hetspmd.placement import PARTIAL, REPLICATE, is_sharded, shard
from hetspmd.program.checker import check
from hetspmd.program.lengths import lengths_for
from hetspmd.program.program import Communicate, Compute, communications
from hetspmd.rules.theory import Theory
from hetspmd.search import constraints as known
from hetspmd.search.constraints import Constraints
from hetspmd.search.pricing import PICOSECONDS
from hetspmd.search.search import Limits, Searcher, SearchResult, search
from hetspmd.search.space import search_space
from workbench import cluster as unlike
from workbench import traced

N, BANDWIDTH, LATENCY, LAUNCH = 4, 1e9, 1e-7, 1e-9
OPS = 10  # eight that compute: two products and relu, the loss, four of the backward; two steps of the optimizer


def equal_devices(rate: float) -> Cluster:
    device = Device("d", {"default": rate}, launch=LAUNCH)
    return Cluster((device,) * N, Network(BANDWIDTH, LATENCY))


def solve(
    theory: Theory, rate: float, constraints: Constraints, ratios: tuple[float, ...] = (0.25,) * N
) -> SearchResult:
    found = search(
        search_space(theory, constraints),
        CostModel(theory, equal_devices(rate)),
        lengths_for(theory.axes, ratios),
        Limits(),
    )
    assert found.stop_reason == "optimal"
    assert found.gap == 0.0
    check(theory, found.program)
    return found


def replicated(theory: Theory) -> Constraints:
    return Constraints({p.tensor: REPLICATE for p in theory.graph.parameters})


def moves(theory: Theory, found: SearchResult) -> Counter[tuple[str, str]]:
    return Counter(
        (s.kind, theory.graph.tensors[s.tensor].name)
        for s in found.program.steps
        if isinstance(s, Communicate)
    )


def all_reduce(nbytes: float) -> float:
    return 2 * LATENCY + 2 * (N - 1) / N * nbytes / BANDWIDTH


def gradient_all_reduce(nbytes: float) -> float:
    """With its part of a full bucket's latency: a bucket is as large as ten latencies are long."""
    bucket = 10 * 2 * LATENCY / (2 * (N - 1) / N / BANDWIDTH)
    return all_reduce(nbytes) - 2 * LATENCY * max(0.0, 1 - nbytes / int(bucket))


def all_gather_padded(nbytes: float) -> float:
    return LATENCY + (N - 1) / N * nbytes / BANDWIDTH


def exactly(found: SearchResult, seconds: float) -> None:
    """The cost in whole picoseconds per value; roundings of at most half of one each."""
    assert found.cost == pytest.approx(seconds, rel=1e-9, abs=40 / PICOSECONDS)


LARGE_BATCH = {"batch": 4096, "width": 16, "hidden": 16}
LARGE_WEIGHTS = {"batch": 4, "width": 512, "hidden": 512}


def test_data_parallel_costs_exactly_this_and_uses_exactly_these_collectives() -> None:
    theory, rate = cost_graphs.mlp(**LARGE_BATCH), 2e10
    b, k, h = LARGE_BATCH.values()
    compute = (5 * 2 * b * h * k + 2 * b * h + b * k) / N / rate + OPS * LAUNCH
    seconds = compute + 2 * gradient_all_reduce(4 * h * k) + all_reduce(4)
    found = solve(theory, rate, replicated(theory))
    assert moves(theory, found) == {
        ("all_reduce", "gu0"): 1,
        ("all_reduce", "gv0"): 1,
        ("all_reduce", "loss"): 1,
    }
    exactly(found, seconds)
    batch = theory.axes.axis(theory.graph.inputs[0].tensor, 0)
    assert batch is not None
    for step in found.program.steps:
        if isinstance(step, Compute) and not theory.graph.instructions[step.instruction].is_source:
            axes = theory.row_axes[step.instruction]
            assert axes[theory.rows[step.instruction].index(step.row)] == batch.id
    exactly(solve(theory, rate, known.data_parallel(theory)), seconds)
    # A ring all-reduce is a reduce-scatter and an all-gather: weights stored in shards, gathered once, cost the
    # same but for the order of latencies, and the free search may find better still.
    assert solve(theory, rate, Constraints()).cost <= seconds


def test_sufficient_factors_where_the_batch_is_tiny_and_the_weights_are_huge() -> None:
    """The two weight gradients are computed whole from gathered activations; their all-reduce would cost more."""
    theory, rate = cost_graphs.mlp(**LARGE_WEIGHTS), 2e10
    b, k, h = LARGE_WEIGHTS.values()
    product = 2 * b * h * k
    found = solve(theory, rate, replicated(theory))
    assert {name for _, name in moves(theory, found)} == {"a0", "gh0", "loss"}
    assert sum(moves(theory, found).values()) == 3
    rows = {
        theory.graph.instructions[s.instruction].name: s.row.name
        for s in found.program.steps
        if isinstance(s, Compute)
    }
    assert rows["gu0"] == rows["gv0"] == "always"
    compute = (2 * product + (3 * product + 2 * b * h + b * k) / N) / rate + OPS * LAUNCH
    exactly(found, compute + 2 * all_gather_padded(4 * b * h) + all_reduce(4))
    reduced = known.data_parallel(theory)
    assert solve(theory, rate, reduced).cost > found.cost


def test_no_sufficient_factors_where_devices_are_slow() -> None:
    """The same model on devices so slow that computing a gradient four times costs more than to reduce it."""
    theory, rate = cost_graphs.mlp(**LARGE_WEIGHTS), 2e8
    found = solve(theory, rate, replicated(theory))
    assert {"gu0", "gv0"} <= {name for _, name in moves(theory, found)}
    for step in found.program.steps:
        if isinstance(step, Compute) and theory.graph.instructions[step.instruction].name in ("gu0", "gv0"):
            assert step.row.factor is not None


def test_parameters_are_stored_sharded_where_tensor_parallelism_wins() -> None:
    """Columns of U, rows of V: Megatron's MLP communicates one number, the loss."""
    theory, rate = cost_graphs.mlp(**LARGE_WEIGHTS), 2e10
    b, k, h = LARGE_WEIGHTS.values()
    found = solve(theory, rate, Constraints())
    assert moves(theory, found) == {("all_reduce", "loss"): 1}
    producers = theory.graph.producers
    forms = {
        p.name: theory.rows[producers[p.tensor]][found.rows[producers[p.tensor]]].post[0]
        for p in theory.graph.parameters
    }
    assert forms == {"u0": shard(1), "v0": shard(0)}
    # y is a sum over the devices, so the loss, linear in it, is computed on summands of the whole y.
    compute = ((5 * 2 * b * h * k + 2 * b * h) / N + b * k) / rate + OPS * LAUNCH
    exactly(found, compute + all_reduce(4))


def test_one_device_does_not_communicate() -> None:
    theory = cost_graphs.mlp(**LARGE_BATCH)
    b, k, h = LARGE_BATCH.values()
    device = Device("d", {"default": 1e9}, launch=LAUNCH)
    costs = CostModel(theory, Cluster((device,)))
    found = search(search_space(theory, Constraints()), costs, lengths_for(theory.axes, (1.0,)), Limits())
    exactly(found, (5 * 2 * b * h * k + 2 * b * h + b * k) / 1e9 + OPS * LAUNCH)


@pytest.mark.parametrize(
    ("ratios", "kinds"),
    [
        ((0.25,) * 4, {"all_gather", "reduce_scatter"}),
        ((0.625, 0.125, 0.125, 0.125), {"grouped_broadcast", "grouped_reduce"}),
    ],
)
def test_skew_decides_between_padded_and_grouped(ratios: tuple[float, ...], kinds: set[str]) -> None:
    """Padded: L + (n - 1) M E / b, with M the largest share; grouped: n L + E / b. Here E / b is many latencies,
    so that grouped wins where M > 1 / (n - 1)."""
    theory = cost_graphs.mlp(batch=4096, width=64, hidden=64)
    found = solve(theory, 1e9, known.zero_like(theory), ratios)
    used = {s.kind for s in found.program.steps if isinstance(s, Communicate) and s.kind != "all_reduce"}
    assert used == kinds


def test_latency_decides_too() -> None:
    """Small tensors: n latencies cost more than padding; gradients share their latency, so that an all-reduce,
    which is not padded, costs less than a reduce-scatter."""
    theory = cost_graphs.mlp(batch=4096, width=8, hidden=8)
    found = solve(theory, 1e9, known.zero_like(theory), (0.625, 0.125, 0.125, 0.125))
    used = {s.kind for s in found.program.steps if isinstance(s, Communicate) and s.kind != "all_reduce"}
    assert used == {"all_gather"}


# the space and its text -----------------------------------------------------------------------------------


@cache
def theory_of(name: str) -> Theory:
    return case(name).theory


@pytest.mark.parametrize("name", ["mlp", "conv", "attention"])
def test_moves_are_those_that_can_matter(name: str) -> None:
    theory = theory_of(name)
    space = search_space(theory, Constraints())
    for e, found in zip(theory.graph.tensors, space.moves, strict=True):
        producer = theory.graph.producers.get(e.id)
        made = set()
        if producer is not None:
            at = theory.graph.instructions[producer].outputs.index(e.id)
            made = {theory.rows[producer][k].post[at] for k in space.rows[producer]}
        for source, target, kind in found:
            assert source in made
            assert source != target
            assert source != REPLICATE, "what is whole needs no collective"
            assert target != PARTIAL
            assert (source == PARTIAL) == (kind in ("all_reduce", *kinds_between("partial", "shard")))
            assert not (source == PARTIAL and e.dtype == "bool")
            for form in (source, target):
                if is_sharded(form):
                    axis = theory.axes.axis(e.id, form - 2)
                    assert axis is not None
                    assert axis.units >= 2


def test_all_communications_of_a_matrix() -> None:
    assert communications((0, 1), summable=True) == (
        (1, 0, "all_reduce"), (1, 2, "reduce_scatter"), (1, 2, "grouped_reduce"), (1, 2, "ring_reduce"),
        (1, 2, "exchange_reduce"),
        (1, 3, "reduce_scatter"), (1, 3, "grouped_reduce"), (1, 3, "ring_reduce"),
        (1, 3, "exchange_reduce"),
        (2, 0, "all_gather"), (2, 0, "grouped_broadcast"), (2, 0, "ring_gather"), (2, 3, "all_to_all"),
        (3, 0, "all_gather"), (3, 0, "grouped_broadcast"), (3, 0, "ring_gather"), (3, 2, "all_to_all"),
    )  # fmt: skip
    assert {source for source, _, _ in communications((0,), summable=False)} == {2}
    assert communications((), summable=False) == ()


def test_requirements_and_ties() -> None:
    theory = theory_of("mlp")
    space = search_space(theory, Constraints())
    graph = theory.graph
    assert graph.loss is not None
    loss, logits = space.requirements
    assert (loss.tensor, loss.any_of) == (graph.loss, (REPLICATE,))
    assert logits.any_of == (REPLICATE, shard(0)), "outputs may be left as rows of samples"
    whole = search_space(theory, Constraints(), rows_of_outputs=False).requirements[1]
    assert whole.any_of == (REPLICATE,)
    assert space.ties == tuple((p.tensor, p.gradient) for p in graph.parameters if p.gradient is not None)
    updated = {b.updated for b in theory_of("conv").graph.buffers if b.updated is not None}
    assert updated <= {r.tensor for r in search_space(theory_of("conv"), Constraints()).requirements}
    assert len(updated) == 3


@pytest.mark.parametrize("name", ["mlp", "conv", "attention"])
def test_the_problem_text_is_the_same_every_time_and_complete(name: str) -> None:
    def text() -> str:
        theory = case(name).theory
        searcher = Searcher(search_space(theory, Constraints()))
        costs, lengths = CostModel(theory, unlike(4, 2, 1)), lengths_for(theory.axes, (0.6, 0.25, 0.15))
        return searcher.problem(costs, lengths)

    first, again = text(), text()
    assert first == again
    document = json.loads(first)
    theory = theory_of(name)
    graph = theory.graph
    assert [i["name"] for i in document["instructions"]] == [i.name for i in graph.instructions]
    again_read = graph.second_reads
    assert [len(i["rows"]) for i in document["instructions"]] == [
        len(rows) * (2 if i in again_read else 1) for i, rows in enumerate(theory.rows)
    ]
    assert [t["name"] for t in document["tensors"]] == [
        graph.tensors[t].name for t in sorted(graph.producers)
    ]
    costs = [r["cost"] for i in document["instructions"] for r in i["rows"]]
    assert all(isinstance(c, int) and c >= 0 for c in costs)
    for tensor in document["tensors"]:
        pairs = [(source, target) for source, target, _, _ in tensor["moves"]]
        assert len(pairs) == len(set(pairs)), "of padded and grouped only the cheaper is kept"


def test_an_earlier_find_is_a_start_and_never_made_worse() -> None:
    theory = theory_of("attention")
    space, costs = search_space(theory, Constraints()), CostModel(theory, unlike(4, 2, 1))
    lengths = lengths_for(theory.axes, (0.6, 0.25, 0.15))
    first = search(space, costs, lengths, Limits())
    again = search(space, costs, lengths, Limits(), start=first)
    assert again.program == first.program
    assert again.cost == first.cost
    assert again.lower_bound <= again.cost
    narrower = search_space(theory, known.data_parallel(theory))
    assert search(narrower, costs, lengths, Limits(), start=first).cost >= first.cost


def test_a_limit_gives_the_best_so_far_with_its_gap_or_an_error() -> None:
    theory = theory_of("attention")
    space, costs = search_space(theory, Constraints()), CostModel(theory, unlike(4, 2, 1))
    lengths = lengths_for(theory.axes, (0.6, 0.25, 0.15))
    best = search(space, costs, lengths, Limits())
    try:
        early = search(space, costs, lengths, Limits(expansions=1))
    except SearchError:
        with pytest.raises(SearchError, match="raise the limit"):
            search(space, costs, lengths, Limits(expansions=1))
        return
    assert early.cost >= best.lower_bound
    assert 0.0 <= early.gap <= 1.0
    check(theory, early.program)


def test_a_device_of_a_few_flops_is_no_overflow() -> None:
    """Costs are whole picoseconds, in coarser units where 64 bits would not hold them."""
    theory = theory_of("attention")
    costs = CostModel(theory, unlike(4, 2, 1e-9, 1))
    slow = search(search_space(theory, Constraints()), costs, lengths_for(theory.axes, (0.25,) * 4), Limits())
    assert slow.cost > 1e6
    lengths = lengths_for(theory.axes, (0.5, 0.25, 0.0, 0.25))
    fast = search(search_space(theory, known.data_parallel(theory)), costs, lengths, Limits())
    check(theory, fast.program)
    assert fast.cost >= fast.lower_bound


def test_storing_is_the_part_with_these_parameters() -> None:
    """The same rows as by constraints, with the tuples of all other instructions."""
    theory = traced("bert").theory
    graph = theory.graph
    part = search_space(theory, Constraints()).within(known.tensor_parallel(theory))
    open_ = [p.tensor for p in graph.parameters if len(part.rows[graph.producers[p.tensor]]) > 1]
    assert open_
    for first in (open_[::2], open_[1::2], open_):
        forms = {t: theory.rows[graph.producers[t]][part.rows[graph.producers[t]][-1]].post[0] for t in first}
        stored = part.storing(forms)
        row_filter = known.tensor_parallel(theory).row_filter
        assert stored.rows == part.within(Constraints(forms, row_filter)).rows
        changed = {graph.producers[t] for t in first}
        assert all(
            (i in changed) or few is own
            for i, (few, own) in enumerate(zip(stored.rows, part.rows, strict=True))
        )
        assert part.storing(forms).rows == stored.rows
    with pytest.raises(InfeasibleError, match="no triple is left in the form"):
        part.storing({open_[0]: shard(9)})
