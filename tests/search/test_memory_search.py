"""The best program that fits: what is charged is held, bounds are bounds, and parameters are gathered again where
memory asks for it."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from functools import cache
from typing import Any, cast

import numpy as np
import pytest
from program_builder import cheap_random_program, random_program, uneven
from small_models import case

from hetspmd.cost.memory import memory_profile
from hetspmd.cost.model import CostModel
from hetspmd.cost.step import StepModel
from hetspmd.errors import MemoryLimitError
from hetspmd.placement import REPLICATE, Placement, is_sharded
from hetspmd.program.checker import check
from hetspmd.program.lengths import Lengths, lengths_for
from hetspmd.program.loop_steps import repeatable
from hetspmd.program.micro_batches import MicroBatches, micro_batches
from hetspmd.program.program import Communicate, Program
from hetspmd.rules.theory import Theory
from hetspmd.search import constraints as known
from hetspmd.search.constraints import Constraints
from hetspmd.search.memory_limits import capacities, search_that_fits
from hetspmd.search.memory_prices import MemoryPrices, Place
from hetspmd.search.pricing import Prices
from hetspmd.search.search import Limits, Searcher, SearchResult
from hetspmd.search.space import search_space
from memory_cases import (
    devices,
    forms_held,
    gathered_again,
    kept_for_backward,
    second_readings,
    stack_theory,
    stored,
    with_memory,
)
from test_random_programs import RandomCosts
from workbench import traced

SMALL = ("mlp", "conv", "attention")
ZOO = ("gpt2", "llama")
LARGE = ("bert", "vit", "vgg19", "bert-moe", "dlrm", "lstm", "t5")
LIMITS = Limits(expansions=3000)


def theory_of(name: str) -> Theory:
    if name == "stack":
        return stack_theory()
    return case(name).theory if name in SMALL else traced(name).theory


@cache
def searcher_of(name: str) -> Searcher:
    return Searcher(search_space(theory_of(name), Constraints()))


# the charge is a lower bound -----------------------------------------------------------------------------------


def charge(memory_prices: MemoryPrices, prices: Prices, program: Program) -> float:
    """What the search charges a program: of each tensor the cheapest form that it makes, and what is kept for
    second readings. One that is communicated for itself alone is charged as if its own tensor were."""
    pricing, space = memory_prices.searcher.pricing, memory_prices.searcher.space
    made = forms_held(space.theory, program)
    total = 0.0
    for n, t in enumerate(pricing.tensors):
        keep = prices.keep[pricing.keep_start[n] : pricing.keep_start[n + 1]]
        total += min(price for form, price in zip(space.forms[t], keep, strict=True) if form in made[t])
    for i, row in kept_for_backward(space.theory, program).items():
        if i in prices.second_reads:
            total += float(prices.second_reads[i][space.rows[i].index(row)])
    return total


def random_prices(theory: Theory, world: int, dice: random.Random) -> dict[Place, float]:
    """Seconds per byte at a few places, over three orders of magnitude."""
    instructions = len(theory.graph.instructions)
    return {
        (dice.randrange(instructions), dice.randrange(world)): 10 ** dice.uniform(-3, 0)
        for _ in range(dice.choice((1, 2, 8)))
    }


def check_charges(
    name: str,
    program: Program,
    lengths: Lengths,
    dice: random.Random,
    draws: int,
    batches: MicroBatches | None = None,
) -> float:
    """The largest part of what is held that is charged. Fails where that is more than 1."""
    searcher = searcher_of(name)
    theory = searcher.space.theory
    memory_prices = MemoryPrices(searcher, batches)
    model = CostModel(theory, devices(*[1.0] * lengths.world), batches)
    profile = memory_profile(theory, program, lengths, batches=batches)
    largest = 0.0
    for _ in range(draws):
        at = random_prices(theory, lengths.world, dice)
        held = sum(price * float(profile.during(i)[j]) for (i, j), price in at.items())
        charged = charge(memory_prices, memory_prices.prices(model, lengths, at), program)
        assert charged <= held * (1 + 1e-9) + 1e-12, (name, at)
        largest = max(largest, charged / held if held else 0.0)
    return largest


def randomly_searched(name: str, lengths: Lengths, seed: int) -> SearchResult:
    """The best program under random costs."""
    costs = cast(CostModel, RandomCosts(theory_of(name), random.Random(seed)))
    return searcher_of(name).search(costs, lengths, Limits(expansions=100))


def tried(name: str, seeds: int, searched: int) -> None:
    theory = theory_of(name)
    largest = 0.0
    for seed in range(seeds):
        dice = random.Random(seed)
        lengths = uneven(theory, 1 + seed % 5, seed)
        programs = [random_program(theory, seed), cheap_random_program(theory, seed)]
        if seed < searched:
            programs.append(randomly_searched(name, lengths, seed).program)
        for program in programs:
            largest = max(largest, check_charges(name, program, lengths, dice, 4))
    assert largest > 0.5, "the charge says something"


@pytest.mark.parametrize("name", SMALL)
def test_what_is_charged_is_held(name: str) -> None:
    tried(name, seeds=15, searched=5)


@pytest.mark.parametrize("name", ["mlp", "attention", "stack"])
def test_what_is_charged_is_held_in_micro_batches(name: str) -> None:
    """Wherever the collectives are: outside of the loop, in it, some of both."""
    theory = theory_of(name)
    largest = 0.0
    for seed in range(12):
        dice = random.Random(seed)
        batches = micro_batches(theory, 2 + seed % 2)
        able = sorted(repeatable(theory, batches))
        repeated = dice.sample(able, round(seed % 3 / 2 * len(able)))
        batches = replace(batches, repeated=frozenset(repeated))
        lengths = uneven(theory, 1 + seed % 5, seed)
        for program in (random_program(theory, seed), cheap_random_program(theory, seed)):
            largest = max(largest, check_charges(name, program, lengths, dice, 4, batches))
    assert largest > 0.5, "the charge says something"


@pytest.mark.slow
@pytest.mark.parametrize("name", [*ZOO, *LARGE])
def test_what_is_charged_is_held_by_programs_of_models(name: str) -> None:
    tried(name, seeds=20, searched=5)


def test_what_is_charged_is_held_by_programs_found_at_prices() -> None:
    """Those that matter for the bound: the minimisers themselves, at the prices at which they were found."""
    for name in ("attention", "stack"):
        searcher = searcher_of(name)
        theory = searcher.space.theory
        memory_prices = MemoryPrices(searcher)
        for seed in range(20):
            dice = random.Random(seed)
            lengths = uneven(theory, 2 + seed % 3, seed)
            model = CostModel(theory, devices(*[1.0 / lengths.world] * lengths.world))
            at = {p: v * 1e-9 for p, v in random_prices(theory, lengths.world, dice).items()}
            prices = memory_prices.prices(model, lengths, at)
            found = searcher.search(model, lengths, LIMITS, prices=prices)
            profile = memory_profile(theory, found.program, lengths)
            held = sum(price * float(profile.during(i)[j]) for (i, j), price in at.items())
            charged = charge(memory_prices, prices, found.program)
            assert charged <= held * (1 + 1e-9)
            # The least sum of costs and charges is at most that, but for the core's rounding.
            assert found.lower_bound <= (found.cost + held) * (1 + 1e-9) + 1e-9
            assert found.cost == pytest.approx(searcher.cost(found, model, lengths), rel=1e-9)
            communicated = {s.tensor for s in found.program.steps if isinstance(s, Communicate)}
            assert communicated == {t for t, move in enumerate(found.moves) if move is not None}


def test_a_chain_of_communications_keeps_the_first_from_the_forward_on() -> None:
    """Programs of a second reading that takes one form of a parameter and is communicated to another: what is
    charged as kept must have been communicated before the forward's last reader."""
    chains = 0
    for name in SMALL:
        theory = theory_of(name)
        again = second_readings(theory)
        for seed in range(6):
            lengths = uneven(theory, 3, seed)
            found = randomly_searched(name, lengths, 1000 + seed)
            forms = forms_held(theory, found.program)
            for i, row in kept_for_backward(theory, found.program).items():
                (tensor,) = theory.graph.instructions[i].outputs
                assert theory.rows[i][row].pre[0] != stored(theory, found.program)[again[tensor]]
            for i in theory.graph.second_reads:
                (tensor,) = theory.graph.instructions[i].outputs
                taken = theory.rows[i][found.rows[i]].pre[0]
                if (
                    len(forms[tensor]) > 1
                    and taken != stored(theory, found.program)[again[tensor]] != REPLICATE
                ):
                    chains += 1
                    assert i in kept_for_backward(theory, found.program)
    assert chains > 3


