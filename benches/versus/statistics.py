"""What the points say: ratios of medians, and whether the ratios that must hold do.

over the best incumbent     per point, the least of the incumbents' seconds over hetspmd's
over proportional DDP       per point, its seconds over hetspmd's
forced over proportional    per point, the forced data parallel plan's seconds over DDP's on the same rows
over both                   per point, the least of the incumbents' and of the forced plan's seconds over hetspmd's:
                            what is left where an incumbent overlaps its communication as well as hetspmd does
over free links             per point, hetspmd's seconds over those that its devices would take together if links
                            cost nothing: what a better program could gain, at most
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import geometric_mean, median
from textwrap import wrap
from typing import Protocol

from versus.models import SIZES, size_over
from versus.points import (
    ALONE,
    ARMS,
    BALANCED,
    CLUSTERS,
    COMPILED,
    DDP,
    DDP_EVEN,
    FASTEST_LINK,
    FORCED,
    INCUMBENTS,
)
from versus.results import Point

MOST_OVER_INCUMBENT = 1.03
LEAST_OVER_DDP = 1.6
LEAST_VGG = 5.0
LEAST_BALANCED = 1.25
FORCED_WITHIN = 0.05

HEAD = (
    "model", "cluster", "link", "comm / comp", *ARMS, "least to most", "predicted", "free links",
    "best / hetspmd", "DDP / hetspmd", "forced / DDP",
)  # fmt: skip


@dataclass(frozen=True)
class Check:
    """A ratio that must hold: what, the value found, and whether it holds; None where no point speaks of it.
    ``digits`` of the value are shown behind the point."""

    what: str
    value: float | None
    holds: bool | None
    digits: int = 2

    def __str__(self) -> str:
        said = {True: "pass", False: "fail", None: "not measured"}[self.holds]
        return f"{self.what}: {said}" + ("" if self.value is None else f" ({self.value:.{self.digits}f})")


class Compared(Protocol):
    """A point at which arms were measured."""

    @property
    def computing(self) -> float:
        """Seconds of a proportional step without communication."""

    @property
    def communicating(self) -> float:
        """Seconds of the all-reduces of its gradients."""

    def seconds(self, arm: str) -> float:
        """The median of an arm."""


def best_incumbent(point: Compared) -> str:
    """The arm with the least median, the first among equals."""
    return min(INCUMBENTS, key=point.seconds)


def over_best(point: Compared) -> float:
    """How many times faster than the best incumbent hetspmd is."""
    return point.seconds(best_incumbent(point)) / point.seconds(COMPILED)


def over_both(point: Point) -> float:
    """How many times faster than the best incumbent and the forced data parallel plan hetspmd is."""
    return min(point.seconds(best_incumbent(point)), point.seconds(FORCED)) / point.seconds(COMPILED)


def over_ddp(point: Compared) -> float:
    """How many times faster than proportional DDP hetspmd is."""
    return point.seconds(DDP) / point.seconds(COMPILED)


def free_links(point: Point) -> float:
    """Seconds that all devices would take together if they shared the fastest one's step in the ratio of their
    speeds, and nothing were communicated or done twice. No program is faster."""
    spec = CLUSTERS[point.cluster]
    return point.seconds(ALONE) * spec.ranks[spec.fastest].share / spec.cores


def forced_ratio(point: Point) -> float:
    """Seconds of the forced data parallel plan over those of proportional DDP."""
    return point.seconds(FORCED) / point.seconds(DDP)


def is_balanced(point: Compared) -> bool:
    """Whether proportional DDP communicates about as long as it computes: at most twice as long, either way. Where
    the rate that this needs cannot be emulated, the point over the nearest one counts as no balanced one."""
    return 0.5 <= point.communicating / point.computing <= 2.0


def never_slower(points: Sequence[Compared]) -> Check:
    """That hetspmd is nowhere slower than the best incumbent, but for what steps differ by."""
    worst = max((1 / over_best(p) for p in points), default=None)
    return Check(
        f"hetspmd never takes more than {MOST_OVER_INCUMBENT:g} times the best incumbent's seconds", worst,
        None if worst is None else worst <= MOST_OVER_INCUMBENT,
    )  # fmt: skip


def checks(points: Sequence[Point]) -> list[Check]:
    """The five ratios. Those of all points hold only for points that were measured; VGG19's is the least of the
    clusters'."""
    vgg = [over_ddp(p) for p in points if p.model == "VGG19" and p.link == FASTEST_LINK]
    mean = geometric_mean([over_ddp(p) for p in points]) if points else None
    forced = max((forced_ratio(p) - 1 for p in points), default=None)
    balanced = [over_best(p) for p in points if p.link == BALANCED and is_balanced(p)]
    gain = geometric_mean(balanced) if balanced else None
    least = min(vgg, default=None)
    return [
        never_slower(points),
        Check(
            f"at least {LEAST_OVER_DDP:g} times faster than proportional DDP in the geometric mean", mean,
            None if mean is None else mean >= LEAST_OVER_DDP,
        ),
        Check(
            f"at least {LEAST_VGG:g} times on VGG19 at 1 Gbit/s, on every cluster", least,
            None if least is None else least >= LEAST_VGG,
        ),
        Check(
            f"at least {LEAST_BALANCED:g} times faster than the best incumbent in the geometric mean of the "
            "balanced links", gain,
            None if gain is None else gain >= LEAST_BALANCED,
        ),
        Check(
            f"forced data parallel takes at most {FORCED_WITHIN:.0%} longer than proportional DDP at every point",
            forced,
            None if forced is None else forced <= FORCED_WITHIN,
        ),
    ]  # fmt: skip


