"""A profile as a picture: one panel per collective and number of devices, seconds over bytes, both logarithmic.

Dots are measured medians with their intervals, lines the fitted curve for the same skew. All panels share their
axes, so that heights compare. Behind them stand those of whole steps of models, over rows. Below, the devices'
rates as bars.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import Final, NamedTuple

from hetspmd.cluster.collective_kinds import KINDS
from hetspmd.cluster.curves import Curve, Point, curve_for
from hetspmd.codec.quantities import quantity_text
from hetspmd.codec.tables import counted
from hetspmd.profile.measure import Profile
from hetspmd.profile.show import RateRow, rate_rows
from hetspmd.profile.show_steps import draw_steps, step_panels
from hetspmd.profile.svg import Canvas, LogAxis

COLORS: Final = {"even": "#0072b2", "skewed": "#d55e00", "half": "#009e73", "lone": "#cc79a7"}
"""Okabe and Ito's, which people with any colour vision tell apart."""
OTHER: Final = "#666"
"""Of what has no colour of its own."""
GRID: Final = "#e4e4e4"


@dataclass(frozen=True, kw_only=True)
class PlotLayout:
    """Where panels and bars lie, in pixels unless said otherwise: sizes at which their text can be read."""

    columns: int = 3
    """Panels side by side: as many as a page is wide."""

    panel_width: float = 300.0
    """Of a panel without the text of its axes."""

    panel_height: float = 220.0
    """Likewise."""

    left_margin: float = 62.0
    """Left of a panel, for the text of its vertical axis."""

    bottom_margin: float = 34.0
    """Below a panel, for the text of its horizontal axis."""

    gap: float = 26.0
    """Between a panel's text and the next panel, whose title stands there."""

    top_margin: float = 64.0
    """Above all panels, for the title and the legend."""

    bar_row: float = 18.0
    """Height of a bar with its text."""

    curve_steps: int = 40
    """Straight pieces of a curve, which looks smooth with so many."""


LAYOUT: Final = PlotLayout()


