"""Results on disk: lines of JSON that an interrupted run continues, and the part of a page that is generated."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hetspmd.codec.files import write_atomically

MARKS = ("<!-- results -->\n", "<!-- end of results -->")
FASTER = ("<!-- faster -->\n", "<!-- end of faster -->")
"""Of the page of a bench; of README's part on it."""


def lacking(page: Path, marks: tuple[str, str] = MARKS) -> str:
    """Why :func:`replace_results` could not write this page; "" if it can."""
    if not page.is_file():
        return f"there is no page {page}"
    text = page.read_text(encoding="utf-8")
    missing = [mark.strip() for mark in marks if mark not in text]
    return f"{page} lacks the marks {' and '.join(missing)}" if missing else ""


def replace_results(page: Path, lines: str, marks: tuple[str, str] = MARKS) -> None:
    """Put ``lines`` between the marks of a page. Raises ValueError for a page without the marks."""
    if problem := lacking(page, marks):
        raise ValueError(problem)
    text = page.read_text(encoding="utf-8")
    head, rest = text.split(marks[0], 1)
    write_atomically(page, head + marks[0] + lines + marks[1] + rest.split(marks[1], 1)[1])


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The entries of a file of JSON lines; none if there is no file. A line that a killed run left half written is
    passed over: what it held is measured again."""
    found = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return found


def append_lines(path: Path, entries: Iterable[dict[str, Any]]) -> None:
    """Add entries; a line that a killed run left half written is ended first."""
    before = path.read_text(encoding="utf-8") if path.exists() else ""
    with path.open("a", encoding="utf-8") as file:
        if before and not before.endswith("\n"):
            file.write("\n")
        for entry in entries:
            file.write(json.dumps(entry) + "\n")


def text(points: Iterable[Any]) -> str:
    """Points, which are dataclasses, as lines of JSON."""
    return "".join(json.dumps(asdict(point)) + "\n" for point in points)


def append(folder: Path, point: Any) -> None:
    """Add a point to the folder's file of points."""
    folder.mkdir(parents=True, exist_ok=True)
    append_lines(folder / "points.jsonl", [asdict(point)])