def table(points: Sequence[Point]) -> str:
    """A row per point, as Markdown: medians in seconds, the best incumbent's bold."""
    rows = [f"| {' | '.join(HEAD)} |", "|---|---|---|" + "--:|" * (len(HEAD) - 3)]
    for p in points:
        best = best_incumbent(p)
        seconds = [f"**{p.seconds(a):.3f}**" if a == best else f"{p.seconds(a):.3f}" for a in ARMS]
        compiled = p.arms[COMPILED]
        predicted = "" if compiled.predicted is None else f"{compiled.predicted:.3f}"
        rows.append(
            f"| {p.model} | {p.cluster} | {p.bits}{_balanced(p)} | "
            f"{p.communicating / p.computing:.2f} | {' | '.join(seconds)} | "
            f"{min(compiled.seconds):.3f} to {max(compiled.seconds):.3f} | {predicted} | "
            f"{free_links(p):.3f} | {over_best(p):.2f} | {over_ddp(p):.2f} | {forced_ratio(p):.2f} |"
        )
    return "\n".join(rows)


def _balanced(point: Point) -> str:
    """What to say of a balanced link, and of the batch over it if it is another."""
    if point.link != BALANCED:
        return ""
    size = size_over(point.link, point.size, point.model)
    batch = "" if size == point.size else f", {SIZES[size][point.model]['batch']} rows"
    return f" (balanced{batch})"


def _range(points: Sequence[Point], arm: str) -> str:
    """The least and the most of an arm's medians, in seconds."""
    medians = [p.seconds(arm) for p in points]
    return f"{min(medians):.2f} to {max(medians):.2f}"


def spread(points: Sequence[Point]) -> str:
    """The range of every arm's timed steps, as Markdown."""
    rows = [f"| {' | '.join(('model', 'cluster', 'link', *ARMS))} |", "|---|---|---|" + "--:|" * len(ARMS)]
    for p in points:
        ranges = [f"{min(p.arms[a].seconds):.3f} to {max(p.arms[a].seconds):.3f}" for a in ARMS]
        rows.append(f"| {p.model} | {p.cluster} | {p.bits} | {' | '.join(ranges)} |")
    return "\n".join(rows)


def overview(points: Sequence[Point], of: int) -> str:
    """What README says of the points, as Markdown; ``of``: how many points a whole run has."""

    def means(chosen: Sequence[Point]) -> tuple[str, str, str]:
        even = geometric_mean([p.seconds(DDP_EVEN) / p.seconds(COMPILED) for p in chosen])
        ddp, best = (geometric_mean(map(ratio, chosen)) for ratio in (over_ddp, over_best))
        return f"{even:.2f}", f"{ddp:.2f}", f"{best:.2f}"

    rows = [
        "| speeds | times faster than DDP | than DDP, proportional | than the fastest alternative |",
        "|---|--:|--:|--:|",
    ]
    for cluster in CLUSTERS:
        speeds = ":".join("1" for _ in CLUSTERS[cluster].ranks) if cluster == "equal" else cluster
        if there := [p for p in points if p.cluster == cluster]:
            rows.append(f"| {' | '.join((speeds.replace(':', ' : '), *means(there)))} |")
    worst = 1 / min(map(over_best, points))
    text = f"At no point does hetspmd take more than {worst:.2f} times the best of the others."
    if others := [p for p in points if p.model != "VGG19"]:
        _, ddp, best = means(others)
        text = (
            "VGG19, whose gradients hardly fit through such links, accounts for much of it: without it, "
            f"proportional DDP takes {ddp} times as long as hetspmd, "
            f"and the best of the others {best} times. {text}"
        )
    if len(points) < of:
        text = f"{text} (Of {len(points)} of {of} points.)"
    return "\n".join((*rows, "", *wrap(text, 120))) + "\n"


def summary(points: Sequence[Point], of: int) -> str:
    """The figures and the checks, as Markdown; ``of``: how many points a whole run has."""
    best = [over_best(p) for p in points]
    ddp = [over_ddp(p) for p in points]
    both = [over_both(p) for p in points]
    forced = [forced_ratio(p) - 1 for p in points]
    vgg = [
        f"{over_ddp(p):.2f} ({p.cluster}; {p.seconds(DDP) / free_links(p):.2f} over free links)"
        for p in points
        if p.model == "VGG19" and p.link == FASTEST_LINK
    ]
    free = [p.seconds(COMPILED) / free_links(p) for p in points]
    sizes = ", ".join(dict.fromkeys(p.size for p in points))
    worst = max(forced, key=abs)
    lines = [
        f"- {len(points)} of {of} points measured; size: {sizes}; a step of the fastest device alone takes "
        f"{_range(points, ALONE)} s, of hetspmd {_range(points, COMPILED)} s",
        f"- the best incumbent over hetspmd: geometric mean {geometric_mean(best):.2f}, "
        f"least {min(best):.2f}, most {max(best):.2f}",
        f"- proportional DDP over hetspmd: geometric mean {geometric_mean(ddp):.2f}, least {min(ddp):.2f}, most "
        f"{max(ddp):.2f}",
        f"- the best incumbent or forced data parallel over hetspmd: geometric mean {geometric_mean(both):.2f}, "
        f"least {min(both):.2f}, most {max(both):.2f}",
        f"- hetspmd over free links: geometric mean {geometric_mean(free):.2f}, least {min(free):.2f}, most "
        f"{max(free):.2f}",
        f"- forced data parallel beside proportional DDP: median {median(forced):+.1%}, the farthest {worst:+.1%}",
        f"- VGG19 at 1 Gbit/s, proportional DDP over hetspmd: {', '.join(vgg) or 'not measured'}",
        *(f"- {check}" for check in checks(points)),
    ]
    return "\n".join(lines)
