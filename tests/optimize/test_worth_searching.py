"""Where memory is short: which starts of the alternation are searched at prices of memory, and in which order."""

from __future__ import annotations

import math
from typing import Any

import pytest

from hetspmd.optimize import alternation, synthesize
from hetspmd.optimize.alternation import Rounds, alternate
from hetspmd.optimize.synthesis import Synthesis
from hetspmd.program.lengths import lengths_for
from hetspmd.ratios.ratios import optimise
from hetspmd.ratios.starts import by_memory, proportional, starting_ratios
from hetspmd.search.constraints import Constraints
from hetspmd.search.search import Limits
from memory_cases import devices, stack_theory, with_memory

SHARES = (0.5, 0.25, 0.125, 0.125)


def context(part: float) -> Synthesis:
    """A stack on devices of unlike speeds, with a part of the memory that the best program in even shares needs on
    each of them."""
    theory, free = stack_theory(), devices(*SHARES)
    ctx = Synthesis(theory, free, Constraints({}), Limits())
    even = alternate(ctx, ctx.costs(ctx.everyone), ctx.everyone, (("even", (0.25,) * 4),)).candidates[0]
    memory = [part * n for n in even.cost.memory_bytes]
    return Synthesis(theory, with_memory(free, memory), Constraints({}), Limits())


def rounds(ctx: Synthesis, worth: float = math.inf) -> Rounds:
    costs = ctx.costs(ctx.everyone)
    return alternate(ctx, costs, ctx.everyone, starting_ratios(costs), worth=worth)


def test_the_start_that_lacks_least_comes_first() -> None:
    ctx = context(0.9)
    costs = ctx.costs(ctx.everyone)
    assert next(iter(starting_ratios(costs)))[0] == "proportional"
    made = rounds(ctx)
    assert made.iterations[0].start == "even"
    assert any(candidate.fits for candidate in made.candidates)


def test_what_is_slower_without_regard_to_memory_is_not_searched_within_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ctx = context(0.9)
    costs = ctx.costs(ctx.everyone)
    start = (("memory", tuple(by_memory(costs))),)
    first = alternate(ctx, costs, ctx.everyone, start).replaced[0]
    moved = optimise(ctx.theory, costs, first.program, first.ratios)
    least = first.evaluator(moved, lengths_for(ctx.theory.axes, moved)).seconds
    assert least < 0.9 * first.seconds, "other ratios are better for the program"

    def never(*_: object, **__: object) -> None:
        raise AssertionError

    monkeypatch.setattr(alternation, "search_that_fits", never)
    nothing = alternate(ctx, costs, ctx.everyone, start, worth=least * 0.99)
    assert not nothing.candidates
    assert nothing.replaced
    with pytest.raises(AssertionError):
        alternate(ctx, costs, ctx.everyone, start, worth=least * 1.2)


def test_known_candidates_make_a_search_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the beginning where nothing else fits; with a few searches where something does, and the more where
    what is found is faster."""
    ctx, asked = context(0.9), list[tuple[bool, float]]()
    usual = alternation.search_that_fits

    def watched(*args: Any, known: Any, quick: bool, **options: Any) -> Any:
        asked.append((quick, known.worth))
        return usual(*args, known=known, quick=quick, **options)

    monkeypatch.setattr(alternation, "search_that_fits", watched)
    costs, start = ctx.costs(ctx.everyone), (("even", (0.25,) * 4),)
    alternate(ctx, costs, ctx.everyone, start)
    assert asked[0] == (False, 0.0)
    asked.clear()
    alternate(ctx, costs, ctx.everyone, start, worth=1.0)
    assert asked[0] == (True, 1.0)


def test_rounds_end_where_what_fits_is_much_slower_than_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    ctx = context(0.9)
    costs, start = ctx.costs(ctx.everyone), (("proportional", proportional(ctx.costs(ctx.everyone))),)
    usual = alternate(ctx, costs, ctx.everyone, start)
    first = min(c.seconds for c in usual.candidates[:2])
    assert first / 1.2 > usual.replaced[0].seconds, "memory costs time here"
    searched = alternation.search_that_fits

    def thorough(*args: Any, quick: bool, **options: Any) -> Any:
        return searched(*args, quick=False, **options)

    monkeypatch.setattr(alternation, "search_that_fits", thorough)
    ended = alternate(ctx, costs, ctx.everyone, start, worth=first / 1.2)
    assert len(ended.iterations) == 1 < len(usual.iterations)
    assert len(alternate(ctx, costs, ctx.everyone, start, worth=first).iterations) > 1


def test_rounds_end_where_memory_is_not_short_too() -> None:
    theory, free = stack_theory(), devices(*SHARES)
    ctx = Synthesis(theory, free, Constraints({}), Limits())
    costs, start = ctx.costs(ctx.everyone), (("even", (0.25,) * 4),)
    usual = alternate(ctx, costs, ctx.everyone, start)
    assert not usual.replaced, "everything fits"
    first = min(c.seconds for c in usual.candidates[:2])
    ended = alternate(ctx, costs, ctx.everyone, start, worth=first / 1.2)
    assert len(ended.iterations) == 1 < len(usual.iterations)
    assert len(alternate(ctx, costs, ctx.everyone, start, worth=first).iterations) > 1


@pytest.mark.parametrize(("part", "given_up"), [(2.0, True), (0.9, False)])
def test_much_slower_devices_get_no_programs_that_hide_communication(
    part: float, given_up: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless memory is short: such programs often hold less, and gain much."""
    ctx, asked = context(part), list[float]()
    usual = synthesize.overlap_variants

    def watched(*args: Any) -> Any:
        asked.append(args[3].seconds)
        return usual(*args)

    monkeypatch.setattr(synthesize, "overlap_variants", watched)
    ranks = (0, 1) if given_up else ctx.everyone
    _, rounds = synthesize._on_subset(ctx, ctx.costs(ranks), ranks, math.inf)
    assert bool(rounds.replaced) is not given_up
    (least,) = asked
    for worth, tried in ((least / 1.2, True), (least / 1.3, not given_up)):
        asked.clear()
        synthesize._on_subset(ctx, ctx.costs(ranks), ranks, worth)
        assert bool(asked) is tried
