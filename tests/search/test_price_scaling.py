"""Factors of prices: the lower hull of programs is found in few searches."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from hetspmd.program.program import Program
from hetspmd.search.price_scaling import Bracket, Scaled
from hetspmd.search.search import SearchResult

EMPTY = Program((), None, (), (), ())


def found(cost: float, priced: float) -> SearchResult:
    return SearchResult(
        program=EMPTY, rows=(), moves=(), cost=cost, lower_bound=priced, gap=0.0, stop_reason="optimal",
        expansions=0, seconds=0.0, values=0,
    )  # fmt: skip


def search(
    programs: list[tuple[float, float]], room: float, bracket: Bracket, most: int = 60
) -> tuple[float, int]:
    """The cost of the cheapest program found that fits, of programs ``(cost, paid)`` of which those fit that pay at
    most ``room``; and how many searches it took."""
    best = math.inf
    for n in range(1, most + 1):
        factor = bracket.factor
        cost, paid = min(programs, key=lambda p: p[0] + factor * p[1])
        fits = paid <= room
        best = min(best, cost) if fits else best
        bracket.take(found(cost, cost + factor * paid), fits=fits, lacking=max(0.0, paid / room - 1.0))
        if bracket.over:
            return best, n
    return best, most


def of_hull(programs: list[tuple[float, float]], room: float) -> float:
    """The cost of the cheapest program that fits and is the best one at some price."""
    at = [10 ** (k / 200) for k in range(-1000, 1000)]
    best = [min(programs, key=lambda p: p[0] + s * p[1]) for s in at]
    return min((cost for cost, paid in best if paid <= room), default=math.inf)


@pytest.mark.parametrize("seed", range(30))
def test_the_cheapest_of_the_hull_that_fits_is_found(seed: int) -> None:
    draw = random.Random(seed)
    programs = [(1 + x, 3 / (0.2 + x) + draw.random()) for x in (draw.random() * 3 for _ in range(60))]
    programs.append((9.0, 0.5))  # one that always fits
    room = draw.uniform(1.0, 6.0)
    cheapest = min(programs)
    for bracket in (Bracket(), Bracket((1.1, 1.3, 2.0)), Bracket(cheapest=cheapest)):
        bracket.factor = 10 ** draw.uniform(-2, 2)
        best, searches = search(programs, room, bracket)
        assert best == pytest.approx(of_hull(programs, room), rel=1e-3)
        assert searches <= 20


def test_once_there_are_two_programs_one_more_search_is_enough() -> None:
    """Two more steps find the other one; halving would then take ten to come near the price of the change."""
    bracket = Bracket()
    best, searches = search([(1.0, 8.0), (3.0, 2.0)], 4.0, bracket)
    assert (best, searches) == (3.0, 4)


def test_steps_outwards_grow_until_they_are_large() -> None:
    bracket = Bracket((1.1, 2.0))
    factors = []
    for _ in range(6):
        factors.append(bracket.factor)
        bracket.take(found(1.0, 1.0 + bracket.factor * 5.0), fits=False)
    steps = [b / a for a, b in itertools.pairwise(factors)]
    assert steps == pytest.approx([1.1, 2.0, 4.0, 16.0, 256.0])


def test_a_program_that_lacks_much_is_left_by_a_long_step() -> None:
    bracket = Bracket((1.1,))
    bracket.take(found(1.0, 6.0), fits=False, lacking=0.5)
    assert bracket.factor == 4.0


def test_other_prices_forget_what_was_too_low() -> None:
    bracket = Bracket()
    bracket.take(found(1.0, 9.0), fits=False)
    bracket.take(found(3.0, 5.0), fits=True)
    bracket.restart()
    assert bracket.least is None
    assert bracket.most is not None
    assert math.isnan(bracket.most.paid)
    bracket.take(found(2.0, 2.5), fits=False)
    assert math.isfinite(bracket.factor)


def test_where_lines_cross() -> None:
    assert Scaled(0.0, 1.0, 8.0).crossing(Scaled(1.0, 3.0, 2.0)) == pytest.approx(1 / 3)
    assert math.isnan(Scaled(0.0, 1.0, 2.0).crossing(Scaled(1.0, 3.0, 2.0)))


def test_ends_that_cost_the_same_but_for_what_a_search_may_miss_end_it() -> None:
    """The search at the higher price has missed the cheaper program by a little: halving would go on."""
    low, high = found(1.0, 1.0 + 0.5 * 2.0), found(2.0, 2.0 + 1.0 * 1.04)
    exact, loose = Bracket(), Bracket(tolerance=0.05)
    for bracket in (exact, loose):
        bracket.factor = 0.5
        bracket.take(low, fits=False)
        bracket.factor = 1.0
        bracket.take(high, fits=True)
    assert not exact.over
    assert loose.over


def test_a_crossing_with_nothing_better_by_more_than_a_search_may_miss_ends_it() -> None:
    for tolerance, over in ((0.0, False), (0.2, True)):
        bracket = Bracket(tolerance=tolerance)
        bracket.take(found(1.0, 9.0), fits=False)
        bracket.take(found(9.0, 9.0 + bracket.factor * 2.0), fits=True)
        factor = bracket.factor
        assert factor == pytest.approx(4 / 3)
        bracket.take(found(4.0, 1.0 + factor * 8.0 - 0.1), fits=False)
        assert bracket.over == over
