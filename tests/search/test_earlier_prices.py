"""Searches for programs that fit the memory, from the prices of earlier ones."""

from __future__ import annotations

import pytest
from test_memory_search import Problem, problem

from hetspmd.errors import MemoryLimitError
from hetspmd.search.earlier_prices import EarlierPrices, Known, PricedAt
from hetspmd.search.memory_limits import search_that_fits
from hetspmd.search.search import Limits, Searcher, SearchResult


class Counted:
    """Solves a problem at parts of the memory, one after the other, and counts the searches of each."""

    def __init__(self, p: Problem, monkeypatch: pytest.MonkeyPatch) -> None:
        self.p, self.prices, self.searches = p, EarlierPrices(), 0
        known = Searcher.search

        def search(*args: object, **options: object) -> SearchResult:
            self.searches += 1
            return known(*args, **options)  # type: ignore[arg-type]  # passed on

        monkeypatch.setattr(Searcher, "search", search)

    def solve(
        self, part: float, ranks: tuple[int, ...] = (0, 1, 2, 3), *, quick: bool = False
    ) -> tuple[SearchResult, int]:
        self.searches, p = 0, self.p
        known, limited = Known(self.prices, ranks), p.limited(part)
        found = search_that_fits(p.searcher, limited, p.lengths, Limits(), p.free, known=known, quick=quick)
        return found, self.searches


@pytest.mark.parametrize(("name", "parts"), [("stack", (0.76, 0.75, 0.78)), ("llama", (0.95, 0.9, 0.92))])
def test_the_next_one_is_as_good_after_fewer_searches(
    name: str, parts: tuple[float, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    p = problem(name)
    counted = Counted(p, monkeypatch)
    for n, part in enumerate(parts):
        found, searches = counted.solve(part)
        alone, _ = Counted(p, monkeypatch).solve(part)
        assert p.fits(found, part)
        assert found.lower_bound <= min(found.cost, alone.cost)
        # The core starts from the last search's messages, so that the same prices may give another program.
        assert found.cost <= 1.03 * alone.cost
        if n:
            assert searches <= 16


def test_where_nothing_fits_the_next_one_says_so_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = Counted(problem("stack"), monkeypatch)
    for part, most in ((0.5, 3), (0.45, 2), (0.5, 2)):
        with pytest.raises(MemoryLimitError, match="lacks"):
            counted.solve(part)
        assert counted.searches <= most
    found, _ = counted.solve(0.76)
    alone, _ = Counted(counted.p, monkeypatch).solve(0.76)
    assert found.cost <= 1.03 * alone.cost, "that nothing fits elsewhere is no reason for a worse one"
    assert counted.prices.exceeded is None
    with pytest.raises(MemoryLimitError):
        counted.solve(0.45)
    assert counted.searches <= 12, "prices of the last one that fits, raised as far as they go"


@pytest.mark.parametrize("name", ["stack", "llama", "attention"])
def test_what_the_whole_search_finds_is_found(name: str) -> None:
    """That nothing fits is said of no part of the memory in which the search from the beginning finds a program."""
    p = problem(name)
    prices, fitting = EarlierPrices(), 0
    for percent in (100, 95, 75, 85, 90, 70, 80):
        part = percent / 100
        try:
            alone = p.solve(part)
        except MemoryLimitError:
            continue
        fitting += 1
        for known in (Known(EarlierPrices(), (0, 1, 2, 3)), Known(prices, (0, 1, 2, 3))):
            found = search_that_fits(p.searcher, p.limited(part), p.lengths, Limits(), p.free, known=known)
            assert p.fits(found, part)
            assert found.cost <= 1.05 * alone.cost
    assert fitting > 2


def test_prices_of_other_devices_and_graphs() -> None:
    """A device keeps its prices among fewer devices, an instruction in a longer graph its part of it."""
    priced = Known(EarlierPrices(), (1, 4, 5)).priced({(10, 0): 1.0, (20, 2): 3.0, (40, 1): 2.0}, 41, 0.25)
    assert priced == PricedAt({(10, 1): 1.0, (20, 5): 3.0, (40, 4): 2.0}, 41, 0.25, estimated=False)
    assert priced.on((4, 5), 41) == {(20, 1): 3.0, (40, 0): 2.0}
    assert priced.on((1, 2, 4), 82) == {(20, 0): 1.0, (80, 2): 2.0}
    assert priced.on((0, 2), 41) == {}


def test_devices_without_earlier_prices_are_searched_from_the_beginning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    p = problem("stack")
    counted = Counted(p, monkeypatch)
    counted.solve(0.78, (0, 1, 2, 3))
    found, _ = counted.solve(0.76, (4, 5, 6, 7))
    alone, _ = Counted(p, monkeypatch).solve(0.76)
    assert found.cost <= 1.03 * alone.cost


@pytest.mark.parametrize(("name", "parts"), [("stack", (0.78, 0.76)), ("llama", (0.95, 0.9))])
def test_a_quick_search_finds_a_program_that_fits(
    name: str, parts: tuple[float, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """From nothing, and near the prices of the one before: a few searches, and a program nearly as good."""
    p = problem(name)
    counted = Counted(p, monkeypatch)
    for part in parts:
        found, searches = counted.solve(part, quick=True)
        whole, _ = Counted(p, monkeypatch).solve(part)
        assert p.fits(found, part)
        assert found.lower_bound <= min(found.cost, whole.cost)
        assert found.cost <= 1.05 * whole.cost
        assert searches <= 12


def test_a_quick_search_ends_after_one_where_much_is_lacking(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = Counted(problem("stack"), monkeypatch)
    with pytest.raises(MemoryLimitError, match="lacks"):
        counted.solve(0.3, quick=True)
    assert counted.searches == 1
    assert counted.prices.exceeded is not None
    found, _ = counted.solve(0.76, quick=True)
    assert counted.p.fits(found, 0.75)
