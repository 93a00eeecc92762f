"""Which of several plans is the fastest, where their steps vary."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from hetspmd.plan.plan import Plan
from hetspmd.tune.compare import compare
from hetspmd.tune.tune_thresholds import THRESHOLDS

NAMES = ("first", "second", "third")


def plans(devices: tuple[int, ...] = (4, 4, 4)) -> dict[str, Plan]:
    """Plans of which nothing is known but their names and on how many devices they run."""
    return {name: plan(n) for name, n in zip(NAMES, devices, strict=True)}


def plan(devices: int) -> Plan:
    made = object.__new__(Plan)
    object.__setattr__(made, "step_plan", SimpleNamespace(active=tuple(range(devices))))
    return made


class Machine:
    """Measures ``steps`` of each plan; ``order`` is what it was asked, and whether without a best."""

    def __init__(
        self, true: tuple[float, ...], vary: Callable[[int], float], steps: int = 5,
        devices: tuple[int, ...] = (4, 4, 4),
    ) -> None:  # fmt: skip
        self.true, self.vary, self.steps = dict(zip(NAMES, true, strict=True)), vary, steps
        self.devices = devices
        self.order: list[tuple[str, bool]] = []

    def compare(self) -> tuple[str, dict[str, float]]:
        given = plans(self.devices)
        names = {id(plan): name for name, plan in given.items()}

        def measure(plan: Plan, best: float | None) -> list[float]:
            name = names[id(plan)]
            self.order.append((name, best is None))
            return [self.true[name] * self.vary(len(self.order)) for _ in range(self.steps)]

        return compare(given, measure)


def test_plans_that_are_close_are_measured_in_alternating_order() -> None:
    """Where the machine slows down by 2 % a measurement, the last is not the slowest."""
    machine = Machine((1.0, 0.99, 3.0), lambda n: 1.02**n)
    assert machine.compare()[0] == "second"
    names = [name for name, _ in machine.order]
    assert names[:7] == [*NAMES, "second", "first", "first", "second"]
    assert len(names) == 3 + 2 * (THRESHOLDS.turns - 1), "a drift is no certainty"
    assert [name for name, free in machine.order if free] == ["first", *names[3:]]


@pytest.mark.parametrize(
    ("true", "measured"),
    [((1.0, 1.2, 1.3), 3), ((1.0, 1.05, 1.3), 5), ((1.0, 1.001, 1.002), 6), ((1.2, 1.0, 1.01), 5)],
    ids=["one ahead", "one near", "equal", "two near"],
)
def test_on_a_quiet_machine(true: tuple[float, ...], measured: int) -> None:
    """One turn where one plan is ahead, two to believe it, and no more where it does not matter."""
    dice = random.Random(0)
    machine = Machine(true, lambda n: dice.gauss(1.0, 0.002))
    assert true[NAMES.index(machine.compare()[0])] <= (1 + THRESHOLDS.equal_part) * min(true)
    assert len(machine.order) == measured


def test_on_a_noisy_machine() -> None:
    """Steps that vary by 6 %, a tenth of them twice as long, and plans 5 % apart: right in nine of ten."""
    dice = random.Random(0)
    right = 0
    for _ in range(200):
        machine = Machine(
            (1.05, 1.0, 1.5), lambda n: dice.lognormvariate(0, 0.06) * (2.0 if dice.random() < 0.1 else 1.0)
        )
        right += machine.compare()[0] == "second"
        assert len(machine.order) <= 3 * THRESHOLDS.turns
    assert right >= 180


@pytest.mark.parametrize(
    ("true", "chosen"), [((1.0, 1.001, 1.001), "third"), ((1.0, 0.95, 1.0), "second"), ((1.0, 1.2, 1.04), "first")],
    ids=["equal", "one ahead", "others near"],
)  # fmt: skip
def test_of_equals_the_one_of_the_fewest_devices(true: tuple[float, ...], chosen: str) -> None:
    dice = random.Random(0)
    machine = Machine(true, lambda n: dice.gauss(1.0, 0.002), devices=(4, 2, 1))
    assert machine.compare()[0] == chosen


@pytest.mark.parametrize(("true", "wanted"), [(1.1, "first"), (1.0, "third")], ids=["ahead", "equal"])
def test_a_lone_device_where_steps_vary_too_much_to_tell(true: float, wanted: str) -> None:
    """Steps that vary by 6 %: all devices are taken where they are a tenth ahead, one where they are not ahead."""
    dice = random.Random(0)
    found = [
        Machine((1.0, 2.0, true), lambda n: dice.lognormvariate(0, 0.06), devices=(4, 4, 1)).compare()[0]
        for _ in range(100)
    ]
    assert found.count(wanted) >= 90


def test_single_steps() -> None:
    """Of one step a turn nothing is known of how they vary until there are several."""
    machine = Machine(
        (1.0, THRESHOLDS.rival_part - 0.01, THRESHOLDS.rival_part + 0.01), lambda n: 1.0, steps=1
    )
    chosen, found = machine.compare()
    assert (chosen, found) == ("first", pytest.approx(machine.true))
    assert [name for name, _ in machine.order].count("third") == 1
    assert len(machine.order) == 1 + 2 * THRESHOLDS.turns


def test_a_plan_of_its_own() -> None:
    """Nothing is compared with one plan."""
    seen: list[float | None] = []

    def measure(plan: Plan, best: float | None) -> list[float]:
        seen.append(best)
        return [2.0, 1.0, 3.0]

    assert compare({"only": plan(2)}, measure) == ("only", {"only": 2.0})
    assert seen == [None]


def test_a_plan_that_was_behind_by_chance_comes_back() -> None:
    """The first two seemed fast once: what is chosen is never slower, as measured, than one that was left out."""
    machine = Machine((1.25, 1.3, 1.12), lambda n: 0.8 if n <= 2 else 1.0)
    chosen, seconds = machine.compare()
    assert chosen == "third"
    assert seconds[chosen] == min(seconds.values())
    assert [name for name, _ in machine.order].count("third") > 1
