"""Why a tensor has its form: what :meth:`hetspmd.plan.plan.Plan.explain` returns."""

from __future__ import annotations

from dataclasses import dataclass

from hetspmd.codec.quantities import seconds_text
from hetspmd.codec.tables import table
from hetspmd.placement import Placement
from hetspmd.search.constraints import spelling

EQUAL = 1e-9
"""Relative difference below which two costs are the same."""


@dataclass(frozen=True)
class Alternative:
    """A placement, and the best program that has it. All seconds are None where there is no such program.

    Attributes:
        form: The placement.
        seconds: The additive cost of the program, as in ``plan.search``.
        lower_bound: What no program with the placement can beat, as in ``plan.search``.
        step_seconds: The simulated step of the program, as in ``plan.cost``.
        reason: Why no program has the placement, or that a limit struck before one was found.
    """

    form: Placement
    seconds: float | None
    lower_bound: float | None
    step_seconds: float | None = None
    reason: str = ""


@dataclass(frozen=True)
class Explanation:
    """The alternatives for one tensor and the placement that the plan chose; ``print`` shows them as a table.

    Attributes:
        name: The name that was asked for.
        chosen: The plan's choice; None for an input that the program reads in several placements.
        alternatives: Cheapest first; of equal ones the chosen one.
        tensor: The reference tensor.
        asked: The glob of the constraint on the tensor, if there is one.
        notes: Sentences on what the numbers cover.
    """

    name: str
    chosen: Placement | None
    alternatives: tuple[Alternative, ...]
    tensor: str = ""
    asked: str | None = None
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        priced = [a for a in self.alternatives if a.seconds is not None]
        best = priced[0].seconds or 0.0 if priced else 0.0
        rows = []
        for a in self.alternatives:
            mark = "*" if a.form == self.chosen else ""
            if a.seconds is None or a.lower_bound is None or a.step_seconds is None:
                rows.append([mark, spelling(a.form), "-", "-", "-", a.reason])
                continue
            more = a.seconds - best
            rows.append(
                [
                    mark,
                    spelling(a.form),
                    seconds_text(a.seconds),
                    seconds_text(a.lower_bound),
                    seconds_text(a.step_seconds),
                    f"{seconds_text(more)} more" if more > EQUAL * best else "the least",
                ]
            )
        chosen = "read in several forms" if self.chosen is None else spelling(self.chosen)
        title = f"{self.name} ({self.tensor})" if self.tensor else self.name
        asked = f", as the constraint {self.asked!r} asks" if self.asked is not None else ""
        lines = [
            f"{title}: {chosen}{asked}",
            table(["", "the best program with", "cost", "lower bound", "step", ""], rows, right=(2, 3, 4)),
        ]
        lines.append(
            "  *: the plan's form; cost: all computations and collectives, added up, at the plan's shares"
        )
        return "\n".join([*lines, *(f"  {note}" for note in self.notes)])

    def document(self) -> dict[str, object]:
        """For JSON: forms as users write them, seconds as numbers (null where there is no program)."""
        return {
            "name": self.name,
            "chosen": None if self.chosen is None else spelling(self.chosen),
            "constraint": self.asked,
            "alternatives": [
                {
                    "form": spelling(a.form),
                    "cost": a.seconds,
                    "lower_bound": a.lower_bound,
                    "step_seconds": a.step_seconds,
                }
                for a in self.alternatives
            ],
        }
