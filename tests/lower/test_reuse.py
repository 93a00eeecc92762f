"""Which collectives work in the memory of what they are given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from program_builder import data_parallel, uneven
from small_models import case
from torch import fx

from hetspmd.dist import collectives
from hetspmd.dist.communicator import Communicator
from hetspmd.dist.random import Randomness
from hetspmd.dist.runtime import Runtime
from hetspmd.dist.simulated_world import run_ranks
from hetspmd.lower import calls
from hetspmd.lower.emit import item, take_saved
from hetspmd.lower.reuse import mark_spare
from hetspmd.rules.kernels import dense
from scheduled import lower

aten = torch.ops.aten
Build = Callable[[fx.Graph, fx.Node, fx.Node], tuple[fx.Node, list[fx.Node]]]


def product(g: fx.Graph, x: fx.Node) -> fx.Node:
    return g.call_function(aten.mul.Tensor, (x, x))


def alone(g: fx.Graph, runtime: fx.Node, x: fx.Node) -> tuple[fx.Node, list[fx.Node]]:
    return product(g, x), []


def of_a_view(g: fx.Graph, runtime: fx.Node, x: fx.Node) -> tuple[fx.Node, list[fx.Node]]:
    return g.call_function(aten.reshape.default, (product(g, x), [4])), []


def one_of_two(g: fx.Graph, runtime: fx.Node, x: fx.Node) -> tuple[fx.Node, list[fx.Node]]:
    both = g.call_function(aten.sort.default, (x,))
    return g.call_function(item, (both, 0)), [g.call_function(item, (both, 1))]


def read_before(g: fx.Graph, runtime: fx.Node, x: fx.Node) -> tuple[fx.Node, list[fx.Node]]:
    found = product(g, x)
    return found, [product(g, found)]


def given(g: fx.Graph, runtime: fx.Node, x: fx.Node) -> tuple[fx.Node, list[fx.Node]]:
    return x, []


def view_of_given(g: fx.Graph, runtime: fx.Node, x: fx.Node) -> tuple[fx.Node, list[fx.Node]]:
    return g.call_function(aten.t.default, (x,)), []


def unsafe_view_of_given(g: fx.Graph, runtime: fx.Node, x: fx.Node) -> tuple[fx.Node, list[fx.Node]]:
    return g.call_function(aten._unsafe_view.default, (x, [4])), []


def dense_of_given(g: fx.Graph, runtime: fx.Node, x: fx.Node) -> tuple[fx.Node, list[fx.Node]]:
    return g.call_function(dense, (x,)), []


def returned(g: fx.Graph, runtime: fx.Node, x: fx.Node) -> tuple[fx.Node, list[fx.Node]]:
    found = product(g, x)
    return found, [found]


def view_returned(g: fx.Graph, runtime: fx.Node, x: fx.Node) -> tuple[fx.Node, list[fx.Node]]:
    found = product(g, x)
    return found, [g.call_function(aten.t.default, (found,))]


def part_of_a_split(g: fx.Graph, runtime: fx.Node, x: fx.Node) -> tuple[fx.Node, list[fx.Node]]:
    parts = g.call_function(aten.split.Tensor, (product(g, x), 1))
    return g.call_function(item, (parts, 0)), [g.call_function(item, (parts, 1))]


def saved(g: fx.Graph, runtime: fx.Node, x: fx.Node) -> tuple[fx.Node, list[fx.Node]]:
    return g.call_function(take_saved, (x, 0)), []


def delivered(g: fx.Graph, runtime: fx.Node, x: fx.Node) -> tuple[fx.Node, list[fx.Node]]:
    pending = g.call_function(calls.start, (runtime, "all_gather", x, 0, (1, 1)))
    return g.call_function(calls.wait, (pending,)), []


YES: list[Build] = [alone, of_a_view, one_of_two, read_before]
NO: list[Build] = [
    given, view_of_given, unsafe_view_of_given, dense_of_given, returned, view_returned, part_of_a_split, saved,
    delivered,
]  # fmt: skip


def made(build: Build) -> tuple[fx.Graph, fx.Node]:
    g = fx.Graph()
    runtime, x = g.placeholder("runtime"), g.placeholder("x")
    operand, results = build(g, runtime, x)
    start = g.call_function(calls.start, (runtime, "all_reduce", operand))
    g.output([g.call_function(calls.wait, (start,)), *results])
    mark_spare(g)
    return g, start


@pytest.mark.parametrize("build", YES)
def test_what_nothing_reads_any_more_is_spare(build: Build) -> None:
    assert made(build)[1].kwargs == {"spare": True}


@pytest.mark.parametrize("build", NO)
def test_what_something_may_read_is_not(build: Build) -> None:
    assert made(build)[1].kwargs == {}


def test_a_reader_behind_the_start_counts() -> None:
    g = fx.Graph()
    runtime, x = g.placeholder("runtime"), g.placeholder("x")
    found = product(g, x)
    start = g.call_function(calls.start, (runtime, "all_reduce", found))
    later = product(g, found)
    again = g.call_function(calls.start, (runtime, "all_reduce", found))
    g.output([g.call_function(calls.wait, (s,)) for s in (start, again)] + [later])
    mark_spare(g)
    assert (start.kwargs, again.kwargs) == ({}, {"spare": True}), "the last one is free to"


@pytest.mark.parametrize(
    ("first", "waited", "spare"),
    [
        ("reduce_scatter", "behind", False),
        ("reduce_scatter", "before", True),
        ("all_reduce", "behind", True),  # has copied its operand
    ],
)
@pytest.mark.parametrize("start", [calls.start, calls.start_across])
def test_what_a_collective_on_its_way_may_read_is_not_written_to(
    first: str, waited: str, spare: bool, start: Callable[..., Any]
) -> None:
    g = fx.Graph()
    runtime, x = g.placeholder("runtime"), g.placeholder("x")
    found = product(g, x)
    one = g.call_function(start, (runtime, first, found))
    early = [g.call_function(calls.wait, (one,))] if waited == "before" else []
    other = g.call_function(calls.start, (runtime, "all_reduce", found))
    late = [] if early else [g.call_function(calls.wait, (one,))]
    g.output([g.call_function(calls.wait, (other,)), *early, *late])
    mark_spare(g)
    assert (one.kwargs, other.kwargs) == ({}, {"spare": True} if spare else {})


def test_gradients_are_summed_where_they_were_computed() -> None:
    c = case("mlp")
    program = data_parallel(c.theory, c.theory.graph.inputs[0].tensor)
    local = lower(c.theory, program, uneven(c.theory, 2), 0, torch.device("cpu"))
    assert local.backward is not None
    starts = [n for n in local.backward.graph.nodes if n.target is calls.start]
    assert starts
    assert all(n.kwargs == {"spare": True} for n in starts)


def test_a_spare_operand_becomes_the_sum_where_it_lies_in_order() -> None:
    def body(comm: Communicator) -> None:
        runtime = Runtime(comm, Randomness(0, comm.rank, torch.device("cpu")))

        def summed(x: torch.Tensor, **options: Any) -> bool:
            before = x.clone()
            total = collectives.start_all_reduce(runtime, x, **options).wait()
            assert torch.equal(total, 2 * before)
            own = total.data_ptr() == x.data_ptr()
            assert own or torch.equal(x, before)
            return own

        whole = torch.arange(24.0).view(4, 6)
        assert summed(whole.clone(), spare=True)
        assert not summed(whole.clone())
        assert not summed(whole.clone().t(), spare=True)
        assert not summed(whole.clone()[1:3], spare=True), "the rest would be held with it"
        assert not summed(torch.ones(1).expand(5), spare=True)

    run_ranks(2, body)


@pytest.mark.parametrize("start", [collectives.start_ring_reduce, collectives.start_grouped_reduce])
def test_slices_of_a_spare_operand_are_summed_where_they_lie(start: Callable[..., Any]) -> None:
    def body(comm: Communicator) -> None:
        runtime = Runtime(comm, Randomness(0, comm.rank, torch.device("cpu")))
        seen: list[int] = []

        def watched(send: Callable[..., Any]) -> Callable[..., Any]:
            def sends(parts: Any, *rest: Any) -> Any:
                of = [parts] if isinstance(parts, torch.Tensor) else parts
                seen.extend(part.data_ptr() for part in of if part.numel())
                return send(parts, *rest)

            return sends

        comm.ring_reduce = watched(comm.ring_reduce)
        comm.reduce = watched(comm.reduce)

        def summed(x: torch.Tensor, dim: int, extents: tuple[int, ...], spare: bool) -> tuple[bool, bool]:
            """Whether its own memory was sent, and whether the result holds all of it."""
            before, memory = x.clone(), x.untyped_storage()
            seen.clear()
            got = start(runtime, x, dim, extents, spare=spare).wait()
            own = torch.split(before, list(extents), dim)[comm.rank]
            assert torch.equal(got, 2 * own)
            inside = range(memory.data_ptr(), memory.data_ptr() + memory.nbytes())
            in_place = bool(seen) and all(place in inside for place in seen)
            assert in_place or torch.equal(x, before)
            return in_place, got.untyped_storage().data_ptr() == memory.data_ptr()

        whole = torch.arange(24.0).view(4, 6)
        assert summed(whole.clone(), 0, (3, 1), True) == (True, False)
        assert summed(whole.clone(), 0, (3, 1), False) == (False, False)
        assert summed(whole.clone(), 1, (4, 2), True) == (False, False), "slices do not lie in order"
        assert summed(whole.clone()[1:3], 0, (1, 1), True) == (False, False), "the rest is another's"
        alone = summed(whole.clone(), 0, (4, 0), True)
        assert alone == (True, comm.rank == 0), "what one rank holds all of is not copied"

    run_ranks(2, body)
