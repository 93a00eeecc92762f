"""Which parameters are stored in shards is settled one by one, in the simulation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from test_prefetch import compiled, error_of, on, sharded

import hetspmd.optimize.parameter_sharding as storage
import hetspmd.optimize.synthesize as synthesize
from hetspmd.cluster.cluster import Cluster
from hetspmd.optimize.candidate import Candidate
from hetspmd.optimize.thresholds import THRESHOLDS
from hetspmd.placement import shard
from hetspmd.program.checker import check
from workbench import traced


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Switches off what is tested here."""
    return lambda: monkeypatch.setattr(
        synthesize, "storage_variants", lambda _ctx, _costs, candidate: (candidate, [])
    )


@pytest.mark.parametrize(
    ("name", "devices", "gain"),
    [
        pytest.param("vit", on(1e7, 2, 1), 0.015, marks=pytest.mark.slow),
        ("gpt2", on(1e7, 2, 1), 0.015),
        pytest.param("bert", on(1e7, 2, 1), 0.005, marks=pytest.mark.slow),
        pytest.param("vit", on(1e7, 1, 1, 1), 0.0, marks=pytest.mark.slow),
    ],
)
def test_a_step_gets_shorter_and_stays_right(
    name: str, devices: Cluster, gain: float, without: Callable[[], None]
) -> None:
    plan = compiled(name, devices)
    check(plan.theory, plan.program)
    assert sharded(plan)
    assert error_of(traced(name), plan) < 1e-9
    assert compiled(name, devices).to_json() == plan.to_json()
    without()
    before = compiled(name, devices)
    assert plan.cost.step_seconds <= before.cost.step_seconds * (1 - gain)


def test_forms_that_are_asked_for_are_kept() -> None:
    devices = on(1e7, 2, 1)
    free = compiled("vit", devices)
    stored = {name: form for name, (form, _) in free.parameter_layout().items()}
    name = next(n for n, extents in free.parameter_layout().items() if extents[1])
    assert stored[name] != 0
    asked = compiled("vit", devices, constraints={name: "replicated"})
    assert asked.parameter_layout()[name][1] == ()
    assert sharded(asked), "others are in shards"


def test_nothing_is_tried_where_nothing_is_left_to_gain(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object) -> None:
        raise AssertionError

    monkeypatch.setattr(storage, "_Storage", never)
    compiled("vit", on(1e12, 2, 1))


@pytest.mark.parametrize("most", [3, 4, 100])
def test_neighbours_share_a_group(most: int) -> None:
    """Twelve parameters of 10 and 30 bytes by turns, and one of which nobody would notice."""
    nbytes = [*([10, 30] * 6), 0.1]
    graph = SimpleNamespace(
        tensors=[SimpleNamespace(nbytes=n) for n in nbytes], consumers={t: [t] for t in range(13)}
    )
    thresholds = replace(THRESHOLDS, parameter_groups=most)
    ctx: Any = SimpleNamespace(theory=SimpleNamespace(graph=graph), thresholds=thresholds)
    groups = storage.grouped(ctx, dict.fromkeys(range(13), shard(0)))
    assert sorted(t for group in groups for t in group) == list(range(12))
    assert all(group == list(range(group[0], group[-1] + 1)) for group in groups)
    sizes = [sum(nbytes[t] for t in group) for group in groups]
    assert sizes == sorted(sizes, reverse=True)
    assert len(groups) == min(most, 12)
    if most == 100:
        assert [group[0] for group in groups] == [1, 3, 5, 7, 9, 11, 0, 2, 4, 6, 8, 10]


def test_nothing_is_tried_twice_and_gathers_are_moved_without_a_search(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    storages: list[Any] = []
    searched: list[object] = []
    usual = storage._Storage

    class Watched(usual):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            storages.append(self)

        def _searched(self, forms: Any) -> Any:
            searched.append((id(self), frozenset(forms.items())))
            return super()._searched(forms)

    monkeypatch.setattr(storage, "_Storage", Watched)
    plan = compiled("vit", on(1e7, 2, 1))
    assert sharded(plan)
    assert len(searched) == len(set(searched)), "one search for each choice of storage"
    for one in storages:
        tried = [(c.program, c.evaluator.prefetch_distance) for c in one.tried]
        assert len(one.seen) >= len(tried) > len(one.results)
        assert len({distance for _, distance in one.seen}) > 2
        assert one.best.seconds == min(c.seconds for c in (one.first, *one.tried) if c.fits)


@pytest.mark.parametrize("most", [1, THRESHOLDS.changes_that_do_not_fit])
def test_what_does_not_fit_a_few_times_is_tried_no_further(
    most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of each way to store so many, and none is simulated."""
    storages: list[Any] = []

    class Watched(storage._Storage):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            self.ctx = replace(
                self.ctx, thresholds=replace(self.ctx.thresholds, changes_that_do_not_fit=most)
            )
            storages.append(self)

    def may_fit(candidate: Candidate) -> bool:
        return "else as the best before" not in candidate.reason

    monkeypatch.setattr(storage, "_Storage", Watched)
    monkeypatch.setattr(Candidate, "may_fit", property(may_fit))
    compiled("vit", on(1e7, 2, 1))
    assert storages
    for one in storages:
        stored = [c for c in one.tried if not c.reason.startswith("gathers")]
        ways = [c.reason.removesuffix(", else as the best before").split()[-1] for c in stored]
        assert 0 < ways.count("whole") + ways.count("shards") == len(stored)
        assert max(ways.count("whole"), ways.count("shards")) == most
        assert one.best is one.first
        assert not any(c.simulated for c in one.tried)