# the search ----------------------------------------------------------------------------------------------------


class Problem:
    """A model on a cluster at proportional lengths, with the best program without regard to memory."""

    def __init__(self, name: str, *shares: float, flops: float = 1e9) -> None:
        self.searcher = searcher_of(name)
        self.theory = self.searcher.space.theory
        self.cluster = devices(*shares, flops=flops)
        self.lengths = lengths_for(self.theory.axes, shares)
        self.model = CostModel(self.theory, self.cluster)
        self.free = self.searcher.search(self.model, self.lengths, Limits())
        self.peaks = np.maximum(self.profile(self.free).peaks, self.executed(self.free).peaks).astype(float)

    def profile(self, found: SearchResult | Program):
        program = found if isinstance(found, Program) else found.program
        return memory_profile(self.theory, program, self.lengths)

    def executed(self, found: SearchResult):
        return StepModel(self.model, found.program).held(self.lengths)

    def fits(self, found: SearchResult, part: float) -> bool:
        profiles = self.profile(found), self.executed(found)
        return not any(profile.lacking(part * self.peaks).any() for profile in profiles)

    def limited(self, part: float) -> CostModel:
        return CostModel(self.theory, with_memory(self.cluster, part * self.peaks))

    def solve(self, part: float) -> SearchResult:
        return search_that_fits(self.searcher, self.limited(part), self.lengths, Limits(), self.free)


