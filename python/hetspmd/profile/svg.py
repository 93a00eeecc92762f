"""A few shapes of SVG: what the plots need, as text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

FONT = "font-family='Helvetica, Arial, sans-serif'"


class LogAxis:
    """Maps values of [low, high], both positive, to [start, stop] by their logarithms; whole decades."""

    def __init__(self, low: float, high: float, start: float, stop: float) -> None:
        self.low = math.floor(math.log10(low) + 1e-9)
        self.high = max(math.ceil(math.log10(high) - 1e-9), self.low + 1)
        self._start, self._stop = start, stop

    def at(self, value: float) -> float:
        """Where a positive value lies."""
        part = (math.log10(value) - self.low) / (self.high - self.low)
        return self._start + part * (self._stop - self._start)

    def ticks(self) -> list[float]:
        """The powers of ten."""
        return [10.0**e for e in range(self.low, self.high + 1)]


class Canvas:
    """Shapes in the order in which they are drawn. Coordinates are in pixels from the upper left."""

    def __init__(self, width: float, height: float) -> None:
        self._width, self._height = width, height
        self._shapes: list[str] = []

    def line(self, x1: float, y1: float, x2: float, y2: float, color: str, width: float = 1.0) -> None:
        """A straight line."""
        self._shapes.append(
            f"<line x1='{x1:.1f}' y1='{y1:.1f}' x2='{x2:.1f}' y2='{y2:.1f}' stroke='{color}' "
            f"stroke-width='{width:g}'/>"
        )

    def path(self, points: Sequence[tuple[float, float]], color: str, width: float = 1.5) -> None:
        """Straight lines through the points."""
        text = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self._shapes.append(
            f"<polyline points='{text}' fill='none' stroke='{color}' stroke-width='{width:g}'/>"
        )

    def dot(self, x: float, y: float, color: str, note: str) -> None:
        """A small disc; ``note`` shows where the pointer rests on it."""
        self._shapes.append(
            f"<circle cx='{x:.1f}' cy='{y:.1f}' r='3' fill='{color}'><title>{escape(note)}</title></circle>"
        )

    def box(self, x: float, y: float, width: float, height: float, fill: str) -> None:
        """A filled rectangle."""
        self._shapes.append(
            f"<rect x='{x:.1f}' y='{y:.1f}' width='{width:.1f}' height='{height:.1f}' fill='{fill}'/>"
        )

    def text(
        self,
        x: float,
        y: float,
        text: str,
        *,
        size: int = 11,
        anchor: str = "start",
        color: str = "#222",
        bold: bool = False,
    ) -> None:
        """A line of text with its baseline at y; ``anchor`` is start, middle or end."""
        weight = " font-weight='bold'" if bold else ""
        self._shapes.append(
            f"<text x='{x:.1f}' y='{y:.1f}' font-size='{size}' text-anchor='{anchor}' fill='{color}'{weight}>"
            f"{escape(text)}</text>"
        )

    def render(self) -> str:
        """The SVG document."""
        head = (
            f"<svg xmlns='http://www.w3.org/2000/svg' width='{self._width:.0f}' height='{self._height:.0f}' "
            f"viewBox='0 0 {self._width:.0f} {self._height:.0f}' {FONT}>"
        )
        back = f"<rect width='{self._width:.0f}' height='{self._height:.0f}' fill='#fff'/>"
        return "\n".join([head, back, *self._shapes, "</svg>", ""])
