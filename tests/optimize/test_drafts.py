"""Plans of large steps in several numbers of micro-batches are drafted, and only the best draft is made a plan."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from test_levels_mixed import divided
from test_prepared import squares, wide_on_small_devices

import hetspmd
from hetspmd.cluster.cluster import Cluster
from hetspmd.errors import MemoryLimitError, MicroBatchError
from hetspmd.optimize import compilation, synthesis
from hetspmd.optimize.in_micro_batches import StepDraft, best_number
from hetspmd.optimize.memory_bound import lasting_part
from hetspmd.optimize.thresholds import THRESHOLDS
from hetspmd.program.micro_batches import MicroBatches
from hetspmd.rules.theory import Theory
from workbench import cluster

Outcome = float | tuple[float, float] | MemoryLimitError | MicroBatchError


class Drafts:
    """Drafts of given seconds, or those of the draft and of its plan, by number; what was drafted and made."""

    def __init__(self, outcomes: dict[int, Outcome]) -> None:
        self.outcomes, self.drafted, self.made = outcomes, list[int](), list[int]()

    def __call__(self, _: Theory, batches: MicroBatches | None) -> StepDraft:
        count = 1 if batches is None else batches.count
        self.drafted.append(count)
        outcome = self.outcomes[count]
        if isinstance(outcome, Exception):
            raise outcome
        seconds, planned = outcome if isinstance(outcome, tuple) else (outcome, outcome)
        return StepDraft(seconds, True, lambda: self._plan(count, planned))

    def _plan(self, count: int, seconds: float) -> Any:
        self.made.append(count)
        cost = SimpleNamespace(step_seconds=seconds, per_device_compute=(seconds,))
        return SimpleNamespace(cost=cost, considered=(), repeated=())

    def best(self, lasting: float | None = None) -> float:
        """Seconds of the plan that is chosen."""
        plan = best_number(divided(2)[0], "auto", unasked, drafted=self, lasting=lasting)
        return float(plan.cost.step_seconds)


def unasked(*_: Any) -> Any:
    raise AssertionError("a number fits, so none is asked for thoroughly")


def lacks(missing: int, have: int = 100) -> MemoryLimitError:
    return MemoryLimitError({0: (missing, have)}, ["d0"])


def test_only_the_best_draft_is_made_a_plan() -> None:
    drafts = Drafts({1: lacks(1), 2: 9.0, 4: 5.0, 8: 6.0})
    assert drafts.best() == 5.0
    assert (drafts.drafted, drafts.made) == ([1, 2, 4, 8], [4])


def test_plans_decide_between_drafts_that_are_nearly_as_good() -> None:
    near = 1 + THRESHOLDS.near_draft / 2
    drafts = Drafts({1: lacks(1), 2: (5.0, 4.5), 4: (5.0 * near, 4.0), 8: 3.0})
    assert drafts.best() == 4.0
    assert (drafts.drafted, drafts.made) == ([1, 2, 4], [2, 4])


def test_numbers_that_lack_much_by_the_last_one_are_left_out() -> None:
    """180 of 100 bytes are missing and 40 are held in any number: 240 / 8 fit beside them, 240 / 2 do not."""
    drafts = Drafts({1: lacks(180), 4: lacks(10), 8: 5.0, 16: 6.0})
    assert drafts.best(lasting=0.4) == 5.0
    assert drafts.drafted == [1, 4, 8, 16]
    drafts = Drafts({1: lacks(180), 2: 7.0, 4: 8.0})
    assert drafts.best() == 7.0
    assert drafts.drafted == [1, 2, 4]


def test_what_was_left_out_is_tried_where_the_next_fits() -> None:
    drafts = Drafts({1: lacks(180), 2: lacks(1), 4: 5.0, 8: 6.0})
    assert drafts.best(lasting=0.4) == 5.0
    assert drafts.drafted == [1, 4, 2, 8]
    drafts = Drafts({1: lacks(180), 2: 4.0, 4: 5.0})
    assert drafts.best(lasting=0.4) == 4.0
    assert drafts.drafted == [1, 4, 2, 4]


def test_a_number_that_cannot_be_had_leaves_those_before_it() -> None:
    drafts = Drafts({1: lacks(180), 2: 4.0, 4: MicroBatchError("not so many")})
    assert drafts.best(lasting=0.4) == 4.0
    assert drafts.drafted == [1, 4, 2, 4]


def test_the_part_that_is_held_in_any_number() -> None:
    theory, _ = divided(2)
    devices = cluster(2, 1)
    assert lasting_part(theory, devices) == 0.0, "nobody says how much memory there is"
    limited = replace(devices, devices=tuple(replace(d, memory=10**9) for d in devices.devices))
    parameters = sum(theory.graph.tensors[p.tensor].nbytes for p in theory.graph.parameters)
    assert 2 * parameters < 2 * 10**9 * lasting_part(theory, limited) <= 5 * parameters


def test_a_large_step_is_drafted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan is as good as where each number is planned to its end, and the same in each compilation."""
    model, example, devices = wide_on_small_devices()

    def compiled() -> hetspmd.Plan:
        return hetspmd.compile(model, example, Cluster.load(devices), loss=squares, micro_batches="auto")

    whole = compiled()
    monkeypatch.setattr(synthesis, "THRESHOLDS", replace(THRESHOLDS, many_instructions=1))
    drafted: list[int] = []
    draft = compilation.Compilation.draft

    def counted(self: compilation.Compilation) -> StepDraft:
        drafted.append(1 if self.batches is None else self.batches.count)
        return draft(self)

    monkeypatch.setattr(compilation.Compilation, "draft", counted)
    plan = compiled()
    assert plan.micro_batches > 1
    assert plan.micro_batches in drafted
    assert plan.cost.step_seconds <= whole.cost.step_seconds * (1 + 1e-9)
    assert compiled().to_json() == plan.to_json()
