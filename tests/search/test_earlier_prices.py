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

    def solve(self, part: float, ranks: tuple[int, ...] = (0, 1, 2, 3)) -> tuple[SearchResult, int]:
        self.searches, p = 0, self.p
        known = Known(self.prices, ranks)
        found = search_that_fits(p.searcher, p.limited(part), p.lengths, Limits(), p.free, known=known)
        return found, self.searches


@pytest.mark.parametrize(("name", "parts"), [("stack", (0.75, 0.7, 0.8, 0.65)), ("llama", (0.95, 0.9, 0.92))])
def test_the_next_one_is_as_good_after_fewer_searches(
    name: str, parts: tuple[float, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    p = problem(name)
    counted = Counted(p, monkeypatch)
    near = anew = 0
    for n, part in enumerate(parts):
        found, searches = counted.solve(part)
        alone, cold = Counted(p, monkeypatch).solve(part)
        assert p.fits(found, part)
        assert found.lower_bound <= min(found.cost, alone.cost)
        # The core starts from the last search's messages, so that the same prices may give another program.
        assert found.cost <= 1.03 * alone.cost
        if n:
            assert searches <= 10
            near, anew = near + searches, anew + cold
    assert near < 0.7 * anew


def test_where_nothing_fits_the_next_one_says_so_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = Counted(problem("stack"), monkeypatch)
    for part, most in ((0.5, 1000), (0.45, 1), (0.5, 1)):
        with pytest.raises(MemoryLimitError, match="lacks"):
            counted.solve(part)
        assert counted.searches <= most
    found, _ = counted.solve(0.75)
    alone, _ = Counted(counted.p, monkeypatch).solve(0.75)
    assert found.cost <= 1.03 * alone.cost, "that nothing fits elsewhere is no reason for a worse one"
    assert counted.prices.outweighing is None
    with pytest.raises(MemoryLimitError):
        counted.solve(0.45)
    assert counted.searches <= 10, "prices of the last one that fits, raised as far as they go"


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
    counted.solve(0.75, (0, 1, 2, 3))
    found, _ = counted.solve(0.7, (4, 5, 6, 7))
    alone, _ = Counted(p, monkeypatch).solve(0.7)
    assert found.cost <= 1.03 * alone.cost
