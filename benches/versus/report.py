"""The results in a page of the documentation, and the chart beside it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from emulated.pages import replace_results
from hetspmd.codec.files import write_atomically
from hetspmd.profile.svg import Canvas
from versus import results
from versus.points import ARMS
from versus.results import Point
from versus.statistics import spread, table

COLORS = ("#9498a0", "#ff8ab7", "#ff725c", "#efb118", "#97bbf5", "#6cc5b0", "#4269d0")
"""Of the arms, in their order."""

ROW = 12
HEIGHT = 300.0
"""Pixels of a row of points."""


def write(page: Path, points: Sequence[Point], summary: str) -> None:
    """Replace what stands between the page's marks by a summary and the points, the chart ``page`` with the suffix
    ``.svg``, and the points with the suffix ``.jsonl``.

    Raises ValueError for a page without the marks.
    """
    text = f"""{summary}

![Seconds a step of every arm at every point]({page.stem}.svg)

A line in a bar is from the least to the most.

Medians, in seconds a step; the best incumbent's bold. "least to most" and "predicted" are hetspmd's. "Free links"
is what the devices would take together if they shared the fastest one's step in the ratio of their speeds and links
cost nothing.

{table(points)}

The least to the most of the timed steps:

{spread(points)}
"""
    replace_results(page, text)
    write_atomically(page.with_suffix(".svg"), bars(points))
    write_atomically(page.with_suffix(".jsonl"), results.text(points))


def bars(points: Sequence[Point]) -> str:
    """A group of bars per point, one per arm: median seconds, logarithmic; a thin line from least to most.
    :data:`ROW` points stand side by side, on one scale with those below."""
    left, bar, gap, legend = 60.0, 9.0, 26.0, 140.0
    group = bar * len(ARMS)
    rows = [points[start : start + ROW] for start in range(0, len(points), ROW)]
    width = max(left + len(rows[0]) * (group + gap), left + legend * len(ARMS))
    canvas = Canvas(width + 20, 30 + HEIGHT * len(rows))
    for i, (arm, color) in enumerate(zip(ARMS, COLORS, strict=True)):
        canvas.box(left + legend * i, 8, 10, 10, color)
        canvas.text(left + legend * i + 14, 17, arm, size=10)
    every = [s for p in points for a in ARMS for s in p.arms[a].seconds]
    low, high = math.floor(math.log2(min(every))) - 0.5, math.log2(max(every)) + 0.2
    for i, row in enumerate(rows):
        top = 50 + HEIGHT * i
        bottom = top + HEIGHT - 80
        axis = Axis(low, high, bottom, top)
        for power in range(math.ceil(low), math.floor(high) + 1):
            y = axis.at(2.0**power)
            canvas.line(left, y, left + len(row) * (group + gap), y, "#e4e4e4")
            canvas.text(left - 6, y + 4, f"{2.0**power:.4g}", size=10, anchor="end", color="#666")
        canvas.text(6, top - 8, "s / step", size=10, color="#666")
        for j, p in enumerate(row):
            start = left + gap / 2 + j * (group + gap)
            for k, (arm, color) in enumerate(zip(ARMS, COLORS, strict=True)):
                x, y, of = start + k * bar, axis.at(p.seconds(arm)), p.arms[arm].seconds
                canvas.box(x, y, bar - 1, bottom - y, color)
                canvas.line(x + bar / 2 - 0.5, axis.at(max(of)), x + bar / 2 - 0.5, axis.at(min(of)), "#222")
            for line, text in enumerate((p.model, p.cluster, p.bits)):
                canvas.text(start + group / 2, bottom + 15 + 15 * line, text, size=10, anchor="middle")
    return canvas.render()


@dataclass(frozen=True)
class Axis:
    """Maps seconds to pixels from ``bottom`` to ``top`` by their logarithms to base 2, from ``low`` to ``high``."""

    low: float
    high: float
    bottom: float
    top: float

    def at(self, seconds: float) -> float:
        """Where they lie."""
        return self.bottom - (self.bottom - self.top) * (math.log2(seconds) - self.low) / (
            self.high - self.low
        )
