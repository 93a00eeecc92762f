"""Which candidates the alternation compares, at which lengths, and what is certified of the one that it takes."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest

import hetspmd
import hetspmd.optimize.synthesize as driver
from hetspmd.cluster.cluster import Cluster
from hetspmd.cluster.devices import Network
from hetspmd.cost.model import CostModel
from hetspmd.optimize.alternation import Rounds
from hetspmd.optimize.baselines import baselines
from hetspmd.optimize.candidate import Candidate, certified
from hetspmd.optimize.compile_options import Segments
from hetspmd.optimize.overlap import overlap_variants
from hetspmd.optimize.synthesis import Clock, Synthesis
from hetspmd.optimize.synthesize import Outcome, synthesize
from hetspmd.optimize.thresholds import THRESHOLDS
from hetspmd.plan.plan import Plan
from hetspmd.program.lengths import Lengths
from hetspmd.ratios.starts import starting_ratios
from hetspmd.rules.theory import Theory
from hetspmd.search.constraints import Constraints
from hetspmd.search.search import Limits, Searcher, SearchResult
from hetspmd.search.space import Space, search_space
from workbench import cluster, traced

NETWORKS = ((1e8, 1e-5), (1e7, 1e-5))


def on(network: tuple[float, float], *speeds: float) -> Cluster:
    return Cluster(cluster(*speeds).devices, Network(*network))


@dataclass(frozen=True)
class Watched(Synthesis):
    """Keeps at which lengths of all devices was searched with less weight on communication."""

    weighted: list[tuple[Lengths, float]] = field(default_factory=list)

    def search(
        self,
        costs: CostModel,
        lengths: Lengths,
        *,
        start: SearchResult | None = None,
        within: Space | None = None,
        overlap: float = 1.0,
        certain: bool = False,
    ) -> SearchResult:
        if overlap < 1.0 and costs.world == self.cluster.world:
            self.weighted.append((lengths, overlap))
        return super().search(costs, lengths, start=start, within=within, overlap=overlap, certain=certain)


@dataclass
class Seen:
    """What was made on all devices: the rounds, the best of them, and the candidates that were made from it."""

    rounds: Rounds = field(default_factory=Rounds)
    first: Candidate | None = None
    more: list[Candidate] = field(default_factory=list)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    kept = Seen()

    def watched(
        ctx: Synthesis, costs: CostModel, active: tuple[int, ...], best: Candidate, rounds: Rounds
    ) -> list[Candidate]:
        more = overlap_variants(ctx, costs, active, best, rounds)
        if costs.world == ctx.cluster.world:
            kept.rounds, kept.first, kept.more = rounds, best, more
        return more

    monkeypatch.setattr(driver, "overlap_variants", watched)
    return kept


def watched(theory: Theory, devices: Cluster, **thresholds: float) -> Watched:
    return Watched(
        theory,
        devices,
        Constraints(),
        Limits(),
        Clock(),
        replace(THRESHOLDS, **thresholds),  # type: ignore[arg-type]  # numbers of fields that are numbers
    )


def best_by_start(rounds: Rounds) -> dict[str, Candidate]:
    assert len(rounds.candidates) == 2 * len(rounds.iterations)
    found: dict[str, Candidate] = {}
    for i, candidate in enumerate(rounds.candidates):
        start = rounds.iterations[i // 2].start
        if start not in found or (candidate.seconds, not candidate.searched) < (
            found[start].seconds,
            not found[start].searched,
        ):
            found[start] = candidate
    return found


def chosen(outcome: Outcome) -> tuple[object, ...]:
    best = outcome.best
    return best.active, best.ratios, best.lengths, best.program, best.seconds, best.result.lower_bound


def test_every_start_that_is_nearly_as_good_is_searched_with_hidden_communication(seen: Seen) -> None:
    theory = traced("llama").theory
    weights = THRESHOLDS.overlap_weights
    both = False
    for network in NETWORKS:
        devices = on(network, 3, 2)
        assert len(starting_ratios(CostModel(theory, devices))) == 2
        ctx = watched(theory, devices, near_best=1.0)
        outcome = synthesize(ctx)
        first, rounds, more = seen.first, seen.rounds, seen.more
        assert first is not None
        starts = best_by_start(rounds)
        near = [c.lengths for c in starts.values() if c.seconds <= 2 * first.seconds]
        places = list(dict.fromkeys([first.lengths, *near]))
        assert [place for place, _ in ctx.weighted] == [place for place in places for _ in weights]
        assert [weight for _, weight in ctx.weighted] == list(weights) * len(places)
        both |= len(places) == 2
        # Nothing that was compared is better than what was taken.
        assert outcome.best.seconds <= min(c.seconds for c in (*rounds.candidates, *more) if c.fits)
        assert outcome.best.seconds <= min(outcome.baselines.values())
        assert chosen(synthesize(watched(theory, devices, near_best=1.0))) == chosen(outcome)

        few = watched(theory, devices, near_best=-1.0)
        assert synthesize(few).best.seconds >= outcome.best.seconds
        assert {place for place, _ in few.weighted} == {first.lengths}
    assert both, "the starts end at different lengths in one of the cases"


def test_what_is_taken_is_certified_among_all_programs_at_its_lengths(seen: Seen) -> None:
    """Also a known kind of program, which was searched among its kind, and one searched at other costs."""
    theory = traced("gpt2").theory
    devices = on((1e8, 1e-5), 2, 1)
    costs = CostModel(theory, devices)
    ctx = Synthesis(theory, devices, Constraints(), Limits())
    dearer = 0
    for candidate in baselines(ctx, costs).values():
        made = certified(ctx, candidate)
        every = Searcher(search_space(theory, Constraints())).search(costs, candidate.lengths, Limits())
        result = made.result
        assert made.program == candidate.program
        assert result.lower_bound == pytest.approx(every.lower_bound, rel=1e-9)
        assert result.cost == pytest.approx(candidate.result.cost, rel=1e-9)
        assert result.gap == pytest.approx(1 - result.lower_bound / result.cost, abs=1e-9)
        assert (result.stop_reason == "optimal") == (result.gap == 0)
        dearer += result.gap > 1e-3
    assert dearer > 0

    taken = synthesize(ctx).best
    assert seen.first is not None
    for candidate in (taken, *(certified(ctx, c) for c in seen.more)):
        model = CostModel(theory, devices.part(candidate.active))
        every = Searcher(search_space(theory, Constraints())).search(model, candidate.lengths, Limits())
        assert candidate.result.lower_bound == pytest.approx(every.lower_bound, rel=1e-9)
        assert candidate.result.cost >= every.cost * (1 - 1e-9)


def test_every_candidate_is_listed_with_why_it_was_not_taken(seen: Seen) -> None:
    theory = traced("llama").theory
    outcome = synthesize(watched(theory, on(NETWORKS[0], 3, 2, 1)))
    listed = outcome.considered
    assert [c.verdict for c in listed].count("taken") == 1
    assert (listed[0].verdict, listed[0].reason) == ("taken", outcome.best.reason)
    assert listed[0].seconds == outcome.best.seconds
    for candidate in (*seen.rounds.candidates, *seen.more):
        same = [c for c in listed if c.seconds in (candidate.seconds, candidate.stages.lower_bound)]
        assert same, candidate.reason
    for c in listed[1:]:
        assert c.seconds >= listed[0].seconds
        assert c.verdict in ("slower", "equal") if c.simulated else c.verdict == "bound"
    assert {"data parallel even", "tensor parallel"} <= {c.reason for c in listed}
    assert any(len(c.active) == 1 for c in listed), "one device alone was compared, or left out by its bound"


def test_candidates_that_do_not_fit_say_which_device_lacks_what() -> None:
    theory = traced("llama").theory
    whole = synthesize(watched(theory, on(NETWORKS[0], 3, 2))).best
    peak = max(whole.cost.memory_bytes)
    devices = on(NETWORKS[0], 3, 2)
    tight = replace(devices, devices=tuple(replace(d, memory=peak * 0.8) for d in devices.devices))
    listed = synthesize(watched(theory, tight)).considered
    lacking = [c for c in listed if c.verdict == "memory"]
    assert lacking
    for c in lacking:
        assert c.lacking
        assert all(rank in c.active and nbytes > 0 for rank, nbytes in c.lacking)


@pytest.mark.parametrize("segments", [1, 2, "auto"])
def test_one_candidate_is_taken_of_all_that_were_compared(segments: Segments) -> None:
    entry = traced("llama")
    devices = on(NETWORKS[0], 3, 2)
    plan = hetspmd.compile(entry.model, entry.example, devices, loss=entry.loss, segments=segments)
    taken = [c for c in plan.considered if c.verdict == "taken"]
    assert taken == [plan.considered[0]]
    assert taken[0].seconds == pytest.approx(plan.cost.step_seconds, rel=1e-9)
    assert taken[0].active == plan.active
    assert Plan.from_json(plan.to_json()) == plan
