"""The outcomes as a page of the documentation."""

from __future__ import annotations

import importlib.metadata
import re
import sys
from collections.abc import Sequence
from datetime import date
from pathlib import Path

from foreign.judge import EQUAL, FAULTS, REFUSED, Outcome
from hetspmd.codec.files import write_atomically

MARKS = ("<!-- results -->\n", "<!-- end of results -->")

NOISY = 1e-3
"""What rounding makes of a number, of its size, from which the bound (:data:`foreign.judge.MARGIN` times as much)
says little."""


def write(
    page: Path,
    outcomes: Sequence[Outcome],
    left_out: Sequence[str],
    command: str,
    without: Sequence[str] = (),
) -> None:
    """Replace what stands between the page's marks. ``without``: cases that have no outcome yet.

    Raises ValueError for a page without marks.
    """
    text = page.read_text(encoding="utf-8")
    between = re.escape(MARKS[0]) + ".*?" + re.escape(MARKS[1])
    if not re.search(between, text, flags=re.DOTALL):
        raise ValueError(f"{page} has no marks {MARKS[0].strip()} and {MARKS[1]}")
    body = MARKS[0] + results(outcomes, left_out, command, without) + MARKS[1]
    write_atomically(page, re.sub(between, lambda _: body, text, flags=re.DOTALL))


def results(
    outcomes: Sequence[Outcome], left_out: Sequence[str], command: str, without: Sequence[str] = ()
) -> str:
    """Counts, versions and tables in Markdown."""
    parts = [
        summary(outcomes), f"`{command}`, {date.today():%Y-%m-%d}; {versions(outcomes)}.",
    ]  # fmt: skip
    if left_out:
        parts.append(f"Left out, because not installed: {', '.join(sorted(set(left_out)))}.")
    if without:
        parts.append(f"In the list, and without an outcome yet: {', '.join(without)}.")
    parts.append(counts(outcomes))
    for kind, title in (("model", "## Models"), ("loop", "## Training loops")):
        parts += [title, table([o for o in outcomes if o.kind == kind])]
    return "\n\n".join(parts) + "\n"


def summary(outcomes: Sequence[Outcome]) -> str:
    """One sentence of counts per kind."""
    said = []
    for kind in ("model", "loop"):
        of = [o.outcome for o in outcomes if o.kind == kind]
        faults = ", ".join(f"{of.count(f)} {f.lower()}" for f in FAULTS)
        said.append(f"{len(of)} {kind}s: {of.count(EQUAL)} equal, {of.count(REFUSED)} refused, {faults}.")
    return "  \n".join(said)


def counts(outcomes: Sequence[Outcome]) -> str:
    """A row per package."""
    head = (EQUAL, REFUSED, *FAULTS)
    lines = [f"| package | {' | '.join(head)} |", f"|---|{'--:|' * len(head)}"]
    for package in dict.fromkeys(o.package for o in outcomes):
        of = [o.outcome for o in outcomes if o.package == package]
        lines.append(f"| {package} | {' | '.join(str(of.count(h)) for h in head)} |")
    return "\n".join(lines)


def table(outcomes: Sequence[Outcome]) -> str:
    """A row per case."""
    lines = ["| name | package | outcome | divided | what it says |", "|---|---|---|--:|---|"]
    for o in outcomes:
        divided = "" if o.divided is None else f"{o.divided:.0%}"
        detail = o.detail
        if o.missing:
            detail = f"computed whole, without a rule: {', '.join(o.missing)}. {detail}".strip()
        if o.outcome == EQUAL and o.noise > NOISY:
            detail = f"a tensor or more is rounding alone, and is not told from another. {detail}".strip()
        lines.append(f"| {o.name} | {o.package} | {o.outcome} | {divided} | {_cell(detail)} |")
    return "\n".join(lines)


def _cell(text: str) -> str:
    text = re.sub(r"/\S*/benches/", "benches/", text)
    for folder in sorted(filter(None, set(sys.path)), key=len, reverse=True):
        text = text.replace(folder.rstrip("/") + "/", "")
    text = re.sub(r"/\S*?/site-packages/", "", text)
    return text.replace("|", "\\|").replace("<", "&lt;")


def versions(outcomes: Sequence[Outcome]) -> str:
    """Name and version of each package, and of torch."""
    of_import = importlib.metadata.packages_distributions()
    found = []
    for package in dict.fromkeys(["torch", *(o.package for o in outcomes)]):
        names = of_import.get(package, [])
        found.append(f"{package} {importlib.metadata.version(names[0])}" if names else package)
    return ", ".join(found)
