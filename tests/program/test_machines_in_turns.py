"""Programs of machines in micro-batches, with programs of their accelerators inside: every accelerator computes
what one device computes of the whole batch, and the proof of the steps refuses others."""

from __future__ import annotations

import random
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
from program_builder import cheap_random_program, random_program, uneven
from ranks_in_turns import error_of_machines
from test_ranks_in_turns import in_loop

from hetspmd.errors import DroppedOutputWarning, PlanError, ProofError
from hetspmd.optimize.in_micro_batches import in_micro_batches
from hetspmd.placement import PARTIAL, REPLICATE, is_sharded
from hetspmd.program.layout import Region
from hetspmd.program.level_layout import LevelKey, RankPlace, Rows
from hetspmd.program.levels import Across, Both, InsideCollective, between, within
from hetspmd.program.machine_turn_layout import MachineTurnLayout
from hetspmd.program.micro_batches import MicroBatches, in_own_turns, micro_batches
from hetspmd.program.nested_turns import nest_turns
from hetspmd.program.nested_turns_check import check_nested_turns
from hetspmd.program.program import Program
from hetspmd.program.schedule import make_schedule
from hetspmd.program.turn_lengths import turn_lengths
from hetspmd.program.turn_steps import TurnSteps
from hetspmd.rules.rule import LocalCall, Triple
from test_levels_together import cut_subject
from test_nested_programs import BUCKETS, MODES, inner_program
from test_random_programs import TOLERANCE, Subject, subject
from workbench import single_device

PARTS = ((0.5, 0.34, 0.16), (0.0, 0.7, 0.3), (0.5, 0.5), (0.2,) * 5)
"""The part of the samples in each micro-batch: uneven, one of nothing, alike, and several that share a graph."""


@dataclass(frozen=True)
class _InTime:
    """A layout of two levels for :func:`inner_program`, of rows that are also to be had in time."""

    layout: MachineTurnLayout

    @property
    def places(self) -> list[RankPlace]:
        world = sum(self.layout.of_machines)
        return [RankPlace(turn, rank) for turn in self.layout.alike_turns for rank in range(world)]

    def call(self, instruction: int, rows: Rows, at: RankPlace) -> LocalCall | None:
        in_time: Triple = self.layout.batches.loop.rows[instruction]
        return self.layout.call(instruction, (in_time, *rows), at)


@cache
def without_rows(name: str, segments: bool = False) -> tuple[Subject, MicroBatches]:
    """A model of which no output has rows of the batch, in one segment or several."""
    of = cut_subject(name) if segments else subject(name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DroppedOutputWarning)
        theory, batches = in_micro_batches(of.theory, 2)
    assert batches is not None
    return replace(of, theory=theory, want=single_device(theory, of.model, of.inputs)), batches


@dataclass(frozen=True)
class InTurns:
    """A step of machines in micro-batches, and what it is made of."""

    of: Subject
    outer: Program
    inner: Program
    steps: TurnSteps
    layout: MachineTurnLayout

    def error(self) -> float:
        return error_of_machines(self.steps, self.layout, self.of.model, self.of.inputs, self.of.want)

    def prove(self, **changed: Any) -> int:
        loop, steps = self.layout.batches.loop, replace(self.steps, **changed)
        return check_nested_turns(self.of.theory, loop, self.outer, self.inner, steps)


def case(name: str, seed: int, *, segments: bool = False) -> InTurns:
    of, batches = without_rows(name, segments)
    theory, dice = of.theory, random.Random(seed)
    accelerators = [dice.choice((1, 2, 3)) for _ in range(dice.choice((1, 2, 3)))]
    if max(accelerators) == 1:
        accelerators[0] = 2
    parts = dice.choice(PARTS)
    loop = in_loop(theory, batches, seed // 2 % 3 / 2, seed)
    loop = replace(loop, count=len(parts), turns=turn_lengths(theory, loop.loop.axes, parts))
    outer = (random_program if seed % 2 else cheap_random_program)(theory, seed)
    layout = MachineTurnLayout(theory, loop, uneven(theory, len(accelerators), seed), accelerators)
    inner = inner_program(of, _InTime(layout), outer, seed, MODES[seed % 3])
    size, inside = BUCKETS[seed // 3 % 3], BUCKETS[(seed // 3 + seed) % 3]
    steps = nest_turns(theory, (outer, make_schedule(theory, outer, size)), loop, inner, inside)
    return InTurns(of, outer, inner, steps, layout)


def collectives(steps: TurnSteps) -> Iterator[str]:
    for phase, step in steps.together(("before", "in", "after")):
        yield from (f"{phase}: inside" for _ in within(step))
        yield from (f"{phase}: across" for _ in between(step))


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("mlp", 12),
        *(pytest.param(name, 40, marks=pytest.mark.slow)
          for name in ("mlp", "attention", "vocabulary", "experts")),
    ],
)  # fmt: skip
def test_random_programs(name: str, count: int) -> None:
    seen: Counter[str] = Counter()
    for seed in range(count):
        one = case(name, seed)
        assert one.prove() > len(one.of.theory.graph.tensors)
        assert one.error() <= TOLERANCE, f"seed {seed}"
        seen.update(collectives(one.steps))
    if name == "mlp":
        assert set(seen) >= {
            f"{phase}: {where}" for phase in ("in", "after") for where in ("inside", "across")
        }
        assert seen["before: across"]