@cache
def problem(name: str) -> Problem:
    if name == "stack":
        return Problem(name, 0.25, 0.25, 0.25, 0.25, flops=1e10)
    return Problem(name, 0.4, 0.3, 0.2, 0.1)


PARTS = {"stack": (1.0, 0.85, 0.78, 0.76, 0.75, 0.5), "llama": (1.0, 0.95, 0.9, 0.5)}
"""Of the memory that the best program needs. With half of it nothing fits."""


@cache
def solutions(name: str) -> dict[float, SearchResult]:
    """The programs found with parts of the memory that the best one needs, where there are some."""
    found = {}
    for part in PARTS[name]:
        try:
            found[part] = problem(name).solve(part)
        except MemoryLimitError:
            continue
    return found


@pytest.mark.parametrize("name", PARTS)
def test_programs_fit_and_bounds_hold(name: str) -> None:
    p, found = problem(name), solutions(name)
    assert len(found) == len(PARTS[name]) - 1
    assert found[1.0] is p.free, "what fits is left alone"
    for part, best in found.items():
        check(p.theory, best.program)
        assert p.fits(best, part)
        assert best.lower_bound <= best.cost
        assert best.cost == pytest.approx(p.searcher.cost(best, p.model, p.lengths), rel=1e-12)
        assert best.gap == pytest.approx((best.cost - best.lower_bound) / best.cost, abs=1e-15)
        assert best.stop_reason == ("optimal" if best.gap == 0 else "memory")
        assert best.gap < 0.06
    sequence = [found[part] for part in sorted(found, reverse=True)]
    for more, less in itertools.pairwise(sequence):
        assert less.lower_bound >= more.lower_bound * (1 - 1e-9) or less.lower_bound >= p.free.lower_bound
        # A program that fits into less fits into more, where no program costs less than the bound.
        assert less.cost >= more.lower_bound
        assert less.cost >= p.free.cost


@pytest.mark.parametrize("name", PARTS)
def test_no_sampled_program_that_fits_costs_less_than_the_bound(name: str) -> None:
    p, found = problem(name), solutions(name)
    memory_prices = MemoryPrices(p.searcher)
    samples = [p.free, *found.values()]
    for wanted in (known.data_parallel(p.theory), known.zero_like(p.theory), known.tensor_parallel(p.theory)):
        samples.append(p.searcher.search(p.model, p.lengths, LIMITS, within=p.searcher.space.within(wanted)))
    dice = random.Random(1)
    for _ in range(20 if name == "stack" else 8):
        scale = p.free.cost / float(p.peaks.max()) * 10 ** dice.uniform(-2, 1)
        at = {place: v * scale for place, v in random_prices(p.theory, 4, dice).items()}
        prices = memory_prices.prices(p.model, p.lengths, at, tilt=dice.choice((0.0, 0.5)))
        samples.append(p.searcher.search(p.model, p.lengths, LIMITS, prices=prices, start=p.free))
    for seed in range(4):
        forms: dict[int, Placement] = {
            q.tensor: dice.choice(p.theory.rows[p.theory.graph.producers[q.tensor]]).post[0]
            for q in p.theory.graph.parameters
            if seed % 2 or dice.random() < 0.5
        }
        within = p.searcher.space.within(Constraints(forms))
        samples.append(p.searcher.search(p.model, p.lengths, LIMITS, within=within))
    fitting = 0
    for part, best in found.items():
        for sample in samples:
            if p.fits(sample, part):
                fitting += 1
                cost = p.searcher.cost(sample, p.model, p.lengths)
                assert best.lower_bound <= cost * (1 + 1e-9)
    assert fitting > 15


