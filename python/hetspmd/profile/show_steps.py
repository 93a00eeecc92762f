"""The curves of a model's steps for people: tables for the terminal, and panels for the plot."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from hetspmd.cluster.cluster import Cluster
from hetspmd.cluster.step_curves import ModelSteps, StepCurve
from hetspmd.codec.quantities import quantity_text
from hetspmd.codec.tables import table
from hetspmd.profile.svg import Canvas, LogAxis

COLORS: Final = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
"""Okabe and Ito's, of kinds of devices, over and over."""
GRID: Final = "#e4e4e4"


def steps_text(cluster: Cluster, model: ModelSteps) -> str:
    """A table for each kind of device: what a step of so many rows takes and holds."""
    parts = []
    for curve in model.curves:
        rows = [
            [
                str(p.rows),
                quantity_text(p.seconds, "seconds"),
                f"± {50 * (p.high - p.low) / p.seconds:.1f} %",
                f"{p.rows / p.seconds:.4g}",
                quantity_text(p.peak, "bytes"),
                quantity_text(p.counted, "bytes"),
                f"{100 * (p.counted / p.peak - 1):+.1f} %",
            ]
            for p in curve.points
        ]
        header = ["rows", "a step", "interval", "rows/s", "peak", "predicted", "error"]
        title = f"Steps of {model.name} on {_device(cluster, curve)}: {_limit(curve)}"
        parts.append(f"{title}\n" + table(header, rows, right=tuple(range(7))) if rows else title)
    parts.append(
        f"  a step: forward, backward and {model.optimizer}'s step of the single device; predicted: the peak as it "
        "is counted (plans are made with the measured one)"
    )
    return "\n".join(parts)


def _device(cluster: Cluster, curve: StepCurve) -> str:
    word = "rank" if len(curve.ranks) == 1 else "ranks"
    return f"{cluster.devices[curve.ranks[0]].name} ({word} {', '.join(map(str, curve.ranks))})"


def _limit(curve: StepCurve) -> str:
    memory = quantity_text(curve.memory, "bytes")
    if curve.over is None:
        return f"{curve.limit} rows and more fit {memory}"
    if not curve.points:
        return f"not even {curve.over[0]} of the rows {'fit' if curve.over[0] > 1 else 'fits'} {memory}"
    sure = "" if curve.over[0] == curve.limit + 1 else f", {curve.over[0]} do not"
    return f"at most {curve.limit} rows fit {memory}{sure}"


class _Series(NamedTuple):
    """The points of a kind of device in a panel: rows, value, and what the pointer shows; ``line``: joined,
    dashes of what was predicted have none."""

    color: str
    points: tuple[tuple[float, float, str], ...]
    line: tuple[tuple[float, float], ...]


class StepPanel(NamedTuple):
    """Values over rows, both logarithmic, of the kinds of devices."""

    title: str
    unit: str
    series: tuple[_Series, ...]


def step_panels(cluster: Cluster, steps: Sequence[ModelSteps]) -> list[StepPanel]:
    """For each model its rows per second, and its measured peak (dots) beside the counted one (lines)."""
    panels = []
    for model in steps:
        curves = [(COLORS[n % len(COLORS)], c) for n, c in enumerate(model.curves) if c.points]
        if not curves:
            continue
        speeds = tuple(
            _Series(
                color,
                tuple(
                    (p.rows, p.rows / p.seconds, f"{_device(cluster, c)}: {p.rows} rows") for p in c.points
                ),
                tuple((p.rows, p.rows / p.seconds) for p in c.points),
            )
            for color, c in curves
        )
        peaks = tuple(
            _Series(
                color,
                tuple(
                    (
                        p.rows,
                        p.peak,
                        f"{_device(cluster, c)}: {p.rows} rows, {quantity_text(p.peak, 'bytes')}",
                    )
                    for p in c.points
                ),
                tuple((p.rows, p.counted) for p in c.points),
            )
            for color, c in curves
        )
        panels.append(StepPanel(f"{model.name}: rows per second", "", speeds))
        panels.append(StepPanel(f"{model.name}: peak (dots), predicted (lines)", "bytes", peaks))
    return panels


def draw_steps(canvas: Canvas, panel: StepPanel, x: float, y: float, width: float, height: float) -> None:
    """A panel with its frame, whose upper left corner is at (x, y), in pixels."""
    every = [(r, v) for s in panel.series for r, v in (*s.line, *((r, v) for r, v, _ in s.points))]
    across = LogAxis(min(r for r, _ in every), max(r for r, _ in every), x, x + width)
    up = LogAxis(min(v for _, v in every), max(v for _, v in every), y + height, y)
    for value in up.ticks():
        canvas.line(x, up.at(value), x + width, up.at(value), GRID)
        text = quantity_text(value, "bytes") if panel.unit == "bytes" else f"{value:g}"
        canvas.text(x - 6, up.at(value) + 4, text, size=10, anchor="end")
    for value in across.ticks():
        canvas.line(across.at(value), y, across.at(value), y + height, GRID)
        canvas.text(across.at(value), y + height + 14, f"{value:g} rows", size=10, anchor="middle")
    canvas.text(x, y - 6, panel.title, bold=True)
    for color, points, line in panel.series:
        canvas.path([(across.at(r), up.at(v)) for r, v in line], color)
        for rows, value, note in points:
            canvas.dot(across.at(rows), up.at(value), color, note)
