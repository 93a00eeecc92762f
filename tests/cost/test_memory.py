"""Bytes that a program holds: by hand on a tiny graph, and against a replay of random programs."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from cost_graphs import Builder, data_parallel, mlp, program, random_program
from hypothesis import given, settings
from hypothesis import strategies as st

from hetspmd.cost.memory import OPTIMIZER_BYTES, memory_profile
from hetspmd.placement import PARTIAL, REPLICATE, is_sharded, shard, sharded_dim
from hetspmd.program.lengths import Lengths
from hetspmd.program.program import Communicate, Compute, Program, Result
from hetspmd.program.schedule import make_schedule
from hetspmd.rules.rule import Triple
from hetspmd.rules.theory import Theory
from scheduled import holdings_of, order_of

ROWS, IN, OUT = 8, 4, 6


IN_PLACE = ("reduce_scatter", "grouped_reduce", "ring_reduce")
"""Kinds that may work in the memory of what they are given."""


def tiny() -> Theory:
    """``y = x w``, a view v of it, ``loss = sum(v)``, ``gw = x' g``; instructions 0 to 6 in this order: x g w y v
    loss gw."""
    b = Builder()
    sizes = {"b": ROWS, "k": IN, "h": OUT}
    x = b.input("x", (ROWS, IN))
    g = b.input("g", (ROWS, OUT))
    w = b.parameter("w", (IN, OUT))
    y = b.mm("y", "bk,kh->bh", x, w, sizes)
    v = b.op("v", "bh->bh", (y,), sizes, alias=True)
    loss = b.op("loss", "bh->", (v,), sizes, linear=True)
    return b.theory(loss, {w: b.mm("gw", "bk,bh->kh", x, g, sizes)})


X, G, W, Y, V, LOSS, GW = range(7)


def row(theory: Theory, instruction: int, post: int, pre: int | None = None) -> Triple:
    """The row of an instruction with these forms of its output and its first input."""
    found = [r for r in theory.rows[instruction] if r.post == (post,) and pre in (None, *r.pre[:1])]
    return found[0]


def divided(theory: Theory, weight: int) -> Program:
    """The batch divided, the weight stored as given and gathered, the gradient left in its form."""
    rows, at = shard(0), row
    steps: list[Compute | Communicate] = [
        Compute(X, at(theory, X, REPLICATE)), Compute(G, at(theory, G, REPLICATE)),
        Compute(W, at(theory, W, weight)),
    ]  # fmt: skip
    if weight != REPLICATE:
        steps.append(Communicate(W, "all_gather", weight, REPLICATE))
    steps += [
        Compute(Y, at(theory, Y, rows, rows)), Compute(V, at(theory, V, rows)),
        Compute(LOSS, at(theory, LOSS, PARTIAL, rows)), Communicate(LOSS, "all_reduce", PARTIAL, REPLICATE),
        Compute(GW, at(theory, GW, PARTIAL, rows)),
        Communicate(GW, "all_reduce" if weight == REPLICATE else "reduce_scatter", PARTIAL, weight),
    ]  # fmt: skip
    return Program(tuple(steps), Result(LOSS, REPLICATE), (), (Result(GW, weight),), ())


def units(theory: Theory, shares: dict[int, tuple[int, ...]], world: int = 2) -> Lengths:
    """Lengths that give axis a tensor's dims the units asked for by size, the first device the rest."""
    return Lengths(world, tuple(shares[a.units] for a in theory.axes.axes))


