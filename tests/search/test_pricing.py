"""Costs as the core takes them: rows twice for second readings, cheapest kinds, rounding, prices, weights."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from small_models import case

from hetspmd.cost.model import CostModel
from hetspmd.program.lengths import Lengths, lengths_for
from hetspmd.rules.theory import Theory
from hetspmd.search.constraints import Constraints
from hetspmd.search.pricing import PICOSECONDS, Prices, Pricing
from hetspmd.search.space import search_space
from memory_cases import devices, stack_theory

SHARES = (0.5, 0.3, 0.2)


def made(theory: Theory, flops: float = 1e9, copied: float = math.inf) -> tuple[Pricing, CostModel, Lengths]:
    cluster = devices(*SHARES, flops=flops)
    copying = tuple(replace(d, issue_bandwidth=copied) for d in cluster.devices)
    return (
        Pricing(search_space(theory, Constraints())),
        CostModel(theory, replace(cluster, devices=copying)),
        lengths_for(theory.axes, SHARES),
    )


@pytest.mark.parametrize("copied", [math.inf, 1e8])
@pytest.mark.parametrize("name", ["mlp", "attention"])
def test_rows_and_moves_one_by_one(name: str, copied: float) -> None:
    theory = case(name).theory
    pricing, model, lengths = made(theory, copied=copied)
    priced = pricing.at(model, lengths)
    space = pricing.space
    assert priced.per_second == PICOSECONDS
    costs = model.row_costs(lengths)
    again = theory.graph.second_reads
    assert again
    for i, rows in enumerate(space.rows):
        copies = 2 if i in again else 1
        want = [round(float(costs[i][k]) * 1e12) for k in rows for _ in range(copies)]
        assert priced.rows[pricing.row_start[i] : pricing.row_start[i + 1]].tolist() == want
    for n, t in enumerate(pricing.tensors):
        at = slice(pricing.move_start[n], pricing.move_start[n + 1])
        for pair, best, cost in zip(
            space.pairs[t], priced.best[at].tolist(), priced.moves[at].tolist(), strict=True
        ):
            kinds = [move for move in space.moves[t] if move[:2] == pair[:2]]
            shares = model.shares(lengths)
            seconds = [model.form_seconds(model.shared_form(t, *kind), shares) for kind in kinds]
            assert cost == round(min(seconds) * 1e12)
            assert pricing.flat[best] == kinds[int(np.argmin(seconds))], "the first of the cheapest"
    assert not priced.keep.any()
    assert (priced.seconds[0] == priced.rows).all()
    assert (priced.seconds[1] == priced.moves).all()


def test_prices_are_charged_to_forms_and_to_rows_that_take_what_was_kept() -> None:
    theory = stack_theory()
    pricing, model, lengths = made(theory)
    space = pricing.space
    plain = pricing.at(model, lengths)
    keep = np.linspace(0.0, 1e-3, int(pricing.keep_start[-1]))
    again = sorted(theory.graph.second_reads)
    kept = {i: 1e-6 * (1 + np.arange(len(space.rows[i]))) for i in again[:2]}
    priced = pricing.at(model, lengths, Prices(keep, kept))
    assert (priced.moves == plain.moves).all()
    assert (np.abs(priced.keep - keep * priced.per_second) <= 1).all()
    assert (priced.keep <= keep * priced.per_second).all(), "rounded down: a charge is a lower bound"
    extra = priced.rows - plain.rows
    for i in range(len(space.rows)):
        here = extra[pricing.row_start[i] : pricing.row_start[i + 1]]
        if i not in kept:
            assert not here.any()
            continue
        assert not here[::2].any(), "the direct rows"
        assert (kept[i] * priced.per_second - here[1::2] < 1).all()
        assert (here[1::2] <= kept[i] * priced.per_second).all()
    assert (priced.seconds[0] == plain.rows).all(), "the program's own cost is without prices"


@pytest.mark.parametrize("copied", [math.inf, 1e8])
def test_only_what_other_work_can_hide_is_weighed(copied: float) -> None:
    """Nothing hides what the devices copy themselves."""
    theory = stack_theory()
    pricing, model, lengths = made(theory, copied=copied)
    plain, half = pricing.at(model, lengths), pricing.at(model, lengths, overlap=0.5)
    graph = theory.graph
    hidden = {p.tensor for p in graph.parameters} | {g for _, g in pricing.space.ties}
    hidden |= {graph.instructions[i].outputs[0] for i in graph.second_reads}
    copies = 0.0
    for n, t in enumerate(pricing.tensors):
        at = slice(pricing.move_start[n], pricing.move_start[n + 1])
        if t not in hidden:
            assert (half.moves[at] == plain.moves[at]).all()
            continue
        for cost, whole, best in zip(half.moves[at], plain.moves[at], plain.best[at], strict=True):
            form = model.shared_form(t, *pricing.flat[best])
            own = PICOSECONDS * (form.pack + form.unpack)
            copies += own
            assert abs(cost - own - (whole - own) * 0.5) <= 1
    assert (copies > 0) == (copied < math.inf)
    assert (half.seconds[1] == plain.moves).all()


@pytest.mark.parametrize("flops", [1e9, 1.0, 1e-6])
def test_the_dearest_program_fits_in_64_bits(flops: float) -> None:
    theory = stack_theory(2, 8, 16)
    pricing, model, lengths = made(theory, flops)
    keep = np.full(int(pricing.keep_start[-1]), 1e3)
    priced = pricing.at(model, lengths, Prices(keep, {}))
    total = sum(
        sum(int(costs[a:b].max()) for a, b in itertools.pairwise(starts) if b > a)
        for costs, starts in (
            (priced.rows, pricing.row_start), (priced.moves, pricing.move_start), (priced.keep, pricing.keep_start),
        )
    )  # fmt: skip
    assert total < 2**57
    assert (priced.rows >= 0).all()
    assert priced.per_second <= PICOSECONDS


def test_measured_or_not_the_lengths_decide() -> None:
    """Other lengths, other costs, in the same places."""
    theory = stack_theory()
    pricing, model, lengths = made(theory)
    even = lengths_for(theory.axes, (1 / 3,) * 3)
    assert not (pricing.at(model, lengths).moves == pricing.at(model, even).moves).all()
    assert (pricing.at(model, lengths).moves == pricing.at(model, lengths).moves).all()
