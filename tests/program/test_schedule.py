"""The order of the local graphs: what is put off, what is prefetched, what stays."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence

import pytest
from cost_graphs import Builder, cluster
from program_builder import cheap_random_program, data_parallel, random_program, uneven
from small_models import case

import workbench  # isort: split

from hetspmd.cost.memory import memory_profile
from hetspmd.cost.model import CostModel
from hetspmd.optimize.compiler import plan_for
from hetspmd.placement import PARTIAL, REPLICATE, Placement, shard
from hetspmd.program.dataflow import reads, writes
from hetspmd.program.lengths import lengths_for
from hetspmd.program.program import Communicate, Compute, Program, Result, Step
from hetspmd.program.schedule import LocalOrder
from hetspmd.program.step_order import Order
from hetspmd.rules.theory import Theory
from hetspmd.search import constraints as known
from hetspmd.trace.graph import Graph
from scheduled import order_of, simulated_seconds

SIZES = {"a": 8, "b": 8, "c": 2, "d": 2}
HALF = shard(0)


def row(theory: Theory, name: str, kind: str) -> Compute:
    """The triple called ``kind`` of the instruction called ``name``."""
    (instruction,) = (i.id for i in theory.graph.instructions if i.name == name)
    return Compute(instruction, next(r for r in theory.rows[instruction] if r.name == kind))


def sources(theory: Theory, *sharded: int) -> list[Step]:
    """Parameters ``sharded`` are stored in shards of dim 0, all other sources whole."""
    found: list[Step] = []
    for i in theory.graph.instructions:
        if i.is_source:
            form = HALF if i.outputs[0] in sharded else REPLICATE
            found.append(Compute(i.id, next(r for r in theory.rows[i.id] if r.post == (form,))))
    return found


def names(theory: Theory, steps: Sequence[Step]) -> str:
    """Computations by name, collectives as ``<tensor>``; sources left out."""
    graph = theory.graph
    shown = []
    for s in steps:
        if isinstance(s, Communicate):
            shown.append(f"<{graph.tensors[s.tensor].name}>")
        elif not graph.instructions[s.instruction].is_source:
            shown.append(graph.instructions[s.instruction].name)
    return " ".join(shown)


def ordered(theory: Theory, steps: list[Step], *results: tuple[int, Placement]) -> str:
    """The order of steps of which each result is needed."""
    loss, *outputs = (Result(*r) for r in results)
    return names(theory, order_of(theory, Program(tuple(steps), loss, tuple(outputs), (), ())).forward)


# what is put off --------------------------------------------------------------------------------------------


def reduced(made: Builder) -> int:
    """A sum over the batch, whose triple ``b`` leaves summands."""
    return made.op("sum", "ba->a", (made.input("x", (8, 8)),), SIZES, flops=1)


def reduce_to_whole(tensor: int) -> Communicate:
    return Communicate(tensor, "all_reduce", PARTIAL, REPLICATE)


def test_views_of_a_reduced_gradient_come_last() -> None:
    made = Builder()
    total = reduced(made)
    view = made.op("view", "a->a", (total,), SIZES, alias=True)
    again = made.op("again", "a->a", (view,), SIZES, alias=True)
    other = made.op("other", "ba->b", (0,), SIZES, flops=1)
    theory = made.theory(other, {})
    steps = [
        *sources(theory), row(theory, "sum", "b"), reduce_to_whole(total), row(theory, "view", "always"),
        row(theory, "again", "always"), row(theory, "other", "always"),
    ]  # fmt: skip
    assert ordered(theory, steps, (other, REPLICATE), (again, REPLICATE)) == "sum <sum> other view again"


def test_a_view_comes_right_before_its_first_reader() -> None:
    made = Builder()
    total = reduced(made)
    view = made.op("view", "a->a", (total,), SIZES, alias=True)
    other = made.op("other", "ba->b", (0,), SIZES, flops=1)
    reader = made.op("reader", "a->a", (view,), SIZES, flops=1)
    theory = made.theory(other, {})
    steps = [
        *sources(theory), row(theory, "sum", "b"), reduce_to_whole(total), row(theory, "view", "always"),
        row(theory, "other", "always"), row(theory, "reader", "always"),
    ]  # fmt: skip
    found = ordered(theory, steps, (other, REPLICATE), (reader, REPLICATE), (view, REPLICATE))
    assert found == "sum <sum> other view reader"


def test_what_a_collective_reads_is_not_put_off() -> None:
    """The view waits, and so does the sum before it, because the collective shall start early."""
    made = Builder()
    total = reduced(made)
    scaled = made.op("scaled", "a->a", (total,), SIZES)
    view = made.op("view", "a->a", (scaled,), SIZES, alias=True)
    other = made.op("other", "ba->b", (0,), SIZES, flops=1)
    theory = made.theory(other, {})
    steps = [
        *sources(theory), row(theory, "sum", "b"),
        Communicate(total, "reduce_scatter", PARTIAL, HALF), row(theory, "scaled", "a"),
        row(theory, "view", "a"), Communicate(view, "all_gather", HALF, REPLICATE),
        row(theory, "other", "always"),
    ]  # fmt: skip
    found = ordered(theory, steps, (other, REPLICATE), (view, REPLICATE))
    assert found == "sum <sum> scaled view <view> other"


@pytest.mark.parametrize(
    ("text", "flops", "late"),
    [
        ("a->a", 0.0, True),  # as a cast or a division by a number
        ("a->a", 1.0, False),  # it computes
        ("a->ac", 0.0, True),  # saves memory until it is needed
        ("a->c", 0.0, False),  # the sum would be held in place of something smaller
    ],
)
def test_only_cheap_work_that_holds_no_more_memory(text: str, flops: float, late: bool) -> None:
    made = Builder()
    total = reduced(made)
    work = made.op("work", text, (total,), SIZES, flops=flops)
    other = made.op("other", "ba->b", (0,), SIZES, flops=1)
    theory = made.theory(other, {})
    steps = [
        *sources(theory), row(theory, "sum", "b"), reduce_to_whole(total), row(theory, "work", "always"),
        row(theory, "other", "always"),
    ]  # fmt: skip
    found = ordered(theory, steps, (other, REPLICATE), (work, REPLICATE))
    assert found == ("sum <sum> other work" if late else "sum <sum> work other")


def test_a_copy_of_a_part_of_a_view_is_not_put_off() -> None:
    """It has as many bytes as the part, but putting it off would hold the whole."""
    made = Builder()
    total = made.op("sum", "ba->a", (made.input("x", (8, 8)),), SIZES, flops=1)
    part = made.op("part", "a->c", (total,), SIZES, alias=True, blocked="ac")
    copy = made.op("copy", "c->c", (part,), SIZES)
    other = made.op("other", "ba->b", (0,), SIZES, flops=1)
    theory = made.theory(other, {})
    steps = [
        *sources(theory), row(theory, "sum", "b"), reduce_to_whole(total), row(theory, "part", "always"),
        row(theory, "copy", "always"), row(theory, "other", "always"),
    ]  # fmt: skip
    assert ordered(theory, steps, (other, REPLICATE), (copy, REPLICATE)) == "sum <sum> part copy other"


def test_what_needs_a_slice_of_a_gathered_value_is_not_put_off() -> None:
    """The result is divided as the slice is, but putting it off would hold the whole."""
    made = Builder()
    total = reduced(made)
    copy = made.op("copy", "a->a", (total,), SIZES)
    other = made.op("other", "ba->b", (0,), SIZES, flops=1)
    theory = made.theory(other, {})
    steps = [
        *sources(theory), row(theory, "sum", "b"), reduce_to_whole(total), row(theory, "copy", "a"),
        row(theory, "other", "always"),
    ]  # fmt: skip
    assert ordered(theory, steps, (other, REPLICATE), (copy, HALF)) == "sum <sum> copy other"


def test_a_collective_of_a_collective_keeps_its_place() -> None:
    made = Builder()
    total = reduced(made)
    other = made.op("other", "ba->b", (0,), SIZES, flops=1)
    theory = made.theory(other, {})
    steps = [
        *sources(theory), row(theory, "sum", "b"), Communicate(total, "reduce_scatter", PARTIAL, HALF),
        row(theory, "other", "always"), Communicate(total, "all_gather", HALF, REPLICATE),
    ]  # fmt: skip
    assert ordered(theory, steps, (other, REPLICATE), (total, REPLICATE)) == "sum <sum> other <sum>"


# what is prefetched --------------------------------------------------------------------------------------------


def layers(count: int) -> tuple[Theory, Program]:
    """``x = x w_i`` with every w_i stored in halves, x whole; 8 x 8 floats each, 1,024 FLOPs a layer."""
    made = Builder()
    x = made.input("x", (8, 8))
    weights = []
    for i in range(count):
        weights.append(made.parameter(f"w{i}", (8, 8)))
        t = made.op(f"t{i}", "ab->ba", (weights[-1],), SIZES, alias=True)
        x = made.op(f"y{i}", "ba,ba->ba", (x, t), SIZES, flops=1024)
    theory = made.theory(x, {})
    steps = sources(theory, *weights)
    for i, weight in enumerate(weights):
        steps += [Communicate(weight, "all_gather", HALF, REPLICATE), row(theory, f"t{i}", "always")]
        steps.append(row(theory, f"y{i}", "always"))
    return theory, Program(tuple(steps), Result(x, REPLICATE), (), (), ())


def test_one_gather_is_on_its_way_while_the_one_before_is_used() -> None:
    theory, made = layers(4)
    found = names(theory, order_of(theory, made).forward)
    assert found == "<w0> <w1> t0 y0 <w2> t1 y1 <w3> t2 y2 t3 y3"


@pytest.mark.parametrize(
    ("ahead", "expected"),
    [
        (2, "<w0> <w1> <w2> t0 y0 <w3> t1 y1 t2 y2 t3 y3"),
        (3, "<w0> <w1> <w2> <w3> t0 y0 t1 y1 t2 y2 t3 y3"),
        (9, "<w0> <w1> <w2> <w3> t0 y0 t1 y1 t2 y2 t3 y3"),
    ],
)
def test_more_gathers_are_on_their_way_where_the_program_says_so(ahead: int, expected: str) -> None:
    theory, made = layers(4)
    assert names(theory, order_of(theory, made, prefetch_distance=ahead).forward) == expected


def test_at_least_one_group_is_ahead() -> None:
    with pytest.raises(ValueError, match="a prefetch distance of 0; it is at least 1"):
        order_of(*layers(2), prefetch_distance=0)


@pytest.mark.parametrize("bandwidth", [64.0, 1024.0])
def test_prefetch_hides_all_but_the_first_gather_or_the_last_layer(bandwidth: float) -> None:
    """n layers of c seconds, a gather of g seconds each: g + (n - 1) max(g, c) + c."""
    n = 5
    theory, made = layers(n)
    devices = cluster(
        1024.0, 1024.0, bandwidth=bandwidth, latency=1e-12, launch=1e-12, memory_bandwidth=1e300
    )
    model = CostModel(theory, devices)
    lengths = lengths_for(theory.axes, (0.5, 0.5))
    (g,) = {
        model.form_seconds(model.move_form(s.tensor, s.source, s.target, s.kind), model.shares(lengths))
        for s in made.steps
        if isinstance(s, Communicate)
    }
    assert g == pytest.approx(128 / bandwidth)
    found = simulated_seconds(model, made, lengths)
    assert found == pytest.approx(g + (n - 1) * max(g, 1.0) + 1.0)


def test_what_one_step_reads_is_fetched_together() -> None:
    made = Builder()
    x = made.input("x", (8, 8))
    w0, w1, w2 = (made.parameter(f"w{i}", (8,)) for i in range(3))
    y0 = made.op("y0", "ba,a,a->ba", (x, w0, w1), SIZES, flops=1)
    y1 = made.op("y1", "ba,a->ba", (y0, w2), SIZES, flops=1)
    theory = made.theory(y1, {})
    gathers = [Communicate(w, "all_gather", HALF, REPLICATE) for w in (w0, w1, w2)]
    steps = [*sources(theory, w0, w1, w2), *gathers[:2], row(theory, "y0", "always"), gathers[2]]
    steps.append(row(theory, "y1", "always"))
    assert ordered(theory, steps, (y1, REPLICATE)) == "<w0> <w1> <w2> y0 y1"
    computations = [row(theory, "y0", "always"), row(theory, "y1", "always")]
    steps = [*sources(theory, w0, w1, w2), *reversed(gathers), *computations]
    assert ordered(theory, steps, (y1, REPLICATE)) == "<w1> <w0> <w2> y0 y1", "in the order of need"


def test_a_gather_that_is_only_a_result_comes_last() -> None:
    made = Builder()
    x = made.input("x", (8, 8))
    w0, w1 = made.parameter("w0", (8,)), made.parameter("w1", (8,))
    y = made.op("y", "ba,a->ba", (x, w0), SIZES, flops=1)
    z = made.op("z", "ba->ba", (y,), SIZES, flops=1)
    made.op("unused", "ba,a->ba", (x, w1), SIZES, flops=1)
    theory = made.theory(z, {})
    gathers = [Communicate(w, "all_gather", HALF, REPLICATE) for w in (w1, w0)]
    steps = [*sources(theory, w0, w1), *gathers, row(theory, "y", "always"), row(theory, "z", "always")]
    assert ordered(theory, steps, (z, REPLICATE), (w1, REPLICATE)) == "<w0> <w1> y z"


# whatever the program ------------------------------------------------------------------------------------------


def programs() -> list[tuple[Theory, Program, int]]:
    """Programs, and how many groups ahead their gathers are."""
    found = []
    for name in ("mlp", "conv", "attention"):
        theory = case(name).theory
        for seed in range(8):
            make = random_program if seed % 2 else cheap_random_program
            found.append((theory, make(theory, seed), 1 + seed // 2))
        for sharded in (False, True):
            batch = theory.graph.inputs[0].tensor
            found.append((theory, data_parallel(theory, batch, sharded_parameters=sharded), 1))
    return found


def standing(theory: Theory, program: Program, distance: int, patch: pytest.MonkeyPatch) -> LocalOrder:
    """The schedule with nothing put off."""
    with patch.context() as m:
        m.setattr(Order, "_is_put_off", lambda *_: False)
        return order_of(theory, program, prefetch_distance=distance)


def put_off(theory: Theory, program: Program, patch: pytest.MonkeyPatch) -> list[Compute]:
    """The steps that are put off."""
    found: list[Compute] = []
    decide = Order._is_put_off

    def noted(self: Order, index: int) -> bool:
        step = self.program.steps[index]
        decided = decide(self, index)
        if decided and isinstance(step, Compute):
            found.append(step)
        return decided

    with patch.context() as m:
        m.setattr(Order, "_is_put_off", noted)
        order_of(theory, program)
    return found


def computed_before(graph: Graph, steps: Sequence[Step]) -> dict[Step, set[Step]]:
    """The computations before each collective of a value that is computed here."""
    found: dict[Step, set[Step]] = {}
    seen: set[Step] = set()
    made: set[int] = set()
    for step in steps:
        if isinstance(step, Compute) and not graph.instructions[step.instruction].is_source:
            seen.add(step)
            made.update(graph.instructions[step.instruction].outputs)
        elif isinstance(step, Communicate) and step.tensor in made:
            found[step] = set(seen)
    return found


def in_this_order(program: Program, found: LocalOrder) -> Program:
    return dataclasses.replace(program, steps=(*found.forward, *found.backward))


def test_nothing_is_lost_and_nothing_is_read_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    moved = 0
    for theory, program, distance in programs():
        graph = theory.graph
        found = order_of(theory, program, prefetch_distance=distance)
        plain = standing(theory, program, distance, monkeypatch)
        there: set[tuple[int, Placement]] = set()
        for got, want in ((found.forward, plain.forward), (found.backward, plain.backward)):
            assert Counter(got) == Counter(want)
            moved += got != want
            for step in got:
                for key in reads(graph, step):
                    assert key in there or (key[0], REPLICATE) in there, (step, key)
                there.update(writes(graph, step))
    assert moved > 5, "nothing was put off in these programs"


def test_no_collective_starts_later_because_work_is_put_off(monkeypatch: pytest.MonkeyPatch) -> None:
    earlier = 0
    for theory, program, distance in programs():
        found = order_of(theory, program, prefetch_distance=distance)
        plain = standing(theory, program, distance, monkeypatch)
        for got, want in ((found.forward, plain.forward), (found.backward, plain.backward)):
            now, then = computed_before(theory.graph, got), computed_before(theory.graph, want)
            assert now.keys() == then.keys()
            assert all(now[step] <= then[step] for step in now)
            earlier += now != then
    assert earlier > 0


def test_memory_of_work_that_is_put_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Views hold no more than before; at the moment in which a copy is made, it and what it reads are there."""
    views = copies = 0
    for seed, (theory, program, distance) in enumerate(programs()):
        tensors, rules = theory.graph.tensors, theory.rules
        late = put_off(theory, program, monkeypatch)
        work = [theory.graph.instructions[s.instruction] for s in late if not rules[s.instruction].alias]
        most = max((sum(tensors[t].nbytes for t in i.outputs if t >= 0) for i in work), default=0)
        views, copies = views + len(late) - len(work), copies + len(work)
        lengths = uneven(theory, 3, seed)
        with_, without = (
            memory_profile(theory, in_this_order(program, order), lengths).peaks
            for order in (
                order_of(theory, program, prefetch_distance=distance),
                standing(theory, program, distance, monkeypatch),
            )
        )
        assert all(a <= b + most for a, b in zip(with_, without, strict=True)), (seed, with_, without)
    assert views > 10
    assert copies > 10