def test_zero_3_is_chosen_because_memory_asks_for_it() -> None:
    """A stack is data parallel. With less memory its parameters are stored in shards, which costs nothing in the
    model; with still less they are gathered again for the backward, one after the other."""
    p, found = problem("stack"), solutions("stack")
    assert not gathered_again(p.theory, p.free.program)
    counts = [len(gathered_again(p.theory, found[part].program)) for part in (0.78, 0.76, 0.75)]
    assert 0 < counts[0] <= counts[1] <= counts[2] == 3, "the last layer's is needed at once"
    for part in (0.78, 0.76, 0.75):
        program = found[part].program
        assert all(is_sharded(form) for form in stored(p.theory, program).values())
        for parameter in gathered_again(p.theory, program):
            assert parameter in {q.tensor for q in p.theory.graph.parameters}
        # Each costs one more collective: nothing else changes.
        extra = len(gathered_again(p.theory, program))
        one = p.model.move_seconds(
            next(iter(gathered_again(p.theory, program))), 2, REPLICATE, "all_gather", p.lengths
        )
        assert found[part].cost == pytest.approx(p.free.cost + extra * one, rel=1e-6)


def test_zero_3_in_a_transformer() -> None:
    p, found = problem("llama"), solutions("llama")
    assert not gathered_again(p.theory, p.free.program)
    assert gathered_again(p.theory, found[0.95].program) or gathered_again(p.theory, found[0.9].program)
    for best in found.values():
        again = gathered_again(p.theory, best.program)
        assert all(is_sharded(stored(p.theory, best.program)[t]) for t in again)


def test_nothing_fits() -> None:
    p = problem("stack")
    with pytest.raises(MemoryLimitError, match="no program was found that fits") as caught:
        p.solve(0.3)
    error = caught.value
    assert error.lacking
    for rank, (missing, capacity) in error.lacking.items():
        assert capacity == int(0.3 * p.peaks[rank])
        assert missing > 0
        assert f"rank {rank} (d{rank}) lacks {missing / 2**20:.4g} MiB" in str(error)


def test_one_device_names_what_it_lacks() -> None:
    p = Problem("stack", 1.0)
    with pytest.raises(MemoryLimitError, match=r"rank 0 \(d0\) lacks") as caught:
        p.solve(0.5)
    assert set(caught.value.lacking) == {0}


def test_the_same_again() -> None:
    p = problem("stack")
    first, second = (
        replace(
            search_that_fits(
                Searcher(search_space(p.theory, Constraints())), p.limited(0.76), p.lengths, Limits(), p.free
            ),
            seconds=0.0,
        )
        for _ in range(2)
    )
    assert first == second
    assert repr(first.program) == repr(second.program)


def test_only_devices_with_a_limit_count() -> None:
    p = problem("stack")
    memory = [np.inf, 0.76 * p.peaks[1], np.inf, np.inf]
    model = CostModel(p.theory, with_memory(p.cluster, memory))
    assert capacities(model).tolist() == memory
    found = search_that_fits(p.searcher, model, p.lengths, Limits(), p.free)
    assert p.profile(found).peaks[1] <= memory[1]
    assert p.free.cost < found.cost
    assert found.lower_bound <= solutions("stack")[0.76].cost, "which fits as well"


def test_a_part_of_the_space() -> None:
    """Within the programs of tensor parallelism the result is one of them."""
    p = problem("stack")
    within = p.searcher.space.within(known.tensor_parallel(p.theory))
    start = p.searcher.search(p.model, p.lengths, Limits(), within=within)
    peaks = np.array(p.profile(start).peaks, dtype=float)
    batch = p.theory.batch_axes
    model = CostModel(p.theory, with_memory(p.cluster, 0.97 * peaks))
    try:
        found = search_that_fits(p.searcher, model, p.lengths, Limits(), start, within=within)
    except MemoryLimitError:
        return
    assert not p.profile(found).lacking(0.97 * peaks).any()
    for i, row in enumerate(found.rows):
        assert p.theory.row_axes[i][row] not in batch


def test_no_program_costs_more_than_the_dearest() -> None:
    for name in SMALL:
        searcher = searcher_of(name)
        theory = searcher.space.theory
        for seed in range(6):
            lengths = uneven(theory, 1 + seed % 4, seed)
            model = CostModel(theory, devices(*[1.0 / lengths.world] * lengths.world))
            dearest = searcher.dearest(model, lengths)
            for found in (randomly_searched(name, lengths, seed), searcher.search(model, lengths, LIMITS)):
                assert searcher.cost(found, model, lengths) <= dearest * (1 + 1e-9)


def test_the_search_ends_where_nothing_can_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some prices prove it, so that no scales of them are tried."""
    p = problem("stack")
    searches = 0
    search = Searcher.search

    def counted(self: Searcher, *args: Any, **options: Any) -> SearchResult:
        nonlocal searches
        searches += 1
        return search(self, *args, **options)

    monkeypatch.setattr(Searcher, "search", counted)
    with pytest.raises(MemoryLimitError):
        p.solve(0.3)
    assert searches <= 6
