"""Which candidates the alternation compares, at which lengths, and what is certified of the one that it takes."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

import hetspmd.optimize.alternation as alternation
from hetspmd.cluster.cluster import Cluster
from hetspmd.cluster.devices import Network
from hetspmd.cost.model import CostModel
from hetspmd.optimize.alternation import OVERLAPS, Alternation, Clock, Outcome, Pair
from hetspmd.plan.reports import Iteration
from hetspmd.program.lengths import Lengths
from hetspmd.ratios.starts import starting_ratios
from hetspmd.rules.theory import Theory
from hetspmd.search.constraints import Constraints
from hetspmd.search.search import Found, Limits, Searcher
from hetspmd.search.space import Space, search_space
from workbench import cluster, traced

NETWORKS = ((1e8, 1e-5), (1e7, 1e-5))


def on(network: tuple[float, float], *speeds: float) -> Cluster:
    return Cluster(cluster(*speeds).devices, Network(*network))


class Watched(Alternation):
    """Keeps what was searched on all devices with less weight on communication, and every pair of the rounds."""

    def __init__(self, theory: Theory, devices: Cluster) -> None:
        super().__init__(theory, devices, Constraints(), Limits(), Clock())
        self.weighted: list[tuple[Lengths, float]] = []
        self.pairs: list[Pair] = []
        self.rounds: list[Iteration] = []
        self.first: Pair | None = None
        self.more: list[Pair] = []

    def _search(
        self, costs: CostModel, lengths: Lengths, start: Found | None, within: Space | None = None,
        overlap: float = 1.0,
    ) -> Found:  # fmt: skip
        if overlap < 1.0 and costs.world == self.cluster.world:
            self.weighted.append((lengths, overlap))
        return super()._search(costs, lengths, start, within, overlap)

    def _overlapping(
        self, costs: CostModel, active: tuple[int, ...], best: Pair, pairs: Sequence[Pair],
        rounds: Sequence[Iteration],
    ) -> list[Pair]:  # fmt: skip
        more = super()._overlapping(costs, active, best, pairs, rounds)
        if costs.world == self.cluster.world:
            self.pairs, self.rounds, self.first, self.more = list(pairs), list(rounds), best, more
        return more


def best_by_start(watched: Watched) -> dict[str, Pair]:
    assert len(watched.pairs) == 2 * len(watched.rounds)
    found: dict[str, Pair] = {}
    for i, pair in enumerate(watched.pairs):
        start = watched.rounds[i // 2].start
        if start not in found or (pair.seconds, not pair.searched) < (
            found[start].seconds,
            not found[start].searched,
        ):
            found[start] = pair
    return found


def chosen(outcome: Outcome) -> tuple[object, ...]:
    pair = outcome.pair
    return pair.active, pair.ratios, pair.lengths, pair.program, pair.seconds, pair.found.lower_bound


def test_every_start_that_is_nearly_as_good_is_searched_with_hidden_communication(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    theory = traced("llama").theory
    both = False
    for network in NETWORKS:
        devices = on(network, 3, 2)
        assert len(starting_ratios(CostModel(theory, devices))) == 2
        monkeypatch.setattr(alternation, "NEAR", 1.0)
        watched = Watched(theory, devices)
        outcome = watched.run()
        assert watched.first is not None
        starts = best_by_start(watched)
        near = [p.lengths for p in starts.values() if p.seconds <= 2 * watched.first.seconds]
        places = list(dict.fromkeys([watched.first.lengths, *near]))
        assert [place for place, _ in watched.weighted] == [place for place in places for _ in OVERLAPS]
        assert [weight for _, weight in watched.weighted] == list(OVERLAPS) * len(places)
        both |= len(places) == 2
        # Nothing that was compared is better than what was taken.
        assert outcome.pair.seconds <= min(p.seconds for p in (*watched.pairs, *watched.more) if p.fits)
        assert outcome.pair.seconds <= min(outcome.baselines[name] for name in outcome.baselines)
        assert chosen(Watched(theory, devices).run()) == chosen(outcome)

        monkeypatch.setattr(alternation, "NEAR", -1.0)
        few = Watched(theory, devices)
        assert few.run().pair.seconds >= outcome.pair.seconds
        assert {place for place, _ in few.weighted} == {watched.first.lengths}
    assert both, "the starts end at different lengths in one of the cases"


def test_what_is_taken_is_certified_among_all_programs_at_its_lengths() -> None:
    """Also a known kind of program, which was searched among its kind, and one searched at other costs."""
    theory = traced("gpt2").theory
    devices = on((1e8, 1e-5), 2, 1)
    costs = CostModel(theory, devices)
    known = Alternation(theory, devices, Constraints(), Limits(), Clock())
    dearer = 0
    for pair in known._baselines(costs).values():
        certified = known._certified(pair)
        every = Searcher(search_space(theory, Constraints())).search(costs, pair.lengths, Limits())
        found = certified.found
        assert certified.program == pair.program
        assert found.lower_bound == pytest.approx(every.lower_bound, rel=1e-9)
        assert found.cost == pytest.approx(pair.found.cost, rel=1e-9)
        assert found.gap == pytest.approx(1 - found.lower_bound / found.cost, abs=1e-9)
        assert (found.stop_reason == "optimal") == (found.gap == 0)
        dearer += found.gap > 1e-3
    assert dearer > 0

    watched = Watched(theory, devices)
    taken = watched.run().pair
    assert watched.first is not None
    for pair in (taken, *map(watched._certified, watched.more)):
        model = CostModel(theory, devices.part(pair.active))
        every = Searcher(search_space(theory, Constraints())).search(model, pair.lengths, Limits())
        assert pair.found.lower_bound == pytest.approx(every.lower_bound, rel=1e-9)
        assert pair.found.cost >= every.cost * (1 - 1e-9)
