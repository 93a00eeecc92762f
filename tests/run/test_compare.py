"""Which of several plans is the fastest, where their steps vary."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from hetspmd.plan import Plan
from hetspmd.run.compare import CLOSE, LITTLE, TURNS, compare

NAMES = ("first", "second", "third")


def plans() -> dict[str, Plan]:
    """Plans that only their names tell apart."""
    return {name: object.__new__(Plan) for name in NAMES}


class Machine:
    """Measures ``steps`` of each plan; ``order`` is what it was asked, and whether without a best."""

    def __init__(self, true: tuple[float, ...], vary: Callable[[int], float], steps: int = 5) -> None:
        self.true, self.vary, self.steps = dict(zip(NAMES, true, strict=True)), vary, steps
        self.order: list[tuple[str, bool]] = []

    def compare(self) -> dict[str, float]:
        given = plans()
        names = {id(plan): name for name, plan in given.items()}

        def measure(plan: Plan, best: float | None) -> list[float]:
            name = names[id(plan)]
            self.order.append((name, best is None))
            return [self.true[name] * self.vary(len(self.order)) for _ in range(self.steps)]

        return compare(given, measure)


def fastest(found: dict[str, float]) -> str:
    return min(found, key=lambda name: found[name])


def test_plans_that_are_close_are_measured_in_alternating_order() -> None:
    """Where the machine slows down by 2 % a measurement, the last is not the slowest."""
    machine = Machine((1.0, 0.99, 3.0), lambda n: 1.02**n)
    found = machine.compare()
    assert fastest(found) == "second"
    names = [name for name, _ in machine.order]
    assert names[:7] == [*NAMES, "second", "first", "first", "second"]
    assert len(names) == 3 + 2 * (TURNS - 1), "a drift is no certainty"
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
    assert true[NAMES.index(fastest(machine.compare()))] <= (1 + LITTLE) * min(true)
    assert len(machine.order) == measured


def test_on_a_noisy_machine() -> None:
    """Steps that vary by 6 %, a tenth of them twice as long, and plans 5 % apart: right in nine of ten."""
    dice = random.Random(0)
    right = 0
    for _ in range(200):
        machine = Machine(
            (1.05, 1.0, 1.5), lambda n: dice.lognormvariate(0, 0.06) * (2.0 if dice.random() < 0.1 else 1.0)
        )
        right += fastest(machine.compare()) == "second"
        assert len(machine.order) <= 3 * TURNS
    assert right >= 180


def test_single_steps() -> None:
    """Of one step a turn nothing is known of how they vary until there are several."""
    machine = Machine((1.0, CLOSE - 0.01, CLOSE + 0.01), lambda n: 1.0, steps=1)
    assert machine.compare() == pytest.approx(machine.true)
    assert [name for name, _ in machine.order].count("third") == 1
    assert len(machine.order) == 1 + 2 * TURNS


def test_a_plan_of_its_own() -> None:
    """Nothing is compared with one plan."""
    seen: list[float | None] = []

    def measure(plan: Plan, best: float | None) -> list[float]:
        seen.append(best)
        return [2.0, 1.0, 3.0]

    assert compare({"only": object.__new__(Plan)}, measure) == {"only": 2.0}
    assert seen == [None]
