"""Whether a HAP module runs captured, and what does not, for its user."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn

from hetspmd.run.capturing import IDLE, PlanCaptures

if TYPE_CHECKING:
    from hetspmd.run.plan_cache import PlanCache


@dataclass(frozen=True)
class CudaGraphsReport:
    """What of a HAP module runs by CUDA graphs on this rank, for ``print``.

    Attributes:
        reason: Why nothing does; "" where something may.
        plans: Each plan's part, in the order in which the plans were made.
    """

    reason: str
    plans: tuple[PlanCaptures, ...]

    def __str__(self) -> str:
        if self.reason:
            return f"no CUDA graphs: {self.reason}"
        return "\n".join(f"plan {number}: {plan}" for number, plan in enumerate(self.plans))


class ReportsCaptures(nn.Module):
    """The part of :class:`hetspmd.run.module.HAP` that tells what is captured."""

    _plans: PlanCache

    def cuda_graphs_report(self) -> CudaGraphsReport:
        """What runs by CUDA graphs on this rank, plan by plan, and why what does not does not."""
        reason = self._plans.setting.capturing.reason
        if reason:
            return CudaGraphsReport(reason, ())
        found = []
        for _, runner in self._plans.runners():
            captures = runner.captures
            found.append(PlanCaptures(reason=IDLE) if captures is None else captures.report())
        return CudaGraphsReport("", tuple(found))
