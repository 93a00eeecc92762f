"""What a HAP module tells a recording (:class:`hetspmd.record.record.Recording`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from hetspmd.plan.plan import Plan
    from hetspmd.run.autograd import Runner


class Observer(Protocol):
    """What runs while it is on is recorded, on every rank; ``print(recorder)`` shows it afterwards."""

    @property
    def measured(self) -> Any:
        """What was recorded, a :class:`hetspmd.record.measured.MeasuredSteps`. Raises RuntimeError before the
        end."""

    def add(self, plan: Plan, runner: Runner) -> None:
        """Record a plan's local graphs too."""
