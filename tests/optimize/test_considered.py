"""What a plan keeps of the candidates that it was compared with: verdicts are true of the plan that is taken."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch

import hetspmd
from hetspmd.cluster.cluster import Cluster
from hetspmd.cluster.devices import Device, Network, virtual_device
from hetspmd.optimize.considered import instead, one_taken, ways_taken, with_other_way
from hetspmd.plan.reports import Considered
from hetspmd.report.candidates import candidates_document, candidates_text
from memory_cases import stack


def one(seconds: float, verdict: str, reason: str = "") -> Considered:
    made = reason or f"{verdict} {seconds}"
    return Considered(reason=made, active=(0, 1), seconds=seconds, simulated=True, verdict=verdict)


SLOW = (one(3.0, "taken"), one(3.0, "equal"), one(4.0, "slower"), one(5.0, "memory"))
FAST = (one(2.0, "taken"), one(2.0, "equal"), one(2.5, "slower"))


def verdicts(considered: tuple[Considered, ...]) -> dict[str, str]:
    return {c.reason.rpartition(": ")[2]: c.verdict for c in considered}


def test_what_is_as_fast_as_what_lost_is_not_as_fast_as_the_plan() -> None:
    best: Any = SimpleNamespace(seconds=2.0)
    found = verdicts(one_taken(((SLOW, False), (FAST, True)), best))
    assert (found["taken 3.0"], found["equal 3.0"], found["memory 5.0"]) == ("slower", "slower", "memory")
    assert (found["taken 2.0"], found["equal 2.0"]) == ("taken", "equal")
    best = SimpleNamespace(seconds=3.0)
    asked = verdicts(one_taken(((SLOW, True), (FAST, False)), best))
    assert (asked["taken 2.0"], asked["equal 2.0"], asked["equal 3.0"]) == ("asked", "asked", "equal")

    def plan(considered: tuple[Considered, ...], seconds: float) -> Any:
        return SimpleNamespace(considered=considered, cost=SimpleNamespace(step_seconds=seconds))

    ways = ways_taken({"a": plan(SLOW, 3.0), "b": plan(FAST, 2.25)}, "b")
    assert verdicts(ways) == {
        "taken 3.0": "slower", "equal 3.0": "slower", "slower 4.0": "slower", "memory 5.0": "memory",
        "taken 2.0": "taken", "equal 2.0": "equal", "slower 2.5": "slower",
    }  # fmt: skip
    assert ways[0].seconds == 2.25


def test_what_is_faster_than_the_one_that_was_asked_for_is_not_slower() -> None:
    found = verdicts(instead(FAST, one(2.5, "taken", "following"), "storage"))
    assert found == {
        "following": "taken", "taken 2.0": "storage", "equal 2.0": "storage", "slower 2.5": "storage",
    }  # fmt: skip


def test_the_first_way_is_kept_with_what_it_was_compared_with() -> None:
    first = (one(3.0, "taken", "first"), one(4.0, "slower"))
    second = (one(2.0, "taken", "second"), one(3.0, "slower", "first"), one(4.0, "slower"))
    found = with_other_way(first, second, {})
    assert [c.reason for c in found] == ["first", "second", "slower 4.0"]
    assert verdicts(found) == {"first": "taken", "second": "slower", "slower 4.0": "slower"}
    short = with_other_way(first, second, {1: 7})
    assert verdicts(short) == {"first": "taken", "second": "memory", "slower 4.0": "slower"}
    assert next(c for c in short if c.reason == "second").lacking == ((1, 7),)


def test_verdicts_across_machines() -> None:
    model, example = stack(dtype=torch.float64)
    each = Device("n", {"default": 1e10}, memory_bandwidth=1e11)
    machine = virtual_device(each, 2, Network(1e9, 1e-5))
    plan = hetspmd.compile(model, example, Cluster((machine, machine), Network(1e8, 1e-5)))
    assert plan.inside is not None
    ways = {c.reason.partition(": ")[0] for c in plan.considered}
    assert ways == {"virtual devices", "single accelerators"}
    best = plan.cost.step_seconds
    assert all(c.seconds <= best for c in plan.considered if c.verdict == "equal")
    assert all(c.seconds > best for c in plan.considered if c.reason.startswith("single"))
    assert "as fast" not in candidates_text(plan)


def test_numbers_say_whether_they_are_of_ranks_or_of_machines() -> None:
    model, example = stack(dtype=torch.float64)
    each = Device("n", {"default": 1e10}, memory_bandwidth=1e11)
    machine = virtual_device(each, 2, Network(1e9, 1e-5))
    for bandwidth, across in ((1e8, True), (1e10, False)):
        cluster = Cluster((machine, machine), Network(bandwidth, 1e-5))
        plan = hetspmd.compile(model, example, cluster)
        assert (plan.inside is not None) == across
        lines = candidates_text(plan).splitlines()
        machines = [line for line in lines if "virtual devices: " in line]
        ranks = [line for line in lines if "single accelerators: " in line]
        assert len(machines) + len(ranks) == len(plan.considered)
        assert all(("all machines" if across else "machines 0, 1") in line for line in machines[:-1])
        assert "machine 0 " in machines[-1]
        assert all(" all ranks " in line for line in ranks[:-1])
        assert " rank 0 " in ranks[-1]
        numbered = {d["reason"].partition(": ")[0]: d["numbered"] for d in candidates_document(plan)}
        assert numbered == {"virtual devices": "machine", "single accelerators": "rank"}
        assert ("on n (machines 0, 1)" in str(plan)) == across
        assert ("\n  machine  device" in str(plan)) == across
        short = replace(plan, considered=(one(1.0, "taken"), short_of_memory(plan.considered[0])))
        assert f"{'machine' if across else 'rank'} 1 lacks 4 KiB" in candidates_text(short)


def short_of_memory(candidate: Considered) -> Considered:
    return replace(candidate, verdict="memory", lacking=((0, 2048), (1, 4096)))


def test_machines_alone_and_single_devices_are_numbered_too() -> None:
    model, example = stack(dtype=torch.float64)
    each = Device("n", {"default": 1e10}, memory_bandwidth=1e11)
    machine = virtual_device(each, 2, Network(1e9, 1e-5))
    cluster = Cluster((machine, machine), Network(1e8, 1e-5))
    text = candidates_text(hetspmd.compile(model, example, cluster, machines="virtual"))
    assert "all machines" in text
    assert "machine 0 " in text
    assert "rank" not in text
    text = candidates_text(hetspmd.compile(model, example, Cluster((each, each), Network(1e8, 1e-5))))
    assert " all " in text
    assert "machine" not in text
