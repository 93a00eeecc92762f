"""What measured steps of the model say in a plan, for people and for the JSON document."""

from __future__ import annotations

from typing import Any

from hetspmd.cluster.step_curves import StepCurve
from hetspmd.codec.quantities import quantity_text
from hetspmd.codec.tables import table
from hetspmd.plan.plan import Plan


def measured_text(plan: Plan) -> str:
    """By what the seconds of each active device are multiplied, and what its memory holds; that none of the
    measured models is this one, where it is so."""
    measured = plan.costs.measured
    if measured is None:
        names = ", ".join(model.name for model in plan.cluster.steps)
        return (
            f"Measured steps of {names} are not of this model (or of it in other dtypes, extents or kernels), and "
            "are not used; hetspmd profile --model measures it"
        )
    curves = measured.steps.by_rank(len(plan.active))
    rows = [
        [str(rank), plan.cluster.devices[rank].name, *_row(curve, turn, pace, room)]
        for rank, curve, turn, pace, room in zip(
            plan.active, curves, measured.turn, measured.pace, measured.capacity, strict=True
        )
    ]
    header = ["rank", "device", "alone", "measured at", "seconds", "room"]
    return (
        f"Measured steps ({measured.steps.name})\n"
        + table(header, rows, right=(2, 3, 4, 5))
        + "\n  alone: rows that fit the device by itself; seconds: those of its ops are multiplied by this, as "
        "measured at so many rows; room: bytes, as they are counted"
    )


def _row(curve: StepCurve | None, turn: float, pace: float, room: float) -> list[str]:
    if curve is None:
        return ["not measured", "-", "-", quantity_text(room, "bytes")]
    more = "" if curve.over is not None else " and more"
    return [f"{curve.limit}{more}", f"{turn:.4g} rows", f"x {pace:.3g}", quantity_text(room, "bytes")]


def measured_document(plan: Plan) -> dict[str, Any]:
    """``measured_steps``, where the cluster has any: null where they are of other models, else ``name``, and for
    each active device ``limit`` (rows; null where it was not measured or not reached), ``rows`` and ``pace``."""
    if not plan.cluster.steps:
        return {}
    measured = plan.costs.measured
    if measured is None:
        return {"measured_steps": None}
    curves = measured.steps.by_rank(len(plan.active))
    limits = [None if c is None or c.over is None else c.limit for c in curves]
    return {
        "measured_steps": {
            "name": measured.steps.name,
            "limit": limits,
            "rows": list(measured.turn),
            "pace": list(measured.pace),
        }
    }