@pytest.mark.parametrize(
    "name", ["mlp", *(pytest.param(n, marks=pytest.mark.slow) for n in ("attention", "vocabulary"))]
)
def test_random_programs_in_segments(name: str) -> None:
    """Every axis has lengths of its own, so that in each turn copies at the cuts change hands."""
    seen: Counter[str] = Counter()
    for seed in range(8):
        one = case(name, seed, segments=True)
        one.prove()
        assert one.error() <= TOLERANCE, f"seed {seed}"
        moves = (m for step in one.steps.turn for m in between(step))
        seen["rebalance"] += sum(m.kind == "rebalance" for m in moves)
    assert seen["rebalance"]


@pytest.mark.parametrize("seed", [0, 1])
def test_a_wrong_part_is_noticed(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison sees accelerators that take the first one's part of what is whole inside."""
    one = case("mlp", seed)
    assert one.error() <= TOLERANCE
    right = MachineTurnLayout.region

    def wrong(self: MachineTurnLayout, key: LevelKey, level: int, at: RankPlace) -> Region | None:
        region = right(self, key, level, at)
        return replace(region, start=0) if region is not None and level == 2 and region.extent else region

    monkeypatch.setattr(MachineTurnLayout, "region", wrong)
    assert one.error() > TOLERANCE


def test_refused() -> None:
    """Turns of their own, and rows of the batch that leave the loop."""
    of = subject("attention")
    batches, outer = micro_batches(of.theory, 2), random_program(of.theory, 1)
    both = outer, make_schedule(of.theory, outer, 0)
    with pytest.raises(PlanError, match="turns of their own"):
        nest_turns(of.theory, both, in_own_turns(of.theory, batches, (1, 2)), outer)
    with pytest.raises(PlanError, match="leaves no rows of its micro-batches"):
        nest_turns(of.theory, both, batches, outer)


def without(steps: tuple[Any, ...], place: int) -> tuple[Any, ...]:
    return steps[:place] + steps[place + 1 :]


@pytest.mark.parametrize("name", ["mlp", pytest.param("attention", marks=pytest.mark.slow)])
def test_the_proof_refuses_steps_that_lack_one(name: str) -> None:
    """Any step that is left out, before the loop, in it or after it: something reads what it makes."""
    one, refused = case(name, 4), Counter[str]()
    of_phase = {"before": one.steps.before, "in": one.steps.turn, "after": one.steps.after}
    fields: dict[str, str] = {"before": "before", "in": "turn", "after": "after"}
    for phase, steps in of_phase.items():
        at = [place for place, each in enumerate(one.steps.order) if each == phase]
        for place in range(len(steps)):
            order = without(one.steps.order, at[place])
            try:
                one.prove(**{fields[phase]: without(steps, place), "order": order})
            except ProofError:
                refused[phase] += 1
    assert len(refused) == 3, refused


def test_the_proof_refuses_another_loop() -> None:
    one = case("mlp", 3)
    steps = one.steps
    first = next(
        place
        for place, step in enumerate(steps.turn)
        if isinstance(step, Both) and step.turn not in (step.inner, step.outer)
        if one.layout.batches.loop.phases[step.instruction] == "in"
    )
    both = steps.turn[first]
    assert isinstance(both, Both)

    def refused(match: str, **changed: Any) -> None:
        with pytest.raises(ProofError, match=match):
            one.prove(**changed)

    def with_first(step: Any) -> tuple[Any, ...]:
        return (*steps.turn[:first], step, *steps.turn[first + 1 :])

    refused(
        "by other rows than the programs and the loop say", turn=with_first(replace(both, turn=both.inner))
    )
    refused("by other rows", turn=with_first(replace(both, turn=None)))
    refused("is not proved", read=())
    refused("is not proved", leaving=())
    refused("the order leaves out steps", order=steps.order[:-1])
    refused("more steps 'after' than there are", order=(*steps.order, "after"))
    refused("is left for", gradients=tuple((t, 0, 0, 1) for t, *_ in steps.gradients))
    refused("leaves 0 of the gradients", gradients=())
    backwards = ("after", *(phase for phase in steps.order if phase != "after"))
    refused("is not proved", order=backwards + tuple("after" for _ in steps.after[1:]))
    # What is in the loop runs in each turn, not once.
    refused("which says 'in'", after=(*steps.after, both), order=(*steps.order, "after"))
    refused("runs twice", turn=(*steps.turn, both), order=(*steps.order, "in"))


def test_the_proof_refuses_other_collectives() -> None:
    """In other forms, on another level, of another kind, or of what is not summed yet."""
    seen: Counter[str] = Counter()
    for seed in range(6):
        one = case("mlp", seed)
        steps = one.steps
        for name, of in (("turn", steps.turn), ("after", steps.after)):
            for place, step in enumerate(of):
                if not isinstance(step, (InsideCollective, Across)):
                    continue
                whole = replace(step, kind="all_reduce", source=PARTIAL, target=REPLICATE)
                changes = {
                    "time": replace(step, time=REPLICATE) if step.time else None,
                    "no time": replace(step, time=None),
                    "kind": replace(step, kind="all_gather" if step.kind == "all_reduce" else "all_reduce"),
                    "source": whole if is_sharded(step.source) else None,
                }
                for what, other in changes.items():
                    if other is not None:
                        with pytest.raises(ProofError):
                            one.prove(**{name: (*of[:place], other, *of[place + 1 :])})
                        seen[f"{name} {what} {type(step).__name__}"] += 1
    assert len(seen) > 10
