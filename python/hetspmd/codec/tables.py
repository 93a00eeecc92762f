"""Plain text tables."""

from __future__ import annotations

from collections.abc import Sequence


def counted(count: int, what: str) -> str:
    """``1 device``, ``2 devices``."""
    return f"{count} {what}{'' if count == 1 else 's'}"


def table(header: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[int] = ()) -> str:
    """Columns as wide as their widest cell, two spaces apart; the columns in ``right`` are right-aligned."""
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        padded = (
            cell.rjust(w) if i in right else cell.ljust(w)
            for i, (cell, w) in enumerate(zip(cells, widths, strict=True))
        )
        return "  ".join(padded).rstrip()

    return "\n".join(["  " + line(row) for row in (header, *rows)])


def shortened(text: str, width: int) -> str:
    """``text`` with its middle left out where it is longer than ``width``."""
    if len(text) <= width:
        return text
    keep = width - 3
    return text[: keep - keep // 2] + "..." + text[len(text) - keep // 2 :]
