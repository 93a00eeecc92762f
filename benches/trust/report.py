"""The results in a page of the documentation, and the scatter plot beside it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from emulated.pages import MARKS, replace_results
from hetspmd.codec.files import write_atomically
from hetspmd.profile.svg import Canvas
from trust.results import Point
from trust.statistics import summary, table

__all__ = ["MARKS", "scatter", "write"]

COLORS = ("#4269d0", "#efb118", "#ff725c", "#6cc5b0", "#3ca951", "#ff8ab7", "#a463f2")


def write(page: Path, points: Sequence[Point]) -> None:
    """Replace what stands between the marks, and the plot ``page`` with the suffix ``.svg``.

    Raises ValueError for a page without the marks.
    """
    replace_results(page, f"{summary(points).strip()}\n\n{table(points)}\n")
    write_atomically(page.with_suffix(".svg"), scatter(points))


def scatter(points: Sequence[Point]) -> str:
    """Measured over predicted seconds, both logarithmic; a colour per model; lines at equal and at 10 % apart."""
    left, top, side = 60.0, 20.0, 420.0
    every = [s for p in points for s in (p.predicted, p.measured)]
    low, high = math.log2(min(every)) - 0.3, math.log2(max(every)) + 0.3

    def at(seconds: float) -> float:
        return side * (math.log2(seconds) - low) / (high - low)

    canvas = Canvas(left + side + 150, top + side + 50)
    for power in range(math.ceil(low), math.floor(high) + 1):
        x, y = left + at(2.0**power), top + side - at(2.0**power)
        canvas.line(left, y, left + side, y, "#e4e4e4")
        canvas.line(x, top, x, top + side, "#e4e4e4")
        canvas.text(left - 6, y + 4, f"{2.0**power:g}", size=10, anchor="end", color="#666")
        canvas.text(x, top + side + 15, f"{2.0**power:g}", size=10, anchor="middle", color="#666")
    for factor, color in ((1.0, "#444"), (1.1, "#bbb"), (1 / 1.1, "#bbb")):
        ends = [max(low, low - math.log2(factor)), min(high, high - math.log2(factor))]
        (x1, y1), (x2, y2) = ((left + at(2.0**e), top + side - at(factor * 2.0**e)) for e in ends)
        canvas.line(x1, y1, x2, y2, color)
    canvas.text(left + side / 2, top + side + 36, "predicted s / step", anchor="middle", color="#666")
    canvas.text(6, top + 4, "measured", color="#666", size=10)
    models = list(dict.fromkeys(p.model for p in points))
    colors = dict(zip(models, COLORS, strict=False))
    for p in points:
        note = (
            f"{p.model} on {p.cluster}, {p.plan}: {p.predicted:.3f} s predicted, {p.measured:.3f} s measured"
        )
        canvas.dot(left + at(p.predicted), top + side - at(p.measured), colors[p.model], note)
    for i, model in enumerate(models):
        canvas.dot(left + side + 20, top + 12 + 18 * i, colors[model], model)
        canvas.text(left + side + 30, top + 16 + 18 * i, model)
    return canvas.render()