def test_by_hand() -> None:
    """Bytes: x 128, g 192, w 96 and its moments 192, y (and v, its view) 192, loss 4, gw 96."""
    theory = tiny()
    profile = memory_profile(
        theory, divided(theory, REPLICATE), units(theory, {8: (6, 2), 4: (4, 0), 6: (3, 3)})
    )
    fixed = 128 + 192 + 96 + 192  # g is an input: held to the end
    # x g w | y | v | loss | its sum | gw | its sum | the end
    # Sums lie where the summands did, which nothing reads afterwards.
    whole = [fixed] * 5 + [fixed + 4, fixed + 4, fixed + 4 + 96, fixed + 4 + 96, fixed + 4 + 96]
    cut = [0, 0, 0, 192, 192, 192, 0, 0, 0, 0]
    whole.append(whole[-1] + 2 * 96)  # the weight is updated, with two temporaries
    cut.append(0)
    assert profile.whole.tolist() == whole
    assert profile.cut.tolist() == [[c] for c in cut]
    assert profile.held.tolist() == [
        [w + c * 6 // 8, w + c * 2 // 8] for w, c in zip(whole, cut, strict=True)
    ]
    assert profile.instruction.tolist() == [X, G, W, Y, V, LOSS, LOSS, GW, GW, GW, GW]
    assert profile.peaks == (fixed + 4 + 96 + 192, fixed + 4 + 96 + 192)
    assert profile.peak_instruction(0) == profile.peak_instruction(1) == GW
    assert profile.during(V).tolist() == [fixed + 144, fixed + 48]
    assert profile.during(LOSS).tolist() == [fixed + 4 + 144, fixed + 4 + 48]
    assert profile.lacking(np.array([fixed + 100, fixed + 300])).tolist() == [192, 0]


def test_a_weight_in_shards_by_hand() -> None:
    """Stored along its 6 columns: parameter, moments and gradient scale with the share; the gathered weight is
    held from its collective to its only reader."""
    theory = tiny()
    form = shard(1)
    profile = memory_profile(theory, divided(theory, form), units(theory, {8: (6, 2), 4: (4, 0), 6: (1, 5)}))
    inputs = 128 + 192
    # The gather is padded to 5 of 6 columns on 2 devices, 160 bytes, and cut to size before y reads the weight. The
    # sum of the gradient is padded likewise, and held with a part of 80 bytes.
    gather, scatter = 160, 160 + 80
    assert profile.whole.tolist() == [
        inputs, inputs, inputs, inputs + 96 + gather, inputs + 96, inputs, inputs + 4, inputs + 4, inputs + 100,
        inputs + 100 + scatter, inputs + 4, inputs + 4,
    ]  # fmt: skip
    fixed = (96 + 192) // 6
    first = [w + fixed for w in profile.whole.tolist()]
    assert profile.held[:4, 0].tolist() == first[:4]
    assert profile.held[4:7, 0].tolist() == [f + 144 for f in first[4:7]]
    assert profile.held[9:, 0].tolist() == [first[9], first[10] + 16, first[10] + 16 + 2 * 16]


def test_optimizer_bytes() -> None:
    theory, at = tiny(), {8: (8, 0), 4: (4, 0), 6: (2, 4)}
    form = shard(1)
    for program_, local in ((divided(theory, REPLICATE), (24, 24)), (divided(theory, form), (8, 16))):
        without = memory_profile(theory, program_, units(theory, at), optimizer_bytes=0).held
        with_ = memory_profile(theory, program_, units(theory, at)).held
        assert (with_[:-1] - without).tolist() == [[OPTIMIZER_BYTES * n for n in local]] * len(without)
        assert (with_[-1] - with_[-2]).tolist() == [2 * 4 * n for n in local]


def test_frozen_parameters_have_no_moments() -> None:
    b = Builder()
    x = b.input("x", (ROWS, IN))
    w = b.parameter("w", (IN, OUT))
    y = b.mm("y", "bk,kh->bh", x, w, {"b": ROWS, "k": IN, "h": OUT})
    theory = b.theory(b.op("loss", "bh->", (y,), {"b": ROWS, "h": OUT}, linear=True), {})
    chosen = program(theory, lambda _, rows: len(rows) - 1)
    (peak,) = memory_profile(theory, chosen, Lengths(1, tuple((a.units,) for a in theory.axes.axes))).peaks
    assert peak == 128 + 96 + 192 + 4


def replay(
    theory: Theory,
    chosen: Program,
    lengths: Lengths,
    rank: int,
    completed: dict[int, int] | None,
    boundary: int = 0,
) -> list[int]:
    """What one device holds at each step, by looking ahead from every step for readers. Slow and plain.

    ``boundary``: the first step of the backward, where that is a graph of its own.
    """
    graph = theory.graph

    def local(tensor: int, form: int, itemsize: int | None = None) -> int:
        e = graph.tensors[tensor]
        nbytes = e.nbytes if itemsize is None else e.numel * itemsize
        if not is_sharded(form):
            return nbytes
        axis = theory.axes.axis(tensor, sharded_dim(form))
        assert axis is not None
        return nbytes * lengths.units[axis.id][rank] // axis.units

    end = len(chosen.steps)
    value: dict[tuple[int, int], int] = {}  # (tensor, form) -> buffer
    buffers: list[tuple[int, int, int, bool]] = []  # tensor, form, step, lasting
    reads: list[tuple[int, int]] = []  # (buffer, step)
    trained = {p.tensor for p in graph.parameters if p.gradient is not None}
    always, updates = 0, dict[int, int]()
    schedule = make_schedule(theory, chosen)
    behind = {id(step) for step in schedule.steps(chosen).backward}
    copied = [saved.key for saved in schedule.saved if saved.how == "slice"]
    cut: dict[tuple[int, int], int] = {}  # slice of a whole tensor -> where it is first cut
    carried: dict[tuple[int, int], tuple[int, Communicate]] = {}
    sums: list[tuple[int, int, int, Communicate]] = []  # buffer of the summands, of the sum, step
    first_read: dict[tuple[int, int], int] = {}
    for at, step in enumerate(chosen.steps):
        if isinstance(step, Communicate):
            made, inputs, base = [(step.tensor, step.target)], [(step.tensor, step.source)], None
        else:
            i = graph.instructions[step.instruction]
            made = [(t, f) for t, f in zip(i.outputs, step.row.post, strict=True) if t >= 0]
            inputs = list(zip(i.inputs, step.row.pre, strict=True))
            rule = theory.rules.get(step.instruction)
            base = inputs[0] if rule is not None and rule.alias else None
        for key in inputs:
            if key in copied and key not in value and id(step) in behind:
                since = cut.get(key, first_read[key[0], REPLICATE] if (key[0], REPLICATE) in carried else -1)
                value[key] = len(buffers)
                buffers.append((*key, since if since >= 0 else buffers[value[key[0], REPLICATE]][2], False))
            cut.setdefault(key, at)
        used = [value.get(key, value.get((key[0], REPLICATE), -1)) for key in inputs]
        reads += [(b, at) for b in used if b >= 0]
        for name in (name for key in inputs for name in [key if key in value else (key[0], REPLICATE)]):
            first_read.setdefault(name, at)
        for key in made:
            if key in value:
                continue
            if isinstance(step, Communicate):
                carried[key] = at, step
            source = isinstance(step, Compute) and graph.instructions[step.instruction].is_source
            if base is not None or (lengths.world == 1 and isinstance(step, Communicate)):
                value[key] = used[0]
                reads.append((used[0], at))
            else:
                if isinstance(step, Communicate) and step.source == PARTIAL:
                    sums.append((used[0], len(buffers), at, step))
                value[key] = len(buffers)
                buffers.append((*key, 0 if source else at, source))
            if source and key[0] in trained:
                always += local(*key, OPTIMIZER_BYTES)
                updates[key[0]] = local(*key)
    left = [*chosen.gradients, *chosen.outputs, *chosen.buffers] + ([chosen.loss] if chosen.loss else [])
    reads += [(value.get((r.tensor, r.form), value.get((r.tensor, REPLICATE), -1)), end) for r in left]
    for r in left:
        first_read.setdefault(
            (r.tensor, r.form) if (r.tensor, r.form) in value else (r.tensor, REPLICATE), end
        )
    spare: set[int] = set()
    for summands, made_by, at, step in sums:
        t, f, since, _ = buffers[summands]
        own = f == PARTIAL and graph.tensors[t].nbytes == graph.tensors[step.tensor].nbytes
        same = (id(chosen.steps[since]) in behind) == (id(step) in behind)
        if own and same and all(s <= at for r, s in reads if r == summands):
            spare.add(at)
            if step.kind == "all_reduce":
                buffers[made_by] = (*buffers[made_by][:2], at + 1, False)
    totals = []
    for at in range(end + 1):
        alive = [
            local(t, f) for b, (t, f, since, lasting) in enumerate(buffers)
            if since <= at and (lasting or since == at or any(r == b and s >= at for r, s in reads))
        ]  # fmt: skip
        own = 0
        for key, (start, step) in carried.items():
            wait = first_read.get(key, end)
            done = start + 1 if completed is None else wait
            if completed is not None and start in completed:
                # The next collective of the same graph to start waits for what should have completed.
                others = [
                    s for s, _ in carried.values() if s > start and (s < boundary) == (start < boundary)
                ]
                done = min([wait, *(s for s in others if s >= completed[start])])
            flight, ready, early = workspace(theory, step, lengths, rank)
            if start == at or start <= at < done:
                own += flight
            if start in spare and step.kind in IN_PLACE and sharded_dim(step.target) == 0:
                axis = theory.axes.axis(step.tensor, 0)
                assert axis is not None
                units = lengths.units[axis.id]
                several = sum(u > 0 for u in units) > 1
                padded = several and step.kind == "reduce_scatter"
                if start == at and (len(set(units)) == 1 or not padded):
                    own -= graph.tensors[step.tensor].nbytes
                if at == max(start, done - 1) and several and not padded:
                    own += local(step.tensor, step.target)
            if at == max(start, (done if early else wait) - 1):
                own += ready
        totals.append(always + sum(alive) + own)
    sizes = [updates[p.tensor] for p in graph.parameters if p.tensor in updates]
    return totals + [totals[-1] + 2 * own + before for before, own in pairwise([0, *sizes])]


def workspace(theory: Theory, step: Communicate, lengths: Lengths, rank: int) -> tuple[int, int, bool]:
    """Bytes of a collective's own buffers on a rank, beside its result: until it has completed, and more while its
    result is made; whether that is made on completion."""
    if step.kind == "all_reduce" or lengths.world == 1:
        return 0, 0, False
    size = theory.graph.tensors[step.tensor].nbytes

    def parts(form: int) -> list[int]:
        axis = theory.axes.axis(step.tensor, sharded_dim(form))
        assert axis is not None
        return [size * u // axis.units for u in lengths.units[axis.id]]

    sharded = step.source if is_sharded(step.source) else step.target
    alone = [p > 0 for p in parts(sharded)]
    if sum(alone) == 1:
        if step.kind == "all_to_all" and alone == [p > 0 for p in parts(step.target)]:
            return 0, 0, False
        exact = {"reduce_scatter": "grouped_reduce", "all_gather": "grouped_broadcast"}
        step = replace(step, kind=exact.get(step.kind, step.kind))
    if step.kind == "all_to_all":
        return parts(step.source)[rank], parts(step.target)[rank], False
    form = step.source if is_sharded(step.source) else step.target
    padded, moved = lengths.world * max(parts(form)), sharded_dim(form) != 0
    if step.kind == "reduce_scatter":
        return padded + max(parts(form)) - parts(form)[rank], 0, False
    if step.kind in ("grouped_reduce", "ring_reduce"):
        return size - parts(form)[rank], 0, False
    if step.kind == "exchange_reduce":
        own = parts(form)[rank]
        return size + (lengths.world - 1) * own, lengths.world * own, True
    if step.kind == "all_gather":
        return padded - size, size if moved or padded > size else 0, padded > size
    return 0, size if moved else 0, False


@pytest.mark.parametrize("seed", range(12))
def test_random_programs_against_a_replay(seed: int) -> None:
    theory = mlp(batch=12, width=6, hidden=10, layers=2)
    dice = np.random.default_rng(seed)
    world = 1 + seed % 4
    lengths = Lengths(
        world,
        tuple(
            tuple(map(int, np.diff([0, *sorted(dice.integers(0, a.units + 1, world - 1)), a.units])))
            for a in theory.axes.axes
        ),
    )
    chosen = data_parallel(theory) if seed == 0 else random_program(theory, seed)
    starts = [at for at, step in enumerate(chosen.steps) if isinstance(step, Communicate)]
    end = len(chosen.steps) - 1
    later = {at: min(at + int(dice.integers(1, 40)), end) for at in starts if dice.random() < 0.7}
    order = order_of(theory, chosen)
    run = replace(chosen, steps=(*order.forward, *order.backward))
    index = {id(step): at for at, step in enumerate(run.steps)}
    place = {at: index[id(step)] for at, step in enumerate(chosen.steps) if id(step) in index}
    for completed in (None, {}, later):
        executed = holdings_of(theory, chosen, executed=True).at(lengths, completed)
        there = None
        if completed is not None:
            there = {place[a]: place[b] for a, b in completed.items() if a in place and b in place}
        for rank in range(world):
            held = replay(theory, run, lengths, rank, there, len(order.forward))
            assert executed.held[:, rank].tolist() == held
        profile = holdings_of(theory, chosen).at(lengths, completed)
        for rank in range(world):
            assert profile.held[:, rank].tolist() == replay(theory, chosen, lengths, rank, completed)
    for instruction in range(len(theory.graph.instructions)):
        at = profile.instruction == instruction
        assert at.any()
        assert profile.during(instruction).tolist() == profile.held[at].max(axis=0).tolist()


@settings(max_examples=40)
@given(st.integers(0, 10**6), st.integers(0, 20), st.floats(0.0, 1.3))
def test_largest_shares(seed: int, twentieths: int, part: float) -> None:
    """A device with the same share of every axis fits if and only if that is at most the largest share."""
    theory = mlp(batch=40, width=20, hidden=20)
    holdings = holdings_of(theory, random_program(theory, seed))
    lengths = Lengths(
        2, tuple((a.units * twentieths // 20, a.units * (20 - twentieths) // 20) for a in theory.axes.axes)
    )
    profile = holdings.at(lengths)
    capacity = np.array([part * max(profile.peaks), 1.5 * profile.peaks[1]])
    most = profile.largest_shares(capacity)
    for rank, share in enumerate((twentieths / 20, 1 - twentieths / 20)):
        if abs(most[rank] - share) > 1e-9:
            assert (most[rank] > share) == (profile.peaks[rank] <= capacity[rank])


def test_largest_shares_at_the_bound_and_beyond() -> None:
    theory = mlp(batch=1000, width=10, hidden=10)
    holdings = holdings_of(theory, data_parallel(theory))

    def at(n: int) -> Lengths:
        return Lengths(2, tuple((a.units * n // 100, a.units - a.units * n // 100) for a in theory.axes.axes))

    capacity = np.array([holdings.at(at(37)).peaks[0], np.inf], dtype=float)
    most = holdings.at(at(50)).largest_shares(capacity)
    assert most[0] == pytest.approx(0.37)
    assert most[1] == np.inf
    assert not holdings.at(at(37)).lacking(capacity).any()
    assert holdings.at(at(38)).lacking(capacity)[0] > 0
    too_small = holdings.at(at(50)).largest_shares(np.array([10.0, np.inf]))
    assert too_small[0] < 0, "what is whole does not fit"


def test_a_dim_without_an_axis_is_refused() -> None:
    theory = tiny()
    kept = divided(theory, REPLICATE).steps[:LOSS]
    steps = (*kept, Compute(LOSS, Triple("odd", (shard(0),), (shard(0),))))
    with pytest.raises(ValueError, match="no logical axis"):
        holdings_of(theory, Program(steps, None, (), (), ()))
