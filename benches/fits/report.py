"""What the points say, as Markdown, and the page of the documentation."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import geometric_mean

from emulated.pages import replace_results
from fits import results
from fits.points import COMPILED, Peaks
from fits.results import Point
from hetspmd.codec.files import write_atomically
from hetspmd.plan.plan import Plan
from hetspmd.report.zero_text import zero_text
from versus.statistics import Check

LEAST_MEAN, MOST_OVER = 1.2, 1.03

HEAD = (
    "model", "cluster", "limits", "DDP", "DDP, leanest", "FSDP2, leanest", "the best of FSDP2", "s", "MB",
    "hetspmd", "s", "predicted", "MB", "predicted", "times faster",
)  # fmt: skip


def plan_words(plan: Plan, rows: int) -> str:
    """Rows and turns of each device, the blocks that are computed again, the levels of ZeRO."""
    own = [round(share * rows) for share in plan.shares]
    turns = dict(zip(plan.active, plan.own_turns or (plan.micro_batches,) * len(plan.active), strict=True))
    said = ", ".join(f"{n} in {turns[r]}" if r in turns else "idle" for r, n in enumerate(own))
    parts = [f"rows in turns: {said}"]
    again = len(plan.graph.recomputed)
    parts.append(f"{again} blocks computed again" if again else "nothing computed again")
    if plan.batches is not None:
        parts.append(zero_text(plan))
    return "; ".join(parts)


def table(points: Sequence[Point]) -> str:
    """A row per point: megabytes of each rank, medians in seconds."""
    rows = [f"| {' | '.join(HEAD)} |", "|" + "---|" * len(HEAD)]
    for p in points:
        best = p.arms[p.best]
        own = p.arms.get(COMPILED)
        hetspmd = (
            [p.failure, "", "", "", ""]
            if own is None
            else [own.words, f"{own.median:.3f}", f"{p.predicted:.3f}", _mb(own.peaks), _mb(p.expected)]
        )
        figures = [_mb(p.limits), _mb(p.plain), _mb(p.need), _mb(p.least)]
        cells = [
            p.model,
            p.cluster,
            *figures,
            p.best,
            f"{best.median:.3f}",
            _mb(best.peaks),
            *hetspmd,
            _said(p),
        ]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def _said(point: Point) -> str:
    """The ratio, or what is wrong."""
    if point.ratio is not None:
        return f"{point.ratio:.2f}"
    return "no plan fits" if point.failure else f"does not fit on rank {', '.join(map(str, point.over))}"


def checks(points: Sequence[Point]) -> list[Check]:
    """What must hold; a point at which hetspmd does not fit lets all fail."""
    ratios = [p.ratio for p in points]
    known = [ratio for ratio in ratios if ratio is not None]
    whole = len(known) == len(ratios)
    mean = geometric_mean(known) if known else None
    worst = max((1 / ratio for ratio in known), default=None)
    return [
        Check(
            f"at least {LEAST_MEAN:g} times faster than the best of FSDP2 in the geometric mean", mean,
            None if mean is None else whole and mean >= LEAST_MEAN,
        ),
        Check(
            f"hetspmd never takes more than {MOST_OVER:g} times the seconds of the best of FSDP2", worst,
            None if worst is None else whole and worst <= MOST_OVER,
        ),
        Check("hetspmd fits at every point", float(len(known)), whole),
    ]  # fmt: skip


def summary(points: Sequence[Point], of: int) -> str:
    """The figures and the checks, as Markdown; ``of``: how many points a whole run has."""
    fits = [p for p in points if p.ratio is not None]
    lines = [f"- {len(points)} of {of} points measured; hetspmd fits at {len(fits)} of them"]
    if fits:
        errors = [p.arms[COMPILED].median / p.predicted - 1 for p in fits]
        held = [
            peak / expected - 1
            for p in fits
            for peak, expected in zip(p.arms[COMPILED].peaks, p.expected, strict=True)
            if expected
        ]
        lines += [
            f"- measured over predicted seconds of hetspmd: from {min(errors):+.1%} to {max(errors):+.1%}",
            f"- counted over predicted bytes: from {min(held):+.1%} to {max(held):+.1%}",
        ]
    return "\n".join((*lines, *(f"- {check}" for check in checks(points))))


def tried(points: Sequence[Point]) -> str:
    """Every setting of FSDP2 that fits, with the seconds of its first timed step."""
    rows = ["| model | cluster | setting | s |", "|---|---|---|--:|"]
    for p in points:
        rows += [
            f"| {p.model} | {p.cluster} | {name} | {seconds:.3f} |"
            for name, seconds in sorted(p.tried.items(), key=lambda pair: pair[1])
        ]
    return "\n".join(rows)


def write(page: Path, points: Sequence[Point], of: int) -> None:
    """Replace what stands between the page's marks, and the points with the suffix ``.jsonl``.

    Raises ValueError for a page without the marks.
    """
    replace_results(
        page,
        f"{summary(points, of)}\n\n{table(points)}\n\nEvery setting of FSDP2 that fits, a timed step of each:\n\n"
        f"{tried(points)}\n",
    )
    write_atomically(page.with_suffix(".jsonl"), results.text(points))


def _mb(peaks: Peaks) -> str:
    return ", ".join(f"{peak / 1e6:.0f}" for peak in peaks)