def profile_svg(profile: Profile) -> str:
    """The picture as an SVG document. The same profile gives the same text."""
    charts = _panels(profile)
    steps = step_panels(profile.cluster, profile.measured.steps)
    rows = -(-(len(charts) + len(steps)) // LAYOUT.columns)
    bars = rate_rows(profile)
    panels = rows * (LAYOUT.panel_height + LAYOUT.bottom_margin + LAYOUT.gap)
    width = LAYOUT.columns * (LAYOUT.panel_width + LAYOUT.left_margin) + 24
    canvas = Canvas(width, LAYOUT.top_margin + panels + (len(bars) * LAYOUT.bar_row + 40 if bars else 0))
    world = profile.cluster.world
    canvas.text(16, 26, f"Measured cluster of {counted(world, 'device')}", size=16, bold=True)
    points = [p for panel in charts for p in panel.points]
    if points:
        _legend(canvas, list(dict.fromkeys(p.skew for p in points)))
    for index, panel in enumerate(charts):
        x, y = _corner(index)
        across = LogAxis(
            min(p.nbytes for p in points), max(p.nbytes for p in points), x, x + LAYOUT.panel_width
        )
        up = LogAxis(min(p.low for p in points), max(p.high for p in points), y + LAYOUT.panel_height, y)
        _frame(canvas, panel, across, up, x, y)
        _curves(canvas, panel, across, up)
    for index, chart in enumerate(steps, len(charts)):
        draw_steps(canvas, chart, *_corner(index), LAYOUT.panel_width, LAYOUT.panel_height)
    _bars(canvas, bars, LAYOUT.top_margin + panels + 8, width)
    return canvas.render()


def _corner(index: int) -> tuple[float, float]:
    """The upper left corner of a panel, in pixels."""
    x = LAYOUT.left_margin + (index % LAYOUT.columns) * (LAYOUT.panel_width + LAYOUT.left_margin)
    row = LAYOUT.panel_height + LAYOUT.bottom_margin + LAYOUT.gap
    return x, LAYOUT.top_margin + 12 + (index // LAYOUT.columns) * row


class _Panel(NamedTuple):
    """A collective between so many devices: its curves, ascending in size, and the points of all of them."""

    curves: list[Curve]
    points: list[Point]

    @property
    def error(self) -> float:
        """The median relative error of the curves."""
        return median(abs(self.seconds(p.nbytes, p) / p.seconds - 1) for p in self.points)

    def seconds(self, nbytes: float, like: Point) -> float:
        """Seconds for another size with the shares of ``like``."""
        curve = curve_for(self.curves, nbytes)
        return curve.seconds(nbytes, like.shards, like.largest, like.exchange)


def _panels(profile: Profile) -> list[_Panel]:
    """All devices first; the order of collectives within."""
    panels: dict[tuple[int, str], _Panel] = {}
    for fit in sorted((f for f in profile.measured.fits if f.points), key=lambda f: -f.curve.devices):
        panel = panels.setdefault((fit.curve.devices, fit.curve.kind), _Panel([], []))
        panel.curves.append(fit.curve)
        panel.points.extend(fit.points)
    return list(panels.values())


def _legend(canvas: Canvas, skews: list[str]) -> None:
    x = 16.0
    for skew in skews:
        canvas.box(x, 38, 10, 10, COLORS.get(skew, OTHER))
        canvas.text(x + 14, 47, skew)
        x += 76
    canvas.text(x, 47, "dots: medians and their intervals; lines: fitted curves; bytes: of the whole tensor")


def _frame(canvas: Canvas, panel: _Panel, across: LogAxis, up: LogAxis, x: float, y: float) -> None:
    for value in up.ticks():
        canvas.line(x, up.at(value), x + LAYOUT.panel_width, up.at(value), GRID)
        canvas.text(x - 6, up.at(value) + 4, quantity_text(value, "seconds"), size=10, anchor="end")
    for value in across.ticks():
        canvas.line(across.at(value), y, across.at(value), y + LAYOUT.panel_height, GRID)
        canvas.text(
            across.at(value), y + LAYOUT.panel_height + 14, _decimal_bytes(value), size=10, anchor="middle"
        )
    title = f"{KINDS[panel.curves[0].kind].text}, {panel.curves[0].devices} devices"
    canvas.text(x, y - 6, title, bold=True)
    canvas.text(
        x + LAYOUT.panel_width, y - 6, f"median error {100 * panel.error:.1f} %", size=10, anchor="end"
    )


def _curves(canvas: Canvas, panel: _Panel, across: LogAxis, up: LogAxis) -> None:
    for skew in dict.fromkeys(p.skew for p in panel.points):
        color = COLORS.get(skew, OTHER)
        points = [p for p in panel.points if p.skew == skew]
        low, high = min(p.nbytes for p in points), max(p.nbytes for p in points)
        like = max(points, key=lambda p: p.nbytes)  # shares are least rounded in the largest
        line = []
        for step in range(LAYOUT.curve_steps + 1):
            nbytes = low * (high / low) ** (step / LAYOUT.curve_steps)
            seconds = min(max(panel.seconds(nbytes, like), 10.0**up.low), 10.0**up.high)
            line.append((across.at(nbytes), up.at(seconds)))
        canvas.path(line, color)
        for p in points:
            x = across.at(p.nbytes)
            canvas.line(x, up.at(p.low), x, up.at(p.high), color)
            size, seconds_text = quantity_text(p.nbytes, "bytes"), quantity_text(p.seconds, "seconds")
            canvas.dot(x, up.at(p.seconds), color, f"{skew}: {size}, {seconds_text} ({p.samples} samples)")


def _bars(canvas: Canvas, rows: list[RateRow], y: float, width: float) -> None:
    if not rows:
        return
    canvas.text(16, y + 14, "Devices", bold=True)
    most: dict[str, float] = {}
    for row in rows:
        most[_unit(row)] = max(most.get(_unit(row), 0.0), row.value)
    for index, row in enumerate(rows):
        line = y + 34 + index * LAYOUT.bar_row
        long = max((width - 560) * row.value / most[_unit(row)], 1.0)
        canvas.text(16, line, f"{row.device} ({row.ranks})")
        canvas.text(190, line, "launch" if row.what == "launch" else f"{row.what} {row.dtype}")
        canvas.box(340, line - 9, long, 11, "#56b4e9")
        canvas.text(346 + long, line, f"{row.text} {row.spread}", size=10)


def _unit(row: RateRow) -> str:
    """Rows whose bars compare."""
    return "product" if row.what in ("matmul", "convolution") else row.what


def _decimal_bytes(value: float) -> str:
    for scale, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if value >= scale:
            return f"{value / scale:g} {unit}"
    return f"{value:g} B"