def test_sharded_parameters_of_a_real_model() -> None:
    """ZeRO-like GPT-2: while a group of parameters is used, the next is on its way and no other, which holds no
    more memory than one more group."""
    theory = workbench.traced("gpt2").theory
    graph = theory.graph
    plan = plan_for(theory, workbench.cluster(4, 2, 2), known.zero_like(theory), (0.5, 0.25, 0.25))
    order = order_of(theory, plan.program)
    parameter = {t: p.tensor for p in graph.parameters for t in workbench.copies(theory, [p.tensor])}
    issued: list[int] = []
    used: set[int] = set()
    groups: list[set[int]] = []
    ahead: list[set[int]] = []
    for step in order.forward:
        if isinstance(step, Communicate):
            issued += [step.tensor] if step.tensor in parameter else []
            continue
        rule = theory.rules.get(step.instruction)
        if rule is None or rule.alias:
            continue
        read = {parameter[t] for t in graph.instructions[step.instruction].inputs if t in parameter}
        if new := (read & set(issued)) - used:
            used |= new
            groups.append(new)
            ahead.append(set(issued) - used)
    assert len(groups) >= 10
    assert used == set(issued)
    assert ahead == [*groups[1:], set()]
    largest = max(sum(graph.tensors[t].nbytes for t in group) for group in groups)
    held = memory_profile(theory, in_this_order(plan.program, order), plan.lengths).peaks
    assert all(a <= b + largest for a, b in zip(held, plan.cost.memory_bytes, strict=True))
