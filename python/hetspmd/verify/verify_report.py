"""What a verification found."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hetspmd.errors import CheckError


@dataclass(frozen=True)
class VerifyReport:
    """The largest relative errors, and whether they prove that the plan computes the model.

    Attributes:
        ok: Whether all errors are within ``tolerance`` and equal numbers prove anything.
        loss_error: Relative error of the loss.
        gradient_error: Largest relative error of a gradient.
        parameter_error: Largest relative error of a parameter after the steps.
        tolerance: The greatest relative error that counts as equal.
        random: The model draws random numbers, so that the training step was compared with its reference
            graph.
        worst: Name of each error to the tensor that has it.
        rounding: By how much the single device's own parameters change where it starts one rounding away.
            Measured only where ``parameter_error`` is above the tolerance.
        unproved: Why equal numbers would prove nothing; ``""`` if they do prove it.
        notes: What was compared, where that is not all.
        located: The first tensor and instruction that differ; ``""`` if ``locate`` was not asked for.
    """

    ok: bool
    loss_error: float
    gradient_error: float
    parameter_error: float
    tolerance: float
    random: bool
    worst: Mapping[str, str]
    rounding: float | None = None
    unproved: str = ""
    notes: tuple[str, ...] = ()
    located: str = ""

    @property
    def text(self) -> str:
        """The verdict and the errors as text, for people."""
        lines = [
            f"{name:<10} {error:.2e}  {self.worst.get(name, '')}".rstrip()
            for name, error in (
                ("loss", self.loss_error),
                ("gradients", self.gradient_error),
                ("parameters", self.parameter_error),
            )
        ]
        against = "its reference graph (random draws)" if self.random else "the single device"
        if self.rounding is not None:
            lines.append(
                f"rounding   {self.rounding:.2e}  changes the single device's own parameters by this much"
            )
        lines += [f"note       {note}" for note in self.notes]
        lines += [f"located    {line}" for line in self.located.splitlines()]
        verdict = "equal" if self.ok else "NOT EQUAL"
        head = f"{verdict} to {against} within {self.tolerance:g}"
        if self.unproved and not self._differs:
            head = f"NO PROOF that it is equal to {against}: {self.unproved}"
        return "\n".join([head, *lines])

    @property
    def _differs(self) -> bool:
        return not max(self.loss_error, self.gradient_error) <= self.tolerance

    def require(self) -> None:
        """Do nothing if ``ok``.

        Raises:
            CheckError: The report is not ok.
        """
        if not self.ok:
            raise CheckError(self.text)
